"""Checkpoints in published quantized formats, written from the formats' descriptions without the code of any reader.

Everything is packed bit by bit in numpy. A writer returns the dequantized weights by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OlmoForCausalLM, PreTrainedModel

from benchmarks.make_checkpoint import make_checkpoint

TEXT = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]


@dataclass
class Rounded:
    """A quantized matrix: scale * (integer - zero), with the group of each input."""

    integers: np.ndarray  # (N, K), from 0
    scale: np.ndarray  # (N, G)
    zero: np.ndarray  # (N, G)
    group: np.ndarray  # (K,)

    @property
    def numbers(self) -> Tensor:
        scale, zero = self.scale[:, self.group], self.zero[:, self.group]
        return torch.from_numpy((self.integers - zero) * scale).float()


def round_weights(
    weight: Tensor, group: np.ndarray, bits: int, symmetric: bool, dtype: torch.dtype
) -> Rounded:
    """Rounds to nearest; `dtype` can represent the scales exactly."""
    w = weight.double().numpy()
    num_groups = int(group.max()) + 1
    scale, zero = np.empty((2, len(w), num_groups))
    for g in range(num_groups):
        part = w[:, group == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        step = (
            np.abs(part).max(1) / (2 ** (bits - 1) - 1)
            if symmetric
            else (high - low) / (2**bits - 1)
        )
        scale[:, g] = torch.from_numpy(step).to(dtype).double().numpy()
        middle = np.full(len(w), 2 ** (bits - 1))
        zero[:, g] = middle if symmetric else np.round(-low / scale[:, g]).clip(0, 2**bits - 1)
    integers = np.round(w / scale[:, group] + zero[:, group]).clip(0, 2**bits - 1)
    return Rounded(integers.astype(np.int64), scale, zero.astype(np.int64), group)


def pack(
    integers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> Tensor:
    """Packs integers into 32-bit words along an axis, the first in the lowest bits; missing ones are 0."""
    integers = np.moveaxis(integers, axis, -1)
    per_word = 32 // bits
    padded = np.pad(integers, ((0, 0), (0, -integers.shape[1] % per_word)))
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        source = order[place] if order else place
        words |= padded[:, source::per_word].astype(np.uint64) << np.uint64(bits * place)
    packed = np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed))


def unpack_rows(words: Tensor) -> Tensor:
    """Unpacks 4-bit integers along the first axis. Shapes: (n, N); returns (8 n, N)."""
    places = [(words >> 4 * place) & 15 for place in range(8)]
    return torch.stack(places, 1).flatten(0, 1)


def groups_of(num_inputs: int, size: int, shuffled: bool = False) -> np.ndarray:
    """Returns the group of each input; size -1 is one group. Shuffled as with `desc_act`."""
    size = num_inputs if size == -1 else size
    order = np.random.default_rng(num_inputs).permutation(num_inputs)
    return (order if shuffled else np.arange(num_inputs)) // size


def to_numbers(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


Write = Callable[[Tensor], tuple[Tensors, Tensor]]  # maps a weight to stored tensors and its value


@cache
def gptq(
    bits: int = 4,
    group_size: int = 64,
    *,
    sym: bool = False,
    desc_act: bool = False,
    version: str = "gptq",
    dtype: torch.dtype = torch.float16,
) -> tuple[Write, dict[str, Any]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        group = groups_of(weight.shape[1], group_size, desc_act)
        rounded = round_weights(weight, group, bits, sym, dtype)
        zeros = pack(rounded.zero.T, bits, 1).numpy().view(np.uint32).copy()
        if version == "gptq":  # subtracted per word, so that a 0 borrows from the next one
            zeros -= np.uint32(sum(1 << bits * place for place in range(32 // bits)))
        parts = {
            "qweight": pack(rounded.integers.T, bits, 0),
            "qzeros": torch.from_numpy(zeros.view(np.int32)),
            "scales": to_numbers(rounded.scale.T, dtype),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return parts, rounded.numbers

    return write, {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": version,
    }


@cache
def awq(group_size: int = 64) -> tuple[Write, dict[str, Any]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        group = groups_of(weight.shape[1], group_size)
        rounded = round_weights(weight, group, 4, False, torch.float16)
        parts = {
            "qweight": pack(rounded.integers.T, 4, 1, _AWQ_ORDER),
            "qzeros": pack(rounded.zero.T, 4, 1, _AWQ_ORDER),
            "scales": to_numbers(rounded.scale.T, torch.float16),
        }
        return parts, rounded.numbers

    return write, {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }


@cache
def packed(
    bits: int = 4, group_size: int = -1, *, symmetric: bool = True, ordered: bool = False
) -> tuple[Write, dict[str, Any]]:
    """Returns the writer and config of compressed-tensors' `pack-quantized`."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        group = groups_of(weight.shape[1], group_size, ordered)
        rounded = round_weights(weight, group, bits, symmetric, torch.bfloat16)
        parts = {
            "weight_packed": pack(rounded.integers, bits, 1),
            "weight_scale": to_numbers(rounded.scale, torch.bfloat16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(rounded.zero, bits, 0)
        if ordered:
            parts["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return parts, rounded.numbers

    strategy = "channel" if group_size == -1 else "group"
    weights = _arguments(bits, "int", strategy, symmetric=symmetric)
    if group_size != -1:
        weights["group_size"] = group_size
    return write, _compressed("pack-quantized", weights)


@cache
def int8(
    strategy: str = "channel", *, symmetric: bool = True, activations: bool = False
) -> tuple[Write, dict[str, Any]]:
    """Returns the writer and config of compressed-tensors' `int-quantized`; with int8 activations, W8A8."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        whole = weight.reshape(1, -1) if strategy == "tensor" else weight
        group = groups_of(whole.shape[1], -1)
        rounded = round_weights(whole, group, 8, symmetric, torch.float32)
        parts = {
            "weight": torch.from_numpy((rounded.integers - 128).astype(np.int8)).view(weight.shape),
            "weight_scale": to_numbers(rounded.scale, torch.float32),
        }
        if not symmetric:
            parts["weight_zero_point"] = to_numbers(rounded.zero - 128, torch.int8)
        if strategy == "tensor":
            parts = {n: t if n == "weight" else t.view(1) for n, t in parts.items()}
        return parts, rounded.numbers.view(weight.shape)

    weights = _arguments(8, "int", strategy, symmetric=symmetric)
    return write, _compressed("int-quantized", weights, activations)


@cache
def float8(strategy: str = "channel", block: int = 128) -> tuple[Write, dict[str, Any]]:
    """Returns the writer and config of compressed-tensors' `float-quantized`, with activations in FP8."""
    weights = _arguments(8, "float", strategy)
    if strategy == "block":
        weights["block_structure"] = [block, block]
    write = _fp8_writer(strategy, block, "weight_scale")
    return write, _compressed("float-quantized", weights, activations=True)


@cache
def deepseek() -> tuple[Write, dict[str, Any]]:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    return _fp8_writer("block", 128, "weight_scale_inv"), config


def _fp8_writer(strategy: str, block: int, name: str) -> Write:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_outputs, num_inputs = weight.shape
        high = {"tensor": num_outputs, "channel": 1, "block": block}[strategy]
        wide = block if strategy == "block" else num_inputs
        scale = torch.zeros(-(-num_outputs // high), -(-num_inputs // wide))
        integers, numbers = torch.zeros(2, *weight.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale[i, j] = weight[part].abs().max() / 448
                integers[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn).float()
                numbers[part] = integers[part] * scale[i, j]
        scale = scale.view(1) if strategy == "tensor" else scale
        return {"weight": integers.to(torch.float8_e4m3fn), name: scale}, numbers

    return write


def _arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    base = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return base | {"dynamic": False} | more


def _compressed(form: str, weights: dict[str, Any], activations: bool = False) -> dict[str, Any]:
    inputs = _arguments(8, weights["type"], "token") | {"dynamic": True}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": group | ({"input_activations": inputs} if activations else {})
        },
        "ignore": ["re:.*lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
    }


def write_checkpoint(directory: Path, write: Write, config: dict[str, Any], **text: Any) -> Tensors:
    """Writes a tiny LLaVA with a quantized decoder. Returns the dequantized weights."""
    directory.mkdir()
    files, numbers = _quantized(json.dumps(TEXT | text), write)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    _declare(directory, config)
    return dict(numbers)


@cache
def _quantized(text: str, write: Write) -> tuple[dict[str, bytes], Tensors]:
    """Returns the files of the quantized checkpoint without the config's entry, and the dequantized weights."""
    with TemporaryDirectory() as made:
        for name, data in _plain_files(text).items():
            Path(made, name).write_bytes(data)
        numbers = _rewrite(Path(made), write)
        return {file.name: file.read_bytes() for file in Path(made).iterdir()}, numbers


@cache
def _plain_files(text: str) -> dict[str, bytes]:
    """Returns the files of the checkpoint in full precision, by the JSON of its text config."""
    with TemporaryDirectory() as made:
        changes = {"text_config": json.loads(text)}
        make_checkpoint("tiny", Path(made), changes=changes, dtype=torch.float32)
        return {file.name: file.read_bytes() for file in Path(made).iterdir()}


def write_text_checkpoint(
    directory: Path,
    write: Write,
    config: dict[str, Any],
    model_class: type[PreTrainedModel] = OlmoForCausalLM,
) -> Tensors:
    """As `write_checkpoint`, for a tiny model of transformers; the default runs on transformers' modules."""
    create: Any = model_class.config_class
    settings = create(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        architectures=[model_class.__name__],
    )
    model_class(settings).save_pretrained(directory)
    _declare(directory, config)
    return _rewrite(directory, write)


def _rewrite(directory: Path, write: Write) -> Tensors:
    file = directory / "model.safetensors"
    plain, stored = load_file(file), {}
    for name, tensor in list(plain.items()):
        if "vision_tower" not in name and name.endswith("_proj.weight"):
            parts, plain[name] = write(tensor)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = tensor
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, file, {"format": "pt"})
    return plain


def _declare(directory: Path, config: dict[str, Any]) -> None:
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = config
    (directory / "config.json").write_text(json.dumps(settings))
