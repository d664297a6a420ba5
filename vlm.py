"""The command line: names every process and tool, and starts the one that is asked for.

Each command imports what it needs when it runs, so that a gateway never loads torch.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel

from shared.settings import (
    EngineSettings,
    GatewaySettings,
    LogSettings,
    RedisSettings,
    Settings,
    SettingsError,
)
from shared.settings_loading import load_settings

app = typer.Typer(
    name="vlm",
    help="A gateway and a fleet of workers for vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure parts of the system on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def setting(group: type[BaseModel], name: str, *flags: str) -> Any:
    """An option that overrides one setting; its help, choices and default are the setting's own."""
    field = group.model_fields[name]
    default = "the model's own" if field.default in (None, "") else str(field.default)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return typer.Option(
        *flags,
        help=(field.description or "").replace("[", "\\["),
        metavar="|".join(choices) or None,
        show_default=default,
    )


Host = Annotated[str | None, setting(GatewaySettings, "host", "--host")]
Port = Annotated[int | None, setting(GatewaySettings, "port", "--port")]
AllowOpen = Annotated[bool | None, setting(GatewaySettings, "allow_open", "--allow-open")]
EngineKind = Annotated[str | None, setting(EngineSettings, "kind", "--engine")]
Model = Annotated[str | None, setting(EngineSettings, "model", "--model")]
ServedName = Annotated[str | None, setting(EngineSettings, "served_name", "--served-name")]
Device = Annotated[str | None, setting(EngineSettings, "device", "--device")]
Dtype = Annotated[str | None, setting(EngineSettings, "dtype", "--dtype")]
Quantization = Annotated[str | None, setting(EngineSettings, "quantization", "--quantization")]
MaxNumSeqs = Annotated[int | None, setting(EngineSettings, "max_num_seqs", "--max-num-seqs")]
MaxModelLen = Annotated[int | None, setting(EngineSettings, "max_model_len", "--max-model-len")]
RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", help=RedisSettings.model_fields["url"].description),
]
LogLevel = Annotated[str | None, setting(LogSettings, "level", "--log-level")]
DieWithParent = Annotated[bool, typer.Option("--die-with-parent", hidden=True)]


def main() -> None:
    """Run the command; a wrong setting is one clear line and exit code 78."""
    try:
        app()
    except SettingsError as error:
        typer.secho(str(error), err=True, fg="red")
        sys.exit(os.EX_CONFIG)


def given(**values: Any) -> dict[str, Any]:
    """The values that the user gave."""
    return {name: value for name, value in values.items() if value is not None}


def start(target: str, *arguments: Any) -> Any:
    """Import `module:function` and call it."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)(*arguments)


@app.command()
def serve(
    host: Host = None,
    port: Port = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    engine: EngineKind = None,
    model: Model = None,
    served_name: ServedName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    redis_url: RedisUrl = None,
    allow_open: AllowOpen = None,
    log_level: LogLevel = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where the bundled Redis keeps its files.", show_default="by port"),
    ] = None,
) -> None:
    """Start everything on this machine: Redis, a gateway and workers."""
    settings = load_settings(
        gateway=given(host=host, port=port, allow_open=allow_open),
        engine=given(
            kind=engine,
            model=model,
            served_name=served_name,
            device=device,
            dtype=dtype,
            quantization=quantization,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        ),
        redis=given(url=redis_url),
        logs=given(level=log_level),
    )
    sys.exit(start("gateway.serve:run_fleet", settings, workers, data_dir))


@app.command()
def gateway(
    host: Host = None,
    port: Port = None,
    redis_url: RedisUrl = None,
    allow_open: AllowOpen = None,
    log_level: LogLevel = None,
    die_with_parent: DieWithParent = False,
) -> None:
    """Run one gateway process. Redis is the one that VLM_REDIS_URL names."""
    settings = load_settings(
        gateway=given(host=host, port=port, allow_open=allow_open),
        redis=given(url=redis_url),
        logs=given(level=log_level),
    )
    run_process("gateway", "gateway.main:run_gateway", settings, die_with_parent)


@app.command()
def worker(
    engine: EngineKind = None,
    model: Model = None,
    served_name: ServedName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    redis_url: RedisUrl = None,
    log_level: LogLevel = None,
    die_with_parent: DieWithParent = False,
) -> None:
    """Run one worker process. Redis is the one that VLM_REDIS_URL names."""
    settings = load_settings(
        engine=given(
            kind=engine,
            model=model,
            served_name=served_name,
            device=device,
            dtype=dtype,
            quantization=quantization,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        ),
        redis=given(url=redis_url),
        logs=given(level=log_level),
    )
    run_process("worker", "worker.main:run_worker", settings, die_with_parent)


def run_process(name: str, target: str, settings: Settings, die_with_parent: bool) -> None:
    """Run one long-lived process of the fleet until it ends."""
    if not settings.redis.url:
        raise SettingsError("VLM_REDIS_URL: no Redis is named (`vlm serve` brings its own)")
    if die_with_parent:
        start("shared.process:die_with_parent")
    start("shared.logs:setup_logging", settings.logs, name)
    sys.exit(start(target, settings))


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="What to ask; without it, a conversation.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", "-i", help="A picture; may be repeated.")
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
    """Ask a question about pictures and watch the answer come, with the time of each stage."""
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
    start("engines.torch_backend.make_checkpoint:run", shape, directory, seed)


@app.command("settings")
def show_settings(
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
) -> None:
    """List every setting: its variable, its default and what it means."""
    start("shared.settings_table:show", markdown)


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
