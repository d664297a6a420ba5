"""The `vlm bench` commands. Torch is imported by the command that needs it."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def main() -> None:
    """Measure parts of the system on this machine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit stops the started servers


def _numbers(text: str) -> str:
    """Option callback that accepts comma-separated positive integers."""
    for each in text.split(","):
        if not each.strip().isdecimal() or int(each) < 1:
            raise typer.BadParameter(f"{each!r} is not an integer of at least 1")
    return text


def _names(*known: str) -> Callable[[str], str]:
    """Option callback that accepts a comma-separated list of the known names."""

    def check(text: str) -> str:
        for each in text.split(","):
            if each.partition("://")[0] not in known:
                raise typer.BadParameter(f"{each!r} is not one of {', '.join(known)}")
        return text

    return check


def _to_ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@contextmanager
def _faults_end(command: str) -> Iterator[None]:
    """Exit with the reason if a server fails or a model cannot be used."""
    from httpx import HTTPError

    from benchmarks.gateway.client import BenchError
    from engines.base import EngineStartError, RequestError
    from loadtest.fleet import ServerError

    errors = (
        BenchError,
        EngineStartError,
        HTTPError,
        OSError,
        RequestError,
        ServerError,
        ValueError,
    )
    try:
        yield
    except errors as error:
        raise SystemExit(f"bench {command}: {type(error).__name__}: {error}") from None


@app.command("gateway")
def bench_gateway(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    connections: Annotated[
        str, typer.Option(help="Comma-separated numbers of connections.", callback=_numbers)
    ] = "1,8,32,128",
    growth: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="CPU time of Redis for this many workers, each with 100 requests without events.",
        ),
    ] = 0,
    tokens: Annotated[
        int, typer.Option(min=0, help="Measure the CPU time per token of this many streams.")
    ] = 0,
    against: Annotated[Path | None, typer.Option(help="Another checkout to compare with.")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="File for the figures of `vlm plan`, measured at 32 connections."),
    ] = None,
) -> None:
    """Compare gateway, Redis, worker and mock engine with a bare FastAPI endpoint."""
    from benchmarks.gateway.growth import measure_growth
    from benchmarks.gateway.run import run
    from benchmarks.gateway.server import measure_tokens, write_fleet_figures
    from benchmarks.tables import show

    with _faults_end("gateway"):
        if figures is not None:
            write_fleet_figures(figures, seconds, rounds)
        elif growth:
            show(asyncio.run(measure_growth(growth, rounds)))
        elif tokens:
            show(measure_tokens(tokens, seconds, rounds, against))
        else:
            run(seconds, rounds, _to_ints(connections), against)


@app.command("server")
def bench_server(
    url: Annotated[str, typer.Option(help="Address of the server, on this machine.")],
    model: Annotated[
        str,
        typer.Option(
            help="Directory or hub id of the server's model.",
            show_default="measure only the server",
        ),
    ] = "",
    engine: Annotated[str, typer.Option(help="vllm, sglang, llama-server or openai.")] = "vllm",
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
) -> None:
    """Compare the CPU time per streamed token of the fleet with that of a server's HTTP front end."""
    from benchmarks.gateway.server import measure_server
    from benchmarks.tables import show

    with _faults_end("server"):
        show(measure_server(engine, model, url, streams, tokens, seconds, rounds))


@app.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="Name, directory or hub id.")] = "shapes",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    scenarios: Annotated[
        str,
        typer.Option(help="Comma-separated: decode, prefill, image, mixed."),
    ] = "decode,prefill,image,mixed",
    batch_sizes: Annotated[
        str, typer.Option(help="Comma-separated batch sizes.", callback=_numbers)
    ] = "1,4,16",
    num_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    figures: Annotated[
        Path | None,
        typer.Option(help="File for the figures that `vlm plan` reads; needs decode and prefill."),
    ] = None,
) -> None:
    """Measure the engine without HTTP and queue, and compare it with this machine's limits."""
    from benchmarks.engine.run import BenchOptions, run

    options = BenchOptions(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        scenarios=tuple(scenarios.split(",")),
        batch_sizes=tuple(_to_ints(batch_sizes)),
        num_tokens=num_tokens,
        rounds=rounds,
    )
    with _faults_end("engine"):
        run(options, figures)


