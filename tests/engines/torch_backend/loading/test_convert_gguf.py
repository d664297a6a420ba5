"""A GGUF file becomes a checkpoint that means the same numbers, or is refused by name."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engines.torch_backend.loading.convert_gguf import convert_gguf, run
from engines.torch_backend.loading.formats import detect
from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁a", "ab"]
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
F32, Q4_0, Q8_0 = 0, 2, 8
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, value: Any) -> bytes:
    if isinstance(value, list):
        kind, code = {str: (8, ""), float: (6, "f"), int: (5, "i")}[type(value[0])]
        items = b"".join(text(x) if kind == 8 else struct.pack(f"<{code}", x) for x in value)
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    code, kind = ("f", 6) if isinstance(value, float) else ("I", 4)
    return text(name) + struct.pack(f"<I{code}", kind, value)


def pack(weight: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a tensor, and what they stand for."""
    if kind == F32:
        return weight.astype("<f4").tobytes(), weight
    blocks = weight.reshape(-1, 32)
    top = {Q4_0: -8, Q8_0: 127}[kind]
    most = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)]
    scale = (most / top).astype("<f2") if kind == Q4_0 else np.abs(most / top).astype("<f2")
    q = np.round(blocks / scale[:, None].astype(np.float32))
    numbers = (q.clip(-8, 7) if kind == Q4_0 else q) * scale[:, None].astype(np.float32)
    data = q.astype(np.int8).view(np.uint8)
    if kind == Q4_0:
        u = (q.clip(-8, 7) + 8).astype(np.uint8)
        data = u[:, :16] | (u[:, 16:] << 4)
    rows = np.concatenate([scale[:, None].view(np.uint8), data], 1)
    return rows.tobytes(), numbers.reshape(weight.shape).astype(np.float32)


def write(file: Path, kind: int, arch: str = "llama", extra: str = "") -> dict[str, Tensor]:
    """A tiny model whose matrices are of one type. Returns: what its weights stand for, by transformers' names."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    meant: dict[str, Tensor] = {}
    infos, data = b"", b""
    tensors = dict(model.state_dict()) | ({extra: torch.ones(2)} if extra else {})
    for name, tensor in tensors.items():
        short = name.removesuffix(".weight")
        head = ""
        if short.startswith("model.layers."):
            number, short = short.removeprefix("model.layers.").split(".", 1)
            head = f"blk.{number}."
        weight = tensor.float().numpy()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(short)
        if heads:  # pairs of channels that turn together lie side by side
            parts = weight.reshape(heads, 2, -1, weight.shape[1])
            weight = np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(weight.shape)
        packed, numbers = pack(weight, kind if weight.ndim == 2 else F32)
        if heads:
            parts = numbers.reshape(heads, -1, 2, weight.shape[1])
            numbers = np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(weight.shape)
        meant[name] = torch.from_numpy(np.ascontiguousarray(numbers))
        infos += text(head + NAMES.get(short, short) + ".weight")
        infos += struct.pack(f"<I{weight.ndim}Q", weight.ndim, *weight.shape[::-1])
        infos += struct.pack("<IQ", kind if weight.ndim == 2 else F32, len(data))
        data += packed + bytes(-len(packed) % 32)
    values = {
        "general.architecture": arch, f"{arch}.context_length": 128, f"{arch}.embedding_length": 64,
        f"{arch}.block_count": 2, f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4, f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6, f"{arch}.rope.dimension_count": 16,
        f"{arch}.rope.freq_base": 10000.0, f"{arch}.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [-float(n) for n in range(len(TOKENS))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(entry(name, value) for name, value in values.items()) + infos
    file.write_bytes(head + bytes(-len(head) % 32) + data)
    return meant


@pytest.mark.parametrize("kind", [F32, Q8_0, Q4_0])
def test_weights_mean_what_they_meant(kind: int, tmp_path: Path) -> None:
    meant = write(tmp_path / "model.gguf", kind)

    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")

    reader = detect(read_fields(tmp_path / "out"))
    stored, linears = list_tensors(tmp_path / "out"), []
    if reader is not None:
        linears, stored = reader.split(stored, torch.device("cpu"))
        for linear in linears:
            assert reader.layout(linear).form == "int4"
            numbers = reader.read(linear).numbers(torch.float32)
            assert torch.equal(numbers, meant.pop(f"{linear.name}.weight"))
    assert len(linears) == (14 if kind == Q4_0 else 0)
    found = {tensor.name: tensor.map().float() for tensor in stored}
    assert_close(found, meant, rtol=1e-3, atol=1e-6)  # float16


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Q8_0)

    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("ab a"), skip_special_tokens=True).strip() == "ab a"


@pytest.mark.parametrize(
    ("arch", "extra", "reason"),
    [
        ("clip", "", "'clip' \\(an mmproj file\\); only 'llama'"),
        ("qwen9", "", "'qwen9'; only 'llama'"),
        ("llama", "blk.0.ffn_gate_exps.weight", "tensor blk.0.ffn_gate_exps.weight has no place"),
        ("llama", "rope_freqs.weight", "rope_freqs.weight scales rotary frequencies"),
    ],
)
def test_what_has_no_place_is_named(arch: str, extra: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Q8_0, arch, extra)

    with pytest.raises(UnsupportedCheckpoint, match=reason):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_heads_that_do_not_divide_a_tensor_are_refused_with_its_name(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", Q8_0)
    content = (tmp_path / "model.gguf").read_bytes()
    count = text("llama.attention.head_count") + struct.pack("<I", 4)
    (tmp_path / "model.gguf").write_bytes(
        content.replace(count + struct.pack("<I", 4), count + struct.pack("<I", 7))
    )

    with pytest.raises(UnsupportedCheckpoint, match=r"blk\.0\.attn_q\.weight does not fit"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no", b"GGUF" + b"\xff" * 64])
def test_a_damaged_file_ends_the_command_with_the_reason(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)

    with pytest.raises(SystemExit, match=r"convert-gguf: model\.gguf is no GGUF file to read"):
        run(tmp_path / "model.gguf", tmp_path / "out")
