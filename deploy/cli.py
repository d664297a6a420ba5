"""Deployment commands: `vlm deploy`, `apps`, `app`, `logs`, `promote`, `rollback`, `scale`, `route`, `undeploy`, `gc`.

Exit codes: 0: success, 1: wrong arguments, 2: packaging failed, 3: the upload failed, 4: the gateway refused the
request, 5: the rollout failed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from shared.gateway_url import URL, DeployKey, Url
from shared.options import FiniteCommand

if TYPE_CHECKING:
    from shared.gateway_client import Client

Name = Annotated[str, typer.Argument(help="Name of the deployment.", show_default=False)]
Form = Annotated[
    Literal["yaml", "json"] | None, typer.Option("-o", help="Print data in this format.")
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", "--timeout", min=0, help="Seconds to wait for the outcome; 0: do not wait."
    ),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the outcome.")]
ARGUMENTS = 1
_UsageError = typer.BadParameter.__mro__[1]  # typer bundles click without exporting this class


def commands():
    """Import the implementation when a command runs: `--help` is fast without it."""
    from deploy import commands

    return commands


@contextmanager
def _ending_with_arguments() -> Iterator[None]:
    """Exit with 1 on wrong arguments. Typer would exit with 2, the code for failed packaging."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _UsageError):
            error.exit_code = ARGUMENTS  # pyright: ignore[reportAttributeAccessIssue]
        raise


def _many(option: str, metavar: str, text: str) -> Any:
    return typer.Option(option, metavar=metavar, help=text, show_default=False)


class GatewayCommand(FiniteCommand):
    """A command that calls a gateway. On a failure, it prints one line and exits with the code of the failure."""

    def invoke(self, ctx: Any) -> Any:
        from shared.gateway_client import ApiFailed

        try:
            return super().invoke(ctx)
        except (commands().CommandFailed, ApiFailed) as error:
            commands().console.print(str(error), style="red", soft_wrap=True)
            sys.exit(error.code if isinstance(error, commands().CommandFailed) else commands().API)
        except KeyboardInterrupt:
            sys.exit(commands().INTERRUPTED)


class Command(GatewayCommand):
    """A command that exits with 1 if its arguments are wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _ending_with_arguments():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _ending_with_arguments():
            return super().invoke(ctx)


class Group(TyperGroup):
    """A group of commands that exits with 1 if its arguments are wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _ending_with_arguments():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _ending_with_arguments():
            return super().resolve_command(ctx, args)


#: Options of `deploy` for the spec, and for the package with its environment.
SPEC = ("min_instances", "max_instances", "resources", "canary", "start_s", "idle_s", "retry_limit")
PACKAGE = ("engine", "entry", "command", "installed", "env", "secret")

Needs = Annotated[str, typer.Option(help="Resources of an instance: cpu=2,memory=4g,gpu=1.")]
Canary = Annotated[
    str, typer.Option(help="Initial fraction of requests for the new version, such as 10%.")
]
StartS = Annotated[
    float, typer.Option(help="Seconds in which an installed instance must become ready.")
]
IdleS = Annotated[float, typer.Option(help="Seconds without work before an instance stops.")]
RetryLimit = Annotated[int, typer.Option(min=0, help="Failed starts before a rollback.")]
Texts = list[str] | None
EngineSettings = Annotated[
    Texts,
    _many(
        "--set",
        "NAME=VALUE",
        "A setting of the model's engine, such as quantization=int8. The package includes it.",
    ),
]
Entry = Annotated[str, typer.Option(help="module:Class of a Python application.")]
Program = Annotated[str, typer.Option(help="Command line that starts an executable.")]
Installed = Annotated[
    bool,
    typer.Option("--installed", help="--command is a path on the nodes: nothing is uploaded."),
]
Env = Annotated[
    Texts, _many("--env", "NAME=VALUE", "A variable of an application; not for secrets.")
]
Secret = Annotated[
    Texts,
    _many(
        "--secret",
        "NAME[=SECRET]",
        "A variable of an application, read from the node's secret SECRET (by default NAME). "
        "Do not pass the value itself.",
    ),
]


def deploy(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Name of the deployment.", show_default=False)],
    application: Annotated[
        str,
        typer.Option(
            help="A model directory, a hub id, a Python application, an executable, or a .tar.gz.",
            show_default=False,
        ),
    ] = "",
    url: Url = URL,
    api_key: DeployKey = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="URL of a package store to write to directly.",
            show_default="upload to the gateway, which uses its own store",
        ),
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(help="An SSH key that signs the package.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    target: Annotated[
        Literal["fleet", "kubernetes"],
        typer.Option(help="kubernetes: upload the package, and print manifests of its workers."),
    ] = "fleet",
    image: Annotated[
        str, typer.Option(help="Container image of the workers on Kubernetes.")
    ] = "vlm-fleet-worker",
    output: Annotated[
        Literal["yaml", "json"], typer.Option("-o", help="Format of --dry-run and --target.")
    ] = "yaml",
    wait: Wait = 300, no_wait: NoWait = False,
    min_instances: Annotated[int, typer.Option(min=0)] = 0,
    max_instances: Annotated[int, typer.Option(min=1)] = 4,
    resources: Needs = "cpu=1", canary: Canary = "0", start_s: StartS = 300, idle_s: IdleS = 300,
    retry_limit: RetryLimit = 3, engine: EngineSettings = None, entry: Entry = "",
    command: Program = "", installed: Installed = False, env: Env = None, secret: Secret = None,
) -> None:  # fmt: skip
    """Package an application or a model, and deploy it under a name."""
    given = context.params
    spec = commands().make_spec(**{option: given[option] for option in SPEC})
    commands().run_deploy(
        connect(url, api_key), name, application, spec, {option: given[option] for option in PACKAGE},
        store_url=store, signing_key=sign, is_dry=dry_run, form=output,
        image=image if target == "kubernetes" else None, wait_s=0 if no_wait else wait,
    )  # fmt: skip


