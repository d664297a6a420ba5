"""The commands of the engine's tools: `vlm make-checkpoint`, `vlm quantize`, `vlm convert-gguf`, `vlm bench engine`, `vlm bench peers`,
`vlm bench embeddings`, `vlm bench quality`, `vlm models`, `vlm pull`, `vlm rm`.

Torch is loaded when one of them runs, and not before.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shared.cli_lists import names, numbers

if TYPE_CHECKING:
    from engines.packages.cache import FindEngine


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="Where to write it; new or empty.")],
    shape: Annotated[
        str,
        typer.Option(
            help="tiny, llava-1b, llava-1.5-7b, llama-125m, smolvlm2-500m, smolvlm2-2.2b or qwen2.5-vl-3b."
        ),
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="At most so many layers, in decoder and tower.")
    ] = None,
) -> None:
    """Write a checkpoint of a real shape with random weights, for tests and benchmarks."""
    from engines.torch_backend.loading.make_checkpoint import run

    run(shape, directory, seed, layers)


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Name, directory or hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory; new or empty.")],
    scheme: Annotated[Literal["int8", "int4"], typer.Option(help="Bits of the decoder's weights.")],
    head: Annotated[Literal["none", "int8"], typer.Option(help="Bits of the head's.")] = "none",
    calibrate: Annotated[
        str,
        typer.Option(
            help="Keep int4 near the model on examples (GPTQ): a .jsonl file of OpenAI messages, a file "
            "with a question a line, or `own` for texts of the model itself."
        ),
    ] = "none",
) -> None:
    """Save a checkpoint with its decoder quantized, as compressed-tensors; it loads without the original."""
    from engines.torch_backend.loading.quantize_checkpoint import run

    run(source, target, scheme, head, calibrate)


def convert_gguf(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory; new or empty.")],
) -> None:
    """Save a GGUF file as a checkpoint of safetensors: Q4_0 stays int4, the rest is float16."""
    from engines.torch_backend.loading.convert_gguf import run

    run(source, target)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """List the models that are here: built in, or in the hub's cache."""
    from engines.packages.listing import show

    show(as_json, _find_engine())


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="org/name[@revision].")],
    force: Annotated[
        bool, typer.Option("--force", help="Also what cannot be run on this machine.")
    ] = False,
) -> None:
    """Download a model of the hub, after a look at its small files, and say whether it runs here."""
    from engines.packages.listing import pull as run

    run(model, None if force else _find_engine())


