"""A checkpoint with its decoder quantized, saved beside the original: what `vlm quantize` does.

The worker's own reader and schemes do the work, one tensor after another, so that what is loaded from the copy
is what `--quantization` would have made of the original in the precision in which that is stored.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress, TimeElapsedColumn

from engines.packages.resolve import ModelUnavailable, resolve_model
from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.loading.stored_tensors import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    TensorWriter,
    list_tensors,
)
from engines.torch_backend.loading.weights import WeightReader, build_empty
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import QUANT_METHOD
from engines.torch_backend.models.registry import find_family

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def quantize_checkpoint(
    source: Path,
    target: Path,
    scheme: str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, int]:
    """Write the quantized copy of a checkpoint; `progress` is told the share of numbers done, 0..1.

    `config.json` comes last: what was interrupted is no checkpoint. Returns: bytes of the weights before and
    after. Raises: UnsupportedCheckpoint, FileExistsError, OSError.
    """
    family, config = find_family(source)
    if config.quantization is not None:
        raise UnsupportedCheckpoint("the checkpoint is already quantized; use the original")
    stored = list_tensors(source)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    model = build_empty(family, config, SCHEMES[scheme], torch.float32)
    rename = partial(family.rename, config=config)
    reader = WeightReader(model, rename, SCHEMES[scheme], torch.device("cpu"))
    writer = TensorWriter(target, max_shard_bytes)
    total = sum(tensor.num_values for tensor in stored)
    done = 0
    for tensor in stored:
        for name, part in reader.read(tensor).items():
            writer.add(name, part)
        done += tensor.num_values
        if progress is not None:
            progress(done / total)
    writer.close()
    _copy_text_files(source, target, scheme)
    return _weight_bytes(source), _weight_bytes(target)


def _copy_text_files(source: Path, target: Path, scheme: str) -> None:
    for pattern in _TEXT_FILES:
        for file in source.glob(pattern):
            if file.name not in (INDEX_FILE, "config.json"):
                shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": QUANT_METHOD, "scheme": scheme}
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in {tensor.file for tensor in list_tensors(directory)})


def run(model: str, target: Path, scheme: str) -> None:
    """The command: `quantize_checkpoint` under a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"{model} to {scheme}", total=1.0)
        try:
            source = resolve_model(model, lambda share: bar.update(task, completed=share))
            before, after = quantize_checkpoint(
                source, target, scheme, progress=lambda share: bar.update(task, completed=share)
            )
        except (ModelUnavailable, UnsupportedCheckpoint, OSError) as error:
            raise SystemExit(f"quantize: {error}") from None
    print(
        f"{target}: {scheme}, {before / 2**20:,.1f} MiB of weights became {after / 2**20:,.1f} MiB"
    )
