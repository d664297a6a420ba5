"""The commands of the gateway and its clients: `vlm gateway`, `chat`, `status`, `bench gateway`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.cli_lists import numbers
from shared.gateway_url import URL, Url
from shared.settings.options import LISTEN, takes_settings

if TYPE_CHECKING:
    from shared.settings.tree import Settings

ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
]


@takes_settings(LISTEN, process="gateway")
def gateway(settings: "Settings") -> None:
    """Run one gateway process. Redis is the one that VLM_REDIS_URL names."""
    from gateway.main import run_gateway

    sys.exit(run_gateway(settings))


def chat(
    question: Annotated[
        str | None, typer.Argument(help="What to ask; without it, a conversation.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", "-i", help="An image; may be repeated.")
    ] = None,
    url: Url = URL,
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the server's first")
    ] = None,
    api_key: ApiKey = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Ask a question about images and watch the answer come, with the time of each stage."""
    from gateway.client.chat import ChatError, run_chat

    try:
        run_chat(url, model, api_key, image or [], question, max_tokens, temperature)
    except ChatError as error:
        _fail(error)


def status(
    url: Url = URL,
    api_key: ApiKey = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")] = False,
    pause_s: Annotated[float, typer.Option("--pause", min=0.2, help="Seconds between looks.")] = 2,
) -> None:
    """Show a fleet's models, workers, queues, rates and the time of each stage."""
    from gateway.client.status import StatusError, run_status

    try:
        run_status(url, api_key, pause_s if watch else None)
    except StatusError as error:
        _fail(error)


def _fail(error: Exception) -> None:
    typer.secho(str(error), err=True, fg="red")
    sys.exit(1)


def bench_gateway(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    connections: Annotated[
        str, typer.Option(help="Comma-separated numbers.", callback=numbers())
    ] = "1,8,32,128",
    depth: Annotated[
        str,
        typer.Option(
            help="Measure a request's cost where so many wait: 0,1000,30000.", callback=numbers(0)
        ),
    ] = "",
    streams: Annotated[
        int, typer.Option(min=0, max=4000, help="Measure the memory of so many open streams.")
    ] = 0,
    homes: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Measure cache hits of so many workers, with homes and without."
        ),
    ] = 0,
    against: Annotated[
        Path | None,
        typer.Option(help="Measure beside another checkout of this project, in its folder."),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print tables for a document.")] = False,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Vectors of a short text in place of chat.")
    ] = False,
) -> None:
    """Drive HTTP, Redis, worker and mock engine beside a bare FastAPI endpoint."""
    from gateway.bench.against import run_against
    from gateway.bench.homes import run_homes
    from gateway.bench.run import BenchError, run, show
    from gateway.bench.waiting import run_depths, run_streams

    if not (depth or streams or homes or against):
        run(seconds, rounds, _numbers(connections), markdown, embeddings)
        return
    try:
        tables = run_depths(_numbers(depth)) if depth else []
        tables += run_streams(streams) if streams else []
        tables += run_homes(homes, rounds) if homes else []
        if against is not None:
            tables += run_against(against, seconds, rounds, _numbers(connections))
    except BenchError as error:
        _fail(error)
    else:
        show(tables, markdown)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
