"""A GGUF file of the llama architecture as a checkpoint directory: what `vlm convert-gguf` does.

Transformers reads the file, its configuration and its tokenizer. Q4_0 maps stay the same 16 integers, in groups of 32;
all other types become float16. Whatever has no place in a Llama is refused by name.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import (
    GgufHeader,
    load_gguf_state_dict,
    read_gguf_metadata,
)

from engines.torch_backend.loading.formats.compressed_tensors import to_config, to_parts
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.stored_tensors import TensorWriter
from engines.torch_backend.models.config import UnsupportedCheckpoint

_Q4_0, _Q4_0_BYTES, _Q4_0_GROUP = 2, 18, 32
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_DTYPE = torch.float16
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(
    source: Path, target: Path, progress: Callable[[float], None] | None = None
) -> None:
    """Write a checkpoint; `progress` is told the share of tensors done, 0..1. `config.json` comes last.

    Raises: UnsupportedCheckpoint, FileExistsError, OSError.
    """
    header, config = _read_header(source)
    names = {info.name: _rename(info.name) for info in header.tensors}
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    writer = TensorWriter(target)
    example: Integers | None = None
    plain: list[str] = []
    stored = load_gguf_state_dict(header)
    for done, info in enumerate(header.tensors, 1):
        name = names[info.name]
        heads = next((config[_HEADS[part]] for part in _HEADS if part in name), None)
        try:
            value = _read(stored[info.name][...], info.ggml_type, info.shape, heads, name)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedCheckpoint(
                f"{source.name}: the tensor {info.name} does not fit its type or the heads: "
                f"{str(error)[:100]}"
            ) from None
        if isinstance(value, Integers):
            example = value
            for part, tensor in to_parts(value, _DTYPE).items():
                writer.add(f"{name.removesuffix('.weight')}.{part}", tensor)
        else:
            writer.add(name, value)
            plain += [name] if "_proj" in name or name.startswith("lm_head") else []
        if progress is not None:
            progress(done / len(header.tensors))
    writer.close()
    if example is not None:
        patterns = [f"re:.*{re.escape(name.removesuffix('.weight'))}$" for name in plain]
        config["quantization_config"] = to_config({"Linear": example}, patterns)
    _write_text_files(source, target, config)


def _read_header(source: Path) -> tuple[GgufHeader, dict[str, Any]]:
    try:
        metadata, names = read_gguf_metadata(str(source))
        architecture = metadata["general.architecture"]
        if architecture != "llama":
            kind = " (an mmproj file)" if architecture == "clip" else ""
            raise UnsupportedCheckpoint(
                f"{source.name}: general.architecture is {architecture!r:.40}{kind}; only 'llama' "
                "can be converted"
            )
        header, config = GgufHeader.from_file(str(source)), _config(metadata)
    except UnsupportedCheckpoint:
        raise
    except Exception as error:  # whatever transformers makes of a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedCheckpoint(f"{source.name} is no GGUF file to read: {reason}") from None
    if "rope_freqs.weight" in names:
        raise UnsupportedCheckpoint(
            f"{source.name}: rope_freqs.weight scales rotary frequencies, which cannot be converted"
        )
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "llama.expert_count" in metadata:
        what = f"rope.scaling.type {scaling!r:.40}" if scaling != "none" else "experts"
        raise UnsupportedCheckpoint(f"{source.name}: {what} cannot be converted")
    config["tie_word_embeddings"] = "output.weight" not in names
    config["vocab_size"] = next(x.shape[0] for x in header.tensors if x.name == "token_embd.weight")
    return header, config


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Llama. Raises: KeyError for what the file has to say."""
    heads = metadata["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "dtype": str(_DTYPE).removeprefix("torch."),
    }
    if "llama.attention.key_length" in metadata:
        config["head_dim"] = metadata["llama.attention.key_length"]
    ids = {name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")}
    return config | {name: metadata[key] for name, key in ids.items() if key in metadata}


def _rename(name: str) -> str:
    """A tensor's name in a Llama of transformers. Raises: UnsupportedCheckpoint."""
    in_layer = _LAYER.fullmatch(name)
    if in_layer is not None and in_layer[2] in _IN_LAYER:
        return f"model.layers.{in_layer[1]}.{_IN_LAYER[in_layer[2]]}.weight"
    whole = _WHOLE.get(name.removesuffix(".weight"))
    if whole is None:
        raise UnsupportedCheckpoint(f"the tensor {name:.80} has no place in a Llama")
    return f"{whole}.weight"


def _read(
    raw: Tensor, kind: int, shape: tuple[int, ...], heads: int | None, name: str
) -> Integers | Tensor:
    """A tensor for the checkpoint. Shapes: raw as the file has it."""
    if kind == _Q4_0 and "_proj" in name:
        rows = raw.view(shape[0], -1)
        return _integers(rows if heads is None else _as_rotated(rows, heads))
    value = raw if kind in _FLOATS else dequantize(raw.flatten(), kind).view(shape)
    return (value if heads is None else _as_rotated(value, heads)).to(_DTYPE)


def _as_rotated(rows: Tensor, num_heads: int) -> Tensor:
    """Outputs of a head in transformers' order: halves, where GGUF has pairs. Shapes: any of N rows, kept."""
    return rows.view(num_heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _integers(rows: Tensor) -> Integers:
    """Blocks of a float16 scale and 32 integers, i beside i + 16. Shapes: uint8 (N, bytes of a row)."""
    blocks = rows.reshape(len(rows), -1, _Q4_0_BYTES)
    scale = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
    octets = blocks[:, :, 2:]
    values = torch.cat([octets & 15, octets >> 4], 2).flatten(1)
    return Integers(values, 4, _Q4_0_GROUP, scale.t().contiguous(), None)


def _write_text_files(source: Path, target: Path, config: dict[str, Any]) -> None:
    try:
        architecture, content, settings = get_gguf_tokenizer(str(source))
        backend, _ = convert_gguf_tokenizer(architecture, content)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except Exception as error:  # of a dozen kinds of tokenizers
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedCheckpoint(
            f"{source.name}: transformers cannot make its tokenizer: {reason}"
        ) from None
    tokenizer.save_pretrained(target)
    text = json.dumps(config, indent=2, default=str) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def run(source: Path, target: Path) -> None:
    """The command: `convert_gguf` under a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"converting {source}", total=1.0)
        try:
            convert_gguf(source, target, lambda share: bar.update(task, completed=share))
        except (UnsupportedCheckpoint, OSError) as error:
            raise SystemExit(f"convert-gguf: {error}") from None
    print(f"{target}: converted from {source}")
