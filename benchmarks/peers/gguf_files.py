"""Converts a checkpoint of LLaVA to llama.cpp's files: the decoder, and the tower with its projector.

Runs in the peers' environment, which has `gguf`. llama.cpp itself makes quantized decoders from the BF16 file. Source:
the formats that llama.cpp's `src/llama-arch.cpp` and `tools/mtmd/clip.cpp` read.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import AutoConfig

from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.models.config import VisionConfig
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.models.vision import block_numbers

_SUFFIXES = (".weight", ".bias")


def write_decoder(checkpoint: Path, target: Path, kind: str) -> None:
    """Write the decoder with matrices of type `kind` (F32, F16, BF16). Raises: OSError, ValueError."""
    text: Any = AutoConfig.from_pretrained(checkpoint).get_text_config(decoder=True)
    writer = gguf.GGUFWriter(target, "llama")
    describe_decoder(writer, text)
    _describe_tokenizer(writer, checkpoint, text.vocab_size)
    heads = {"attn_q": text.num_attention_heads, "attn_k": text.num_key_value_heads}

    def arrange(name: str, tensor: Tensor) -> Tensor:
        count = heads.get(name.split(".")[-2])
        return tensor if count is None else interleave_halves(tensor, count)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, text.num_hidden_layers)

    def rename(name: str) -> str | None:
        own = name.removeprefix("language_model.")
        return None if own == name else names.get_name(own, _SUFFIXES)

    _write_tensors(writer, checkpoint, kind, rename, arrange)


def write_tower(checkpoint: Path, target: Path, kind: str) -> None:
    """Write tower and projector with matrices of type `kind`. Raises: UnsupportedCheckpoint, OSError."""
    config = find_family(checkpoint)[1]
    depth = max(block_numbers(config.vision, config.vision_feature_layers))
    writer = gguf.GGUFWriter(target, "clip")
    _describe_tower(writer, config.vision, depth)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth)

    def rename(name: str) -> str | None:
        linear = re.fullmatch(r"multi_modal_projector\.linear_([12])\.(.+)", name)
        if linear:
            return f"mm.{0 if linear[1] == '1' else 2}.{linear[2]}"
        is_unused = "post_layernorm" in name  # the features come from an earlier layer
        return None if is_unused else names.get_name(name, _SUFFIXES)

    _write_tensors(writer, checkpoint, kind, rename, lambda name, tensor: tensor)


def describe_decoder(writer: "gguf.GGUFWriter", text: Any) -> None:
    rope, num_heads = text.rope_parameters, text.num_attention_heads
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_vocab_size(text.vocab_size)


def _describe_tokenizer(writer: "gguf.GGUFWriter", checkpoint: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer, as in checkpoints of `vlm bench checkpoint`."""
    stored = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    names = [f"<unused_{number}>" for number in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for name, number in stored["model"]["vocab"].items():
        names[number], kinds[number] = name, gguf.TokenType.NORMAL
    for added in stored["added_tokens"]:
        names[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def _describe_tower(writer: "gguf.GGUFWriter", vision: VisionConfig, depth: int) -> None:
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", vision.hidden_act == "gelu")
    writer.add_uint32("clip.vision.image_size", vision.image_size)
    writer.add_uint32("clip.vision.patch_size", vision.patch_size)
    writer.add_uint32("clip.vision.embedding_length", vision.hidden_size)
    writer.add_uint32("clip.vision.feed_forward_length", vision.intermediate_size)
    writer.add_uint32("clip.vision.projection_dim", vision.hidden_size)
    writer.add_uint32("clip.vision.block_count", depth)
    writer.add_array("clip.vision.feature_layer", [depth])  # else the second to last is used
    writer.add_uint32("clip.vision.attention.head_count", vision.num_heads)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.layer_norm_eps)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])


def _write_tensors(
    writer: "gguf.GGUFWriter",
    checkpoint: Path,
    kind: str,
    rename: Callable[[str], str | None],
    arrange: Callable[[str, Tensor], Tensor],
) -> None:
    """Write the tensors that `rename` gives a name: matrices (except position embeddings) as `kind`, all others as F32."""
    for stored in list_tensors(checkpoint):
        name = rename(stored.name)
        if name is None:
            continue
        tensor = arrange(name, stored.map()).float().numpy()
        is_matrix = tensor.ndim == 2 and "position_embd" not in name
        tensor_kind = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        data = gguf.quants.quantize(tensor, tensor_kind)
        writer.add_tensor(name, data, raw_dtype=tensor_kind)
    finish(writer)


def finish(writer: "gguf.GGUFWriter") -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder rows: llama.cpp rotates neighbours, transformers rotates halves. Shapes: (N, ...) to (N, ...)."""
    halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
