"""The commands of who deploys: `vlm deploy`, `apps`, `app`, `promote`, `rollback`, `scale`, `undeploy`, `gc`.

They end with 0, or 1: wrong arguments, 2: no package can be made, 3: it cannot be uploaded, 4: the gateway
refuses, 5: the rollout failed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from shared.gateway_url import URL, DeployKey, Url

if TYPE_CHECKING:
    from deploy.client import Client

Name = Annotated[str, typer.Argument(help="Of the deployment.", show_default=False)]
Form = Annotated[Literal["yaml", "json"] | None, typer.Option("-o", help="Print it as data.")]
Wait = Annotated[
    float,
    typer.Option("--wait", "--timeout", min=0, help="Seconds to wait for the outcome; 0: do not."),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the outcome.")]
ARGUMENTS = 1
_UsageError = typer.BadParameter.__mro__[1]  # typer brings a click of its own


@contextmanager
def _ending_with_arguments() -> Iterator[None]:
    """Wrong arguments end with 1: 2 is for packages."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _UsageError):
            error.exit_code = ARGUMENTS  # pyright: ignore[reportAttributeAccessIssue]
        raise


class Command(TyperCommand):
    """A command with our exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. Raises: UsageError, Exit."""
        with _ending_with_arguments():
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. Raises: UsageError, Exit."""
        with _ending_with_arguments():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click. Raises: UsageError."""
        with _ending_with_arguments():
            return super().resolve_command(ctx, args)


def deploy(
    name: Annotated[str, typer.Option(help="Under which it is served.", show_default=False)],
    application: Annotated[
        str,
        typer.Option(
            help="A model directory, a hub id, a Python application, an executable, or a .tar.gz.",
            show_default=False,
        ),
    ] = "",
    url: Url = URL,
    api_key: DeployKey = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the model's engine, part of the package, as quantization=int8.",
            show_default=False,
        ),
    ] = None,
    entry: Annotated[str, typer.Option(help="module:Class of a Python application.")] = "",
    command: Annotated[str, typer.Option(help="What runs an executable's package.")] = "",
    installed: Annotated[
        bool,
        typer.Option(
            "--installed", help="--command is a path that nodes have: nothing is uploaded."
        ),
    ] = False,
    min_instances: Annotated[int, typer.Option(min=0)] = 0,
    max_instances: Annotated[int, typer.Option(min=1)] = 4,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="A variable of an application; not for secrets.",
            show_default=False,
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME[=SECRET]",
            help="A variable of an application with the node's secret of that name, or another; never its value.",
            show_default=False,
        ),
    ] = None,
    resources: Annotated[
        str, typer.Option(help="Of one instance: cpu=2,memory=4g,gpu=1.")
    ] = "cpu=1",
    canary: Annotated[
        str, typer.Option(help="Share of the requests that the new version gets at first, as 10%.")
    ] = "0",
    canary_latency: Annotated[
        float,
        typer.Option(
            help="Roll a canary back that takes so many times as long as the old version, as 2; 0: do not."
        ),
    ] = 0,
    start_s: Annotated[float, typer.Option(help="In which it has to be ready.")] = 300,
    idle_s: Annotated[float, typer.Option(help="Without work, before an instance stops.")] = 300,
    retry_limit: Annotated[int, typer.Option(min=0, help="Failed starts that it may have.")] = 3,
    store: Annotated[
        str | None,
        typer.Option(help="Where packages go.", show_default="the gateway's, and through it"),
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(help="An SSH key that signs the package.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")] = False,
    target: Annotated[
        Literal["fleet", "kubernetes"],
        typer.Option(help="kubernetes: print manifests of nodes for this version, and do nothing."),
    ] = "fleet",
    output: Annotated[
        Literal["yaml", "json"], typer.Option("-o", help="Of --dry-run and --target.")
    ] = "yaml",
    wait: Wait = 300,
    no_wait: NoWait = False,
) -> None:
    """Make a package, and have it served under a name."""
    import shlex

    from deploy import commands

    def run() -> None:
        spec = commands.make_spec(
            resources=resources, canary=canary, min_instances=min_instances,
            max_instances=max_instances, start_s=start_s, idle_s=idle_s, retry_limit=retry_limit,
            canary_latency=canary_latency,
        )  # fmt: skip
        settings = dict(_assignment("--set", each) for each in engine or ())
        variables = dict(_assignment("--env", each) for each in env or ())
        named = (each.partition("=") for each in secret or ())
        environment = commands.make_environment(
            variables, {name.strip(): other or name.strip() for name, _, other in named}
        )
        commands.run_deploy(
            _client(url, api_key), name, application, spec, engine=settings, entry=entry,
            command=shlex.split(command), is_installed=installed, environment=environment, store_url=store,
            signing_key=sign, dry_run=output if dry_run or target == "kubernetes" else None,
            target=target,
            wait_s=0 if no_wait else wait,
        )  # fmt: skip

    commands.finish(run)


