"""Worker commands: `vlm serve` and `vlm node` run the processes of a machine, `vlm worker` runs one worker."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.options import LISTEN, SettingOptions, option, takes_settings

if TYPE_CHECKING:
    from shared.settings.tree import Settings

ENGINE: SettingOptions = {
    "engine.kind": option(
        str, "--engine", "Engine: torch, vllm, sglang, llama-server, openai, openai-pooling, pooling or mock.",
        "by model and machine",
    ),
    "engine.model": option(
        str, "--model", "Built-in name, directory, or Hugging Face id (org/name\\[@revision]).", "shapes"
    ),
    "engine.url": option(
        str, "--url", "Address of a running server; engines: vllm, sglang, llama-server, openai, openai-pooling.",
        "the worker starts one",
    ),
    "engine.command": option(
        str, "--engine-command",
        "Executable or container that starts the engine's server, such as '/opt/vllm/bin/vllm serve'.",
        "the engine's program",
    ),
    "engine.served_name": option(str, "--served-name", "Name in the API.", "the model's own"),
    "engine.device": option(str, "--device", "auto, cpu, cuda or cuda:N.", "auto"),
    "engine.dtype": option(
        str, "--dtype", "float32, bfloat16 or float16.", "by device"
    ),
    "engine.quantization": option(
        str, "--quantization", "Quantization of the decoder's weights: int8 or int4.", "none"
    ),
    "engine.tensor_parallel": option(
        int, "--tensor-parallel", "GPUs that share the model, with --engine vllm or sglang.", "1"
    ),
    "worker.lora": option(
        list[str], "--lora",
        "LoRA adapter (directory or hub id) to serve as MODEL:NAME; may be repeated.",
        metavar="NAME=PATH",
    ),
    "engine.max_num_seqs": option(int, "--max-num-seqs", "Maximum number of sequences per step.", "32"),
    "engine.max_model_len": option(int, "--max-model-len", "Context length.", "the model's own"),
}  # fmt: skip
DEPLOY: SettingOptions = {
    "deploy.store": option(
        str,
        "--store",
        "Where packages and deployments are stored: file:///DIRECTORY, s3://, gs:// or az:// BUCKET/PREFIX.",
    ),
    "deploy.cpu": option(float, "--cpu", "Processors for instances.", "the machine's"),
}


@takes_settings(LISTEN, ENGINE)
def serve(
    settings: "Settings",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="MODEL",
            help="Additional model for a separate worker on the CPU, such as shapes-clip; may be repeated.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Also start the search process, for vector stores.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the bundled Redis.", show_default="by port")
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Run the workers on this Ray cluster, such as HOST:6379 or auto.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Start everything on this machine: Redis, a gateway and workers."""
    from worker.node.serve import run_node

    sys.exit(run_node(settings, workers, data_dir, search, also or (), ray))


@takes_settings(process="worker")
def ray_workers(
    settings: "Settings",
    ray: Annotated[str, typer.Option("--ray")] = "auto",
    workers: Annotated[int, typer.Option()] = 1,
) -> None:
    """Run workers on a Ray cluster, and restart lost workers; `vlm serve --ray` starts this process."""
    from worker.node.ray_workers import run_ray_workers

    sys.exit(run_ray_workers(settings, ray, workers))


@takes_settings(ENGINE, process="worker")
def worker(settings: "Settings") -> None:
    """Run one worker process with the Redis at VLM_REDIS_URL."""
    if settings.deploy.package:
        from worker.node.install import run_package as run
    else:
        from worker.main import run_worker as run

    sys.exit(run(settings))


@takes_settings(DEPLOY, process="node")
def node(settings: "Settings") -> None:
    """Run instances of deployments on this machine, with the Redis at VLM_REDIS_URL."""
    from worker.node.agent import run_agent

    sys.exit(run_agent(settings))