@app.command("peers")
def bench_peers(
    model: Annotated[
        str,
        typer.Option(help="Directory of a checkpoint, or a shape of `vlm bench checkpoint`."),
    ] = "llava-1b",
    systems: Annotated[str, typer.Option(help="Comma-separated, as maker:precision.")] = (
        "ours:float32,ours:int8,ours:int4,transformers:float32,llama.cpp:BF16,llama.cpp:Q8_0,llama.cpp:Q4_0"
    ),
    workloads: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "decode-1,decode-4,decode-16,prefill,image,first-token"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each system.")] = 2,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Five minutes: 6 layers, decode-1 and prefill, 2 rounds."),
    ] = False,
) -> None:
    """Compare the engine with transformers and llama.cpp, which is built at first use."""
    from benchmarks.peers.run import run

    with _faults_end("peers"):
        run(model, systems.split(","), workloads.split(","), rounds, threads, quick)


@app.command("burst")
def bench_burst(
    servers: Annotated[
        list[str], typer.Argument(help="NAME=URL of running servers with the OpenAI API.")
    ],
    requests: Annotated[int, typer.Option(min=1, help="Simultaneous requests.")] = 64,
    num_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
) -> None:
    """Measure servers alternately with simultaneous requests, each with a new image."""
    from benchmarks.peers.burst import Server, run

    named = [Server(name, url.rstrip("/")) for name, _, url in (x.partition("=") for x in servers)]
    if not all(server.url.startswith("http") for server in named):
        raise typer.BadParameter("write servers as NAME=URL, such as ours=http://127.0.0.1:8000")
    with _faults_end("burst"):
        run(named, requests, num_tokens, rounds)


@app.command("embeddings")
def bench_embeddings(
    shapes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: minilm-l6, bge-base, clip-vit-b-32.",
            callback=_names("minilm-l6", "bge-base", "clip-vit-b-32"),
        ),
    ] = "minilm-l6",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the peers' environments, created at first use; default: no peers."
        ),
    ] = None,
) -> None:
    """Compare the embedding engine with sentence-transformers, infinity and open_clip, on one thread."""
    from benchmarks.engine.embeddings import run

    run(shapes.split(","), rounds, peers)


@app.command("search")
def bench_search(
    sizes: Annotated[
        str, typer.Option(help="Comma-separated numbers of vectors.", callback=_numbers)
    ] = "20000,200000",
    dimensions: Annotated[int, typer.Option(min=8, help="Dimensions of each vector.")] = 384,
    kinds: Annotated[
        str,
        typer.Option(
            help="Comma-separated: flat, lance, or the postgresql:// URL of an empty database (its CPU is not counted).",
            callback=_names("flat", "lance", "postgresql"),
        ),
    ] = "flat,lance",
    queries: Annotated[int, typer.Option(min=1, help="Queries per measurement.")] = 100,
) -> None:
    """Measure exact search and the indexes: time to build, time to search, and recall."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in the search process
    from benchmarks.search.run import run

    run(_to_ints(sizes), dimensions, kinds.split(","), queries)


@app.command("media")
def bench_media(
    seconds: Annotated[int, typer.Option(min=1, help="Length of the video.")] = 600,
    frames: Annotated[int, typer.Option(min=1, help="Number of frames to decode.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    vllm: Annotated[
        Path | None, typer.Option(help="Python with vLLM, 0.28 or older for its PyAV loader.")
    ] = None,
) -> None:
    """Compare the CPU time of decoding a few frames of a long H.264 video with that of vLLM's loaders."""
    from benchmarks.media import run

    run(seconds, frames, rounds, vllm)


Shape = Literal["tiny", "llava-1b", "llava-1.5-7b", "smolvlm2-500m"]


@app.command("checkpoint")
def bench_checkpoint(
    directory: Annotated[Path, typer.Argument(help="New or empty directory.")],
    shape: Annotated[Shape, typer.Option(help="Architecture and size.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of layers of decoder and tower.")
    ] = None,
) -> None:
    """Write a checkpoint with random weights, for tests and benchmarks."""
    from benchmarks.make_checkpoint import run

    with _faults_end("checkpoint"):
        run(shape, directory, seed, layers)
