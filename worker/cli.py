"""The commands of workers: `vlm serve`, a whole machine, and `vlm worker`, one process."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.settings.options import (
    AllowOpen,
    Assignments,
    DieWithParent,
    Host,
    LogLevel,
    Port,
    RedisUrl,
    read_settings,
    run_process,
)

Engine = Annotated[
    str | None, typer.Option("--engine", help="Which engine runs the model.", show_default="torch")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Built-in name, directory, or Hugging Face id (org/name\\[@revision]).",
        show_default="shapes",
    ),
]
ServedName = Annotated[
    str | None, typer.Option(help="Name on the wire.", show_default="the model's own")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="what the device is fast at"),
]
Quantization = Annotated[
    str | None, typer.Option(help="Of the decoder's weights: int8 or int4.", show_default="none")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences that share a step.", show_default="32")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Context length.", show_default="the model's own")
]


def serve(
    host: Host = None,
    port: Port = None,
    allow_open: AllowOpen = None,
    engine: Engine = None,
    model: Model = None,
    served_name: ServedName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    redis_url: RedisUrl = None,
    log_level: LogLevel = None,
    assignments: Assignments = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where the bundled Redis keeps its files.", show_default="by port"),
    ] = None,
) -> None:
    """Start everything on this machine: Redis, a gateway and workers."""
    from worker.node.serve import run_node

    options = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.allow_open": allow_open,
        "redis.url": redis_url,
        "logs.level": log_level,
    } | _engine_options(
        engine, model, served_name, device, dtype, quantization, max_num_seqs, max_model_len
    )
    sys.exit(run_node(read_settings(options, assignments), workers, data_dir))


def worker(
    engine: Engine = None,
    model: Model = None,
    served_name: ServedName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxModelLen = None,
    redis_url: RedisUrl = None,
    log_level: LogLevel = None,
    assignments: Assignments = None,
    die_with_parent: DieWithParent = False,
) -> None:
    """Run one worker process. Redis is the one that VLM_REDIS_URL names."""
    from worker.main import run_worker

    options = {"redis.url": redis_url, "logs.level": log_level} | _engine_options(
        engine, model, served_name, device, dtype, quantization, max_num_seqs, max_model_len
    )
    settings = read_settings(options, assignments, die_with_parent)
    run_process("worker", settings, die_with_parent)
    sys.exit(run_worker(settings))


def _engine_options(
    kind: str | None,
    model: str | None,
    served_name: str | None,
    device: str | None,
    dtype: str | None,
    quantization: str | None,
    max_num_seqs: int | None,
    max_model_len: int | None,
) -> dict[str, Any]:
    """The options of an engine by their settings."""
    return {f"engine.{name}": value for name, value in locals().items()}