def _assignment(option: str, text: str) -> tuple[str, str]:
    from deploy.commands import CommandFailed

    name, equals, value = text.partition("=")
    if not equals:
        raise CommandFailed(f"{option} {name}: write NAME=VALUE", ARGUMENTS)
    return name.strip(), value


def _client(url: str, key: str | None) -> "Client":
    from deploy.client import Client

    return Client(url, key)


def _change(
    url: str, key: str | None, method: str, path: str, body: dict[str, Any] | None, wait: float = 0
) -> None:
    from deploy import commands

    commands.finish(lambda: commands.run_change(_client(url, key), method, path, body, wait))


def apps(url: Url = URL, api_key: DeployKey = None, output: Form = None) -> None:
    """List what is deployed."""
    from deploy import commands

    commands.finish(lambda: commands.run_apps(_client(url, api_key), output))


def app(
    name: Name,
    url: Url = URL,
    api_key: DeployKey = None,
    output: Form = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")] = False,
) -> None:
    """Show a deployment: its generations, instances and events."""
    from deploy import commands

    pause_s = 1.0 if watch else None
    commands.finish(lambda: commands.run_app(_client(url, api_key), name, output, pause_s))


def logs(
    name: Name,
    slot: Annotated[
        int | None, typer.Option(help="Of one instance.", show_default="all of them")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000)] = 100,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Show what the instances of a deployment have logged, also those that ended or never started."""
    from deploy import commands

    commands.finish(lambda: commands.run_logs(_client(url, api_key), name, slot, lines))


def promote(name: Name, url: Url = URL, api_key: DeployKey = None) -> None:
    """Have a canary serve all requests."""
    _change(url, api_key, "POST", f"/{name}:promote", {})


def rollback(
    name: Name,
    to: Annotated[
        int | None, typer.Option(help="Generation.", show_default="the last that served before")
    ] = None,
    url: Url = URL,
    api_key: DeployKey = None,
    wait: Wait = 300,
) -> None:
    """Take a new version back; where none is on its way, have the one before serve again."""
    body = {} if to is None else {"generation": to}
    _change(url, api_key, "POST", f"/{name}:rollback", body, wait)


def scale(
    name: Name,
    least: Annotated[int | None, typer.Option("--min", min=0, show_default="as it is")] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, show_default="as it is")] = None,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Change how many instances there may be."""
    given = {"min_instances": least, "max_instances": most}
    body = {name: value for name, value in given.items() if value is not None}
    if not body:
        error = typer.BadParameter("give --min, --max or both")
        error.exit_code = ARGUMENTS
        raise error
    _change(url, api_key, "POST", f"/{name}:scale", body)


def undeploy(name: Name, url: Url = URL, api_key: DeployKey = None) -> None:
    """Stop serving a name; what waits is still answered."""
    _change(url, api_key, "DELETE", f"/{name}", None)


def gc(
    store: Annotated[
        str | None, typer.Option(help="Which store.", show_default="the gateway's")
    ] = None,
    older_than_h: Annotated[
        float, typer.Option(min=0, help="Only what is older than so many hours.")
    ] = 24,
    keep: Annotated[
        int, typer.Option(min=1, help="Generations of each deployment that can be gone back to.")
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and remove nothing.")] = False,
    url: Url = URL,
    api_key: DeployKey = None,
) -> None:
    """Remove packages from the store that no deployment names."""
    from deploy import commands

    commands.finish(
        lambda: commands.run_gc(
            lambda: store or commands.find_store(_client(url, api_key)),
            older_than_h * 3600, keep, is_dry=dry_run,
        )
    )  # fmt: skip


def add_to(root: typer.Typer) -> None:
    """Put the commands into the command line."""
    for command in (deploy, apps, app, logs, promote, rollback, scale, undeploy, gc):
        root.command(cls=Command)(command)
