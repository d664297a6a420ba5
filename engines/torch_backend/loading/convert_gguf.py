"""Converts GGUF files to safetensors: `vlm convert-gguf`.

Q4_0 keeps its 16 levels, in groups of 32; all other types become float16, because compressed-tensors cannot express
the values of Q4_K.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import Progress, TimeElapsedColumn

from engines.torch_backend.loading.formats.compressed_tensors import to_config, to_parts
from engines.torch_backend.loading.formats.gguf import DTYPE, GgufReader
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.gguf_checkpoint import (
    TEXT_FILE,
    TOWER_FILE,
    find_files,
    list_weights,
    make_directory,
)
from engines.torch_backend.loading.stored_tensors import TensorWriter, new_directory
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields


def convert_gguf(
    source: Path, target: Path, progress: Callable[[float], None] | None = None
) -> None:
    """Write a checkpoint; `progress` receives the completed ratio of tensors, 0..1.

    Raises: UnsupportedCheckpoint, FileExistsError, OSError.
    """
    with TemporaryDirectory() as folder, new_directory(target) as made:
        make_directory(find_files(source), Path(folder))
        _convert(Path(folder), made, progress or (lambda share: None))


def _convert(directory: Path, target: Path, progress: Callable[[float], None]) -> None:
    reader = GgufReader(read_fields(directory))
    linears, others = reader.split(list_weights(directory), torch.device("cpu"))
    total = len(linears) + len(others)
    example: Integers | None = None
    plain: list[str] = []
    writer = TensorWriter(target)
    for done, tensor in enumerate(others, 1):
        value = tensor.map()
        writer.add(tensor.name, value.to(DTYPE))
        plain += [tensor.name.removesuffix(".weight")] if value.dim() == 2 else []
        progress(done / total)
    for done, linear in enumerate(linears, len(others) + 1):
        value = reader.read(linear)
        if isinstance(value, Integers) and value.base is None and "_proj" in linear.name:
            example = value
            for part, tensor in to_parts(value, DTYPE).items():
                writer.add(f"{linear.name}.{part}", tensor)
        else:
            numbers = value.numbers(DTYPE) if isinstance(value, Integers) else value
            writer.add(f"{linear.name}.weight", numbers)
            plain.append(linear.name)
        progress(done / total)
    writer.close()
    for file in directory.iterdir():
        if file.name not in (TEXT_FILE, TOWER_FILE):
            shutil.copyfile(file, target / file.name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    if example is not None:
        patterns = [f"re:.*{re.escape(name)}$" for name in plain if "embed" not in name]
        config["quantization_config"] = to_config({"Linear": example}, patterns)
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def run(source: Path, target: Path) -> None:
    """The command: `convert_gguf` with a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"converting {source}", total=1.0)
        try:
            if not source.is_file():
                raise FileNotFoundError(f"{source} is not a file")
            convert_gguf(source, target, lambda share: bar.update(task, completed=share))
        except (UnsupportedCheckpoint, OSError) as error:
            raise SystemExit(f"convert-gguf: {error}") from None
    print(f"{target}: converted from {source}")