def rm(
    model: Annotated[str, typer.Argument(metavar="ID", help="org/name[@revision].")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the hub's cache."""
    from engines.packages.listing import remove as run

    run(model, yes)


def _find_engine() -> "FindEngine | None":
    """What knows which engine runs a model; nobody does where torch is not installed."""
    if find_spec("torch") is None:
        return None
    from engines.packages.runnable import find_engine

    return find_engine


def bench_engine(
    model: Annotated[str, typer.Option(help="Name, directory or hub id.")] = "shapes",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    kv_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="As VLM_ENGINE__KV_DTYPE.")
    ] = "auto",
    cpu_kernels: Annotated[
        Literal["fast", "exact", "off"], typer.Option(help="As VLM_ENGINE__CPU_KERNELS.")
    ] = "fast",
    scenarios: Annotated[
        str,
        typer.Option(
            help="Comma-separated: decode, prefill, image, repeat, mixed, edit, fresh, letters, noise."
        ),
    ] = "decode,prefill,image,repeat,mixed",
    batch_sizes: Annotated[
        str, typer.Option(help="Comma-separated numbers.", callback=numbers())
    ] = "1,4,16",
    num_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    speculation: Annotated[
        str, typer.Option(help="off, ngram, or both in turn: off,ngram.")
    ] = "off",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Drive the engine alone, beside what this machine's memory and arithmetic allow."""
    from engines.bench.run import BenchOptions, run

    options = BenchOptions(
        model=model,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        cpu_kernels=cpu_kernels,
        scenarios=tuple(scenarios.split(",")),
        batch_sizes=tuple(int(number) for number in batch_sizes.split(",")),
        num_tokens=num_tokens,
        rounds=rounds,
        speculation=tuple(speculation.split(",")),
    )
    run(options, as_json)


def bench_peers(
    model: Annotated[
        str,
        typer.Option(help="Directory of a checkpoint, or a shape of `vlm make-checkpoint`."),
    ] = "llava-1b",
    systems: Annotated[str, typer.Option(help="Comma-separated: maker:precision.")] = (
        "ours:float32,ours:int8,ours:int4,transformers:float32,llama.cpp:BF16,llama.cpp:Q8_0,llama.cpp:Q4_0"
    ),
    workloads: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "decode-1,decode-4,decode-16,prefill,image,first-token,repeat"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each system.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, or cuda without llama.cpp.")] = "cpu",
    one_by_one: Annotated[
        bool,
        typer.Option("--one-by-one", help="Hold one system in memory at a time: for large models."),
    ] = False,
    results: Annotated[
        Path | None, typer.Option(help="Keep results here, beside those of earlier runs.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Five minutes: a cut model, decode-1 and prefill, two rounds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure the engine beside transformers and llama.cpp, which is built at first use, in turn."""
    if find_spec("engines.bench.peers") is None:
        sys.exit("vlm bench peers is a part of the repository, not of the installed package")
    from engines.bench.peers.run import PeerOptions, run

    options = PeerOptions(
        model=model,
        systems=tuple(systems.split(",")),
        workloads=tuple(workloads.split(",")),
        rounds=rounds,
        num_threads=threads,
        device=device,
        one_by_one=one_by_one,
        results=results,
    )
    run(options.quick if quick else options, as_json)


def bench_programs(
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of a text model.", show_default="random, llama-125m"),
    ] = None,
    precisions: Annotated[
        str,
        typer.Option(
            help="Comma-separated.", callback=names("float32", "bfloat16", "int8", "int4")
        ),
    ] = "float32,bfloat16,int8,int4",
    batch_sizes: Annotated[
        str, typer.Option(help="Comma-separated numbers.", callback=numbers())
    ] = "1,8",
    context: Annotated[int, typer.Option(min=1, help="Tokens before each step.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure decode steps of one text model by each program: native, lowered, generic, transformers' generate."""
    from engines.bench.programs import ProgramOptions, run

    options = ProgramOptions(
        model=model,
        precisions=tuple(precisions.split(",")),
        batch_sizes=tuple(int(number) for number in batch_sizes.split(",")),
        num_context=context,
        rounds=rounds,
    )
    run(options, as_json)


def bench_embeddings(
    shapes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: minilm-l6, bge-base, clip-vit-b-32.",
            callback=names("minilm-l6", "bge-base", "clip-vit-b-32"),
        ),
    ] = "minilm-l6",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the peers' environments, made at first use; without it no peers."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="What 2,048 inputs of 512 tokens take, of one shape.")
    ] = False,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of --memory.")] = "float32",
) -> None:
    """Measure the embedding engine beside transformers, sentence-transformers, infinity and open_clip, one thread."""
    from engines.bench.embeddings import run, run_memory

    if memory:
        run_memory(shapes, dtype)
    else:
        run(shapes.split(","), rounds, as_json, peers)


def bench_quality(
    model: Annotated[str, typer.Option(help="Name, directory or hub id.")] = "shapes",
    num_texts: Annotated[int, typer.Option(min=1, help="Texts that the model samples.")] = 64,
    num_scenes: Annotated[int, typer.Option(min=0, help="Scenes asked about; shapes only.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure what quantized copies of a model are worth beside it, on texts of its own; takes minutes."""
    from engines.bench.quality import run

    run(model, num_texts, num_scenes, as_json)