def connect(url: str, key: str | None) -> "Client":
    from shared.gateway_client import Client

    return Client(url, key)


def apps(url: Url = URL, api_key: DeployKey = None, output: Form = None) -> None:
    """List the deployments."""
    commands().run_apps(connect(url, api_key), output)


def app(
    name: Name,
    url: Url = URL,
    api_key: DeployKey = None,
    output: Form = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Show a deployment: its generations, instances and events."""
    commands().run_app(connect(url, api_key), name, output, 1.0 if watch else None)


def logs(
    name: Name,
    slot: Annotated[
        int | None, typer.Option(help="Number of one instance.", show_default="all")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000)] = 100,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Show the log of a deployment's instances, including stopped ones and failed starts."""
    commands().run_logs(connect(url, api_key), name, slot, lines)


def promote(name: Name, url: Url = URL, api_key: DeployKey = None) -> None:
    """Make the canary the active version."""
    commands().run_change(connect(url, api_key), "POST", f"/{name}:promote", {})


def rollback(
    name: Name,
    to: Annotated[
        int | None,
        typer.Option(help="Generation to roll back to.", show_default="the last active version"),
    ] = None,
    url: Url = URL,
    api_key: DeployKey = None,
    wait: Wait = 300,
) -> None:
    """Roll back the candidate; without a candidate, roll back to the previous version."""
    body = {} if to is None else {"generation": to}
    commands().run_change(connect(url, api_key), "POST", f"/{name}:rollback", body, wait)


def scale(
    name: Name,
    least: Annotated[int | None, typer.Option("--min", min=0, show_default="unchanged")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, show_default="unchanged")] = None,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Change the minimum and maximum number of instances."""
    given = {"min_instances": least, "max_instances": most}
    body = {name: value for name, value in given.items() if value is not None}
    if not body:
        raise typer.BadParameter("give --min, --max or both")
    commands().run_change(connect(url, api_key), "POST", f"/{name}:scale", body)


def route(
    name: Name,
    weights: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VERSION=WEIGHT...",
            help="Versions as `vlm apps` shows them.",
            show_default=False,
        ),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the route.")] = False,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Split a name's requests between versions by weight, for example between versions on Kubernetes."""
    if delete == bool(weights):
        raise typer.BadParameter("give VERSION=WEIGHT, or --delete")
    commands().run_route(connect(url, api_key), name, weights or [])


def undeploy(name: Name, url: Url = URL, api_key: DeployKey = None) -> None:
    """Remove a deployment; waiting requests are still answered."""
    commands().run_change(connect(url, api_key), "DELETE", f"/{name}", None)


def nodes(url: Url = URL, api_key: DeployKey = None, output: Form = None) -> None:
    """List the nodes that run deployments."""
    commands().run_nodes(connect(url, api_key), output)


def drain(
    node: Annotated[str, typer.Argument(help="Id of the node, as `vlm nodes` shows it.")],
    url: Url = URL,
    api_key: DeployKey = None,
    wait: Wait = 300,
) -> None:
    """Stop a node after its current requests; other nodes restart its instances."""
    commands().run_drain(connect(url, api_key), node, wait)


def plan(
    rate: Annotated[float, typer.Option(min=0.001, max=1e6, help="Requests per second.")],
    tokens: Annotated[int, typer.Option(min=1, max=10**6, help="Output tokens per request.")] = 200,
    prompt: Annotated[
        int, typer.Option(min=1, max=10**7, help="Prompt tokens per request, without images.")
    ] = 200,
    images: Annotated[float, typer.Option(min=0, max=1000, help="New images per request.")] = 1.0,
    image_bytes: Annotated[int, typer.Option(min=1, max=10**9)] = 200_000,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="JSON file that `vlm bench gateway` and `vlm bench engine --model NAME` write with --figures.",
            show_default="figures of the built-in model",
        ),
    ] = None,
) -> None:
    """Compute the workers, gateways, Redis servers and memory that a load needs."""
    from deploy import capacity

    try:
        found = capacity.read_figures(path := figures or capacity.BUILT_IN)
        if found.fleet is None or found.engine is None:
            missing = "gateway" if found.fleet is None else "engine --model NAME"
            raise capacity.NoFigures(f"{path}: add figures: vlm bench {missing} --figures {path}")
        load = capacity.Load(rate, prompt, tokens, images, image_bytes)
        capacity.show(
            capacity.make_plan(load, found.fleet, found.engine), found.fleet, found.engine
        )
    except capacity.NoFigures as error:
        raise typer.BadParameter(f"{error}", param_hint="--figures") from None


def gc(
    store: Annotated[
        str | None, typer.Option(help="URL of the package store.", show_default="the gateway's")
    ] = None,
    older_than_h: Annotated[
        float, typer.Option(min=0, help="Minimum age in hours of the packages to remove.")
    ] = 24,
    keep: Annotated[
        int, typer.Option(min=1, help="Generations of each deployment to keep for rollbacks.")
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, without removing.")] = False,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Remove from the store the packages that no deployment references."""
    url = store or commands().find_store(connect(url, api_key))
    commands().run_gc(url, older_than_h * 3600, keep, is_dry=dry_run)


#: Commands that exit with 1 if their arguments are wrong.
COMMANDS = (
    deploy, apps, app, logs, promote, rollback, scale, route, undeploy, nodes, drain, gc, plan,
)  # fmt: skip
