"""GGUF files of tiny models, written with llama.cpp's package, and the weights that its dequantizer returns."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engines.torch_backend  # noqa: F401  isort: skip - before transformers imports torchvision

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.peers.gguf_files import describe_decoder, finish, interleave_halves

Kind = gguf.GGMLQuantizationType
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁a", "ab"]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
#: K-quants, which the package reads but does not write: bytes of the scales, and the value of the least integer.
_SCALES: dict[Kind, tuple[tuple[int, float], ...]] = {
    Kind.Q4_K: ((0, 2e-4), (2, 15e-4)),
    Kind.Q5_K: ((0, 1e-4), (2, 15.5e-4)),
    Kind.Q6_K: ((208, 5e-5),),
}

Choose = Callable[[str], Kind]  # returns a matrix's type by its name in the file


def mixture(usual: Kind, better: Kind) -> Choose:
    """As llama.cpp's "M" mixtures, which store the more important matrices in more bits."""

    def choose(name: str) -> Kind:
        return better if name in ("output.weight", "blk.0.ffn_down.weight") else usual

    return choose


def quantize(weight: np.ndarray, kind: Kind, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the blocks of a file and their dequantized values; blocks of K-quants are random."""
    if kind not in _SCALES:
        blocks = gguf.quants.quantize(weight, kind)
        return blocks, gguf.quants.dequantize(blocks, kind)
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = weight.shape[0], weight.shape[1] // per_block, num_bytes
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, shape, np.uint8)
    for place, size in _SCALES[kind]:
        scale = (size * random.uniform(0.5, 1.5, (*shape[:2], 1))).astype("<f2")
        blocks[..., place : place + 2] = scale.view(np.uint8)
    blocks = blocks.reshape(weight.shape[0], -1)
    return blocks, gguf.quants.dequantize(blocks, kind)


def make_model(arch: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, model_class = MODELS[arch]
    model = model_class(config_class(**SHAPE | changes)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # otherwise norms are ones and biases are zeros
                parameter.add_(torch.randn_like(parameter) / 8)
    return model.requires_grad_(False)


def write_text(
    file: Path,
    model: PreTrainedModel,
    arch: str,
    choose: Choose = lambda name: Kind.F32,
    extra: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Writes a text model; returns the dequantized weights by transformers' names."""
    config: Any = model.config
    writer = gguf.GGUFWriter(file, arch)
    describe_decoder(writer, config)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _describe_tokenizer(writer)
    for name, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name, value)
    heads = {"self_attn.q_proj": config.num_attention_heads}
    heads["self_attn.k_proj"] = config.num_key_value_heads
    meant: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{number}."
        theirs = f"{prefix}{_NAMES[stem]}.{part}"
        count = heads.get(stem, 0) if arch == "llama" else 0
        value = (interleave_halves(tensor, count) if count else tensor).float().numpy()
        kind = choose(theirs) if value.ndim == 2 else Kind.F32
        data, numbers = quantize(value, kind, seed=len(meant))
        writer.add_tensor(theirs, data, raw_dtype=kind)
        meant[name] = torch.from_numpy(_to_halves(numbers.astype(np.float32), count).copy())
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    finish(writer)
    return meant


def _describe_tokenizer(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(n) for n in range(len(TOKENS))])
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * 5]
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _to_halves(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Inverts `interleave_halves`."""
    if not num_heads:
        return value
    pairs = value.reshape(num_heads, -1, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def write_tower(
    file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: Kind
) -> None:
    """Writes an mmproj file; small matrices are not quantized."""
    writer = gguf.GGUFWriter(file, "clip")
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(name, value)
    for name, value in tensors.items():
        is_matrix = value.ndim == 2 and "position" not in name
        used = kind if is_matrix else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(value, used), raw_dtype=used)
    finish(writer)
