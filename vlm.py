"""The command line: names every process and tool, and starts the one that is asked for.

Each command imports what it needs when it runs, so that a gateway never loads torch.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from engines import commands as engine_commands
from loadtest import commands as loadtest_commands
from shared.settings.load import load_settings
from shared.settings.tree import Settings, SettingsError

app = typer.Typer(
    name="vlm",
    help="A gateway and a fleet of workers for vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure parts of the system on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(loadtest_commands.app, name="loadtest")


#: Options that override settings: by group of settings, the field and its flag.
ENGINE = {
    "kind": "--engine",
    "model": "--model",
    "served_name": "--served-name",
    "device": "--device",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "max_num_seqs": "--max-num-seqs",
    "max_model_len": "--max-model-len",
}
GATEWAY = {"host": "--host", "port": "--port", "allow_open": "--allow-open"}
REDIS = {"url": "--redis-url"}
LOGS = {"level": "--log-level"}
DieWithParent = Annotated[bool, typer.Option("--die-with-parent", hidden=True)]


def takes_settings(
    **groups: dict[str, str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; its `settings` are loaded with them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            overrides: dict[str, Any] = {}
            for group, flags in groups.items():
                given = {field: values.pop(f"{group}_{field}") for field in flags}
                overrides[group] = {name: v for name, v in given.items() if v is not None}
            if values.get("die_with_parent"):
                overrides["_env_file"] = (
                    None  # its parent has read it, and hands on what is its own
                )
            command(settings=load_settings(**overrides), **values)

        own = dict(signature(command).parameters)
        del own["settings"]
        options = [
            setting_option(group, *item)
            for group, flags in groups.items()
            for item in flags.items()
        ]
        parameters = [*options, *(item.replace(kind=item.KEYWORD_ONLY) for item in own.values())]
        call.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {item.name: item.annotation for item in parameters}
        return call

    return decorate


def setting_option(group: str, name: str, flag: str) -> Parameter:
    """A command's parameter for one setting; help, choices and default are the setting's own."""
    field = Settings.model_fields[group].annotation.model_fields[name]  # pyright: ignore
    default = "the model's own" if field.default in (None, "") else str(field.default)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    is_number = int in (field.annotation, *get_args(field.annotation))
    kind = bool if field.annotation is bool else int if is_number else str
    option = typer.Option(
        flag,
        help=(field.description or "").replace("[", "\\["),
        metavar="|".join(choices) or None,
        show_default=default if group != "redis" else False,
    )
    annotation = Annotated[kind | None, option]
    name = f"{group}_{name}"
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def main() -> None:
    """Run the command; a wrong setting is one clear line and exit code 78."""
    try:
        app()
    except SettingsError as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(os.EX_CONFIG)


def start(target: str, *arguments: Any) -> Any:
    """Import `module:function` and call it."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)(*arguments)


@app.command()
@takes_settings(gateway=GATEWAY, engine=ENGINE, redis=REDIS, logs=LOGS)
def serve(
    settings: Settings,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where the bundled Redis keeps its files.", show_default="by port"),
    ] = None,
) -> None:
    """Start everything on this machine: Redis, a gateway and workers."""
    sys.exit(start("worker.node.serve:run_fleet", settings, workers, data_dir))


@app.command()
@takes_settings(gateway=GATEWAY, redis=REDIS, logs=LOGS)
def gateway(settings: Settings, die_with_parent: DieWithParent = False) -> None:
    """Run one gateway process. Redis is the one that VLM_REDIS_URL names."""
    run_process("gateway", "gateway.main:run_gateway", settings, die_with_parent)


@app.command()
@takes_settings(engine=ENGINE, redis=REDIS, logs=LOGS)
def worker(settings: Settings, die_with_parent: DieWithParent = False) -> None:
    """Run one worker process. Redis is the one that VLM_REDIS_URL names."""
    run_process("worker", "worker.main:run_worker", settings, die_with_parent)


def run_process(name: str, target: str, settings: Settings, die_with_parent: bool) -> None:
    """Run one long-lived process of the fleet until it ends."""
    if not settings.redis.url:
        raise SettingsError("VLM_REDIS_URL: no Redis is named (`vlm serve` brings its own)")
    if die_with_parent:
        start("shared.process:die_with_parent")
    start("shared.telemetry.logs:setup_logging", settings.logs, name)
    sys.exit(start(target, settings))


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="What to ask; without it, a conversation.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", "-i", help="A image; may be repeated.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the gateway listens.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the server's first")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Ask a question about images and watch the answer come, with the time of each stage."""
    chat_module = import_module("loadtest.chat")
    try:
        chat_module.run_chat(url, model, api_key, image or [], question, max_tokens, temperature)
    except chat_module.ChatError as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(1)


@app.command()
def status(
    url: Annotated[str, typer.Option(help="Where the gateway listens.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")] = False,
    pause_s: Annotated[float, typer.Option("--pause", min=0.2, help="Seconds between looks.")] = 2,
) -> None:
    """Show a fleet's models, workers, queues, rates and the time of each stage."""
    status_module = import_module("loadtest.status")
    try:
        status_module.run_status(url, api_key, pause_s if watch else None)
    except status_module.StatusError as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(1)


@app.command()
def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Where to write it; new or empty.")],
    shape: Annotated[str, typer.Option(help="tiny, llava-1b or llava-1.5-7b.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a checkpoint of a real shape with random weights, for tests and benchmarks."""
    start("engines.torch_backend.loading.make_checkpoint:run", shape, directory, seed)


app.command()(engine_commands.quantize)
bench.command("engine")(engine_commands.bench_engine)
bench.command("peers")(engine_commands.bench_peers)


@app.command("settings")
def show_settings(
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
) -> None:
    """List every setting: its variable, its default and what it means."""
    start("shared.settings.table:show", markdown)


@bench.command("gateway")
def bench_gateway(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    connections: Annotated[str, typer.Option(help="Comma-separated numbers.")] = "1,8,32,128",
    markdown: Annotated[bool, typer.Option(help="Print tables for a document.")] = False,
) -> None:
    """Drive HTTP, Redis, worker and mock engine beside a bare FastAPI endpoint."""
    counts = [int(number) for number in connections.split(",")]
    start("loadtest.bench_gateway:run", seconds, rounds, counts, markdown)


if __name__ == "__main__":
    main()
