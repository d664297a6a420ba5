"""Opens a GGUF file as a transformers checkpoint: converts configuration, tokenizer and names, and maps tensors.

Used for `--model FILE.gguf`, together with the `mmproj` file in the same directory (CLIP's tower and LLaVA's
projector), if any. A tensor that does not belong to the architecture is an error that names it. Transformers reads
the header and converts the tokenizer.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import GgufHeader, TensorInfo, read_gguf_metadata

from engines.packages.checkpoint_json import one_line, shown
from engines.text.chat_template import LLAVA_TEMPLATE
from engines.text.tokenizer import readable
from engines.torch_backend.layers.rotary import llama3_frequencies
from engines.torch_backend.loading.formats.gguf import DTYPE, FLOATS, GgufTensor
from engines.torch_backend.loading.stored_tensors import StoredTensor, list_tensors
from engines.torch_backend.models.config import RopeScaling, UnsupportedCheckpoint

#: File names in the directory of a checkpoint.
TEXT_FILE, TOWER_FILE = "model.gguf", "mmproj.gguf"

#: by `general.architecture`: transformers' architecture, `model_type`, and whether rotary channels are interleaved
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
#: Names in transformers without `.weight` or `.bias`; # is the number of a layer.
_TEXT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
}
_TOWER_NAMES = {
    "v.class_embd": "vision_tower.vision_model.embeddings.class_embedding",
    "v.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
    "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
    "v.post_ln": "vision_tower.vision_model.post_layernorm",
    "v.blk.#.attn_q": "vision_tower.vision_model.encoder.layers.#.self_attn.q_proj",
    "v.blk.#.attn_k": "vision_tower.vision_model.encoder.layers.#.self_attn.k_proj",
    "v.blk.#.attn_v": "vision_tower.vision_model.encoder.layers.#.self_attn.v_proj",
    "v.blk.#.attn_out": "vision_tower.vision_model.encoder.layers.#.self_attn.out_proj",
    "v.blk.#.ln1": "vision_tower.vision_model.encoder.layers.#.layer_norm1",
    "v.blk.#.ln2": "vision_tower.vision_model.encoder.layers.#.layer_norm2",
    "v.blk.#.ffn_up": "vision_tower.vision_model.encoder.layers.#.mlp.fc1",
    "v.blk.#.ffn_down": "vision_tower.vision_model.encoder.layers.#.mlp.fc2",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_NUMBER = re.compile(r"(?<=blk\.)\d+(?=\.)")
_ROTARY = "rope_freqs.weight"


def open_checkpoint(path: Path) -> Path:
    """The path, if it is a directory; for a GGUF file, a checkpoint in the cache. Raises: UnsupportedCheckpoint."""
    if path.is_dir():
        return path
    files = find_files(path)
    return _open(path, files, partial(make_directory, files))


def open_tokenizer(path: Path) -> Path:
    """A directory in the cache with a GGUF file's tokenizer and chat template. Raises: UnsupportedCheckpoint."""
    file = path.resolve()
    return _open(path, [file], partial(write_tokenizer, file), "tokenizer-")


def _open(
    path: Path, files: Sequence[Path], make: Callable[[Path], None], prefix: str = ""
) -> Path:
    try:
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        name = prefix + hashlib.sha256(json.dumps(states).encode()).hexdigest()[:32]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        target = base / "vlm-fleet" / "gguf" / name
        if not target.is_dir():
            made = target.with_name(f".{name}-{uuid4().hex}")
            made.mkdir(parents=True)
            try:
                make(made)
                made.replace(target)
            except OSError:
                if not target.is_dir():  # else another process has created the directory
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        raise UnsupportedCheckpoint(
            f"the configuration and tokenizer of {path.name} cannot be written to the cache; set "
            f"XDG_CACHE_HOME to a writable directory: {error}"
        ) from None
    return target


def make_directory(files: Sequence[Path], target: Path) -> None:
    """Write links to the files, then the tokenizer, then `config.json`. Raises: UnsupportedCheckpoint, OSError."""
    for file, name in zip(files, (TEXT_FILE, TOWER_FILE), strict=False):
        (target / name).symlink_to(file)
    model = GgufModel(target)
    write_tokenizer(files[0], target)
    settings = model.image_settings
    if settings is not None:
        _write_json(target / "preprocessor_config.json", settings)
        template = target / "chat_template.jinja"
        if not template.is_file():
            text = LLAVA_TEMPLATE.replace("<image>", model.slot[1])
            template.write_text(text, encoding="utf-8")
    _write_json(target / "config.json", model.config)


def list_weights(directory: Path) -> list[StoredTensor]:
    """The tensors of GGUF or safetensors files. Raises: UnsupportedCheckpoint."""
    if not (directory / TEXT_FILE).is_file():
        return list_tensors(directory)
    return list(GgufModel(directory).tensors())


def find_files(path: Path) -> list[Path]:
    """A GGUF file, and the `mmproj` file in its directory, if any. Raises: UnsupportedCheckpoint for several."""
    found = [file for file in sorted(path.parent.glob("*mmproj*.gguf")) if file != path]
    if len(found) > 1:
        raise UnsupportedCheckpoint(
            f"{path.parent} has {len(found)} mmproj files; keep only the one for {path.name}"
        )
    return [file.resolve() for file in (path, *found)]


@dataclass(frozen=True, slots=True)
class _File:
    file: Path
    metadata: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]
    header: GgufHeader

    @classmethod
    def open(cls, file: Path) -> "_File":
        """Raises: UnsupportedCheckpoint for other formats, damaged files, and parts of a split file."""
        name = file.resolve().name
        try:
            metadata, _ = read_gguf_metadata(str(file), {"tokenizer.ggml.tokens"})
            header = GgufHeader.from_file(str(file))
        except Exception as error:  # damaged files raise any type
            # name the file, not the link in the cache
            reason = one_line(str(error).replace(str(file), name))
            raise UnsupportedCheckpoint(f"{name}: not a readable GGUF file: {reason}") from None
        opened = cls(file, metadata, {info.name: info for info in header.tensors}, header)
        if metadata.get("split.count", 1) > 1:
            raise opened.refuse("is one part of several; join them with llama.cpp's gguf-split")
        size = file.stat().st_size
        for info in header.tensors:
            if header.data_start + info.offset + info.nbytes > size:
                raise opened.refuse(f"ends within the tensor {info.name:.80}")
        return opened

    def refuse(self, why: str) -> UnsupportedCheckpoint:
        """An error that names the file; `why` completes the sentence."""
        return UnsupportedCheckpoint(f"{self.file.resolve().name}: {why}")

    def get(self, name: str) -> Any:
        """A field. Raises: UnsupportedCheckpoint if it is missing."""
        if name not in self.metadata:
            raise self.refuse(f"{name} is missing")
        return self.metadata[name]

    def whole(self, name: str, default: Any = None) -> int:
        """A positive integer field. Raises: UnsupportedCheckpoint for other values, such as a list per layer."""
        value = self.get(name) if default is None else self.metadata.get(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.refuse(f"{name} is {shown(value)}, not an integer from 1 to {2**31 - 1}")
        return value

    def tensor(self, info: TensorInfo, name: str, num_heads: int = 0) -> GgufTensor:
        """A tensor by its name in transformers. Raises: UnsupportedCheckpoint."""
        what = f"the tensor {info.name:.80}"
        kind = FLOATS[info.ggml_type][0] if info.ggml_type in FLOATS else "blocks"
        if kind == "blocks":
            is_matrix = len(info.shape) == 2 and name.endswith(".weight")
            if not is_matrix or info.shape[1] % GGML_BLOCK[info.ggml_type][0]:
                raise self.refuse(f"{what} has shape {info.shape}, not a matrix of whole blocks")
        if 0 in info.shape:
            raise self.refuse(f"{what} is empty: {info.shape}")
        if num_heads and (not info.shape or info.shape[0] % (2 * num_heads)):
            raise self.refuse(f"{what} has shape {info.shape}; {num_heads} heads do not divide it")
        offset = self.header.data_start + info.offset
        kinds = info.ggml_type, offset, info.nbytes, num_heads
        return GgufTensor(name, self.file, info.shape, kind, *kinds)


class GgufModel:
    """The GGUF files of a directory, with the configuration and tensors of a transformers model."""

    def __init__(self, directory: Path) -> None:
        """Raises: UnsupportedCheckpoint."""
        self._text = _File.open(directory / TEXT_FILE)
        tower = directory / TOWER_FILE
        self._tower = _File.open(tower) if tower.is_file() else None
        kind = self._text.get("general.architecture")
        if kind not in _ARCHITECTURES:
            what = " (an mmproj file)" if kind == "clip" else ""
            known = ", ".join(_ARCHITECTURES)
            raise self._text.refuse(
                f"general.architecture is {kind!r:.40}{what}; supported: {known}"
            )
        self._kind = str(kind)
        self.config = self._text_config()
        if self._tower is not None:
            self.config = _llava_config(self._tower, self.config, self.slot)
        if any(tensor.is_blocks for tensor in self.tensors()):
            self.config["quantization_config"] = {"quant_method": "gguf"}

    @property
    def slot(self) -> tuple[int, str]:
        """The image token's id and text: `<image>`, else the unknown token, which no text produces."""
        tokens = self._text.get("tokenizer.ggml.tokens")
        if "<image>" in tokens:
            return tokens.index("<image>"), "<image>"
        number = self._text.metadata.get("tokenizer.ggml.unknown_token_id")
        if type(number) is not int or not 0 <= number < len(tokens):
            raise self._text.refuse("has neither an <image> token nor an unknown token")
        return number, tokens[number]

    @property
    def image_settings(self) -> dict[str, Any] | None:
        """The content of CLIP's `preprocessor_config.json`; None without a tower."""
        if self._tower is None:
            return None
        size = self._tower.whole("clip.vision.image_size")
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
            "image_mean": self._tower.get("clip.vision.image_mean"),
            "image_std": self._tower.get("clip.vision.image_std"),
        }

    def tensors(self) -> Sequence[GgufTensor]:
        """The tensors of both files, by their names in transformers. Raises: UnsupportedCheckpoint."""
        text = self.config.get("text_config", self.config)
        heads = {"q_proj": text["num_attention_heads"], "k_proj": text["num_key_value_heads"]}
        prefix = "language_model." if self._tower is not None else ""
        found = []
        for info in self._text.infos.values():
            if info.name == _ROTARY:
                continue
            name = _rename(self._text, info.name, _TEXT_NAMES)
            in_pairs = heads.get(name.split(".")[-2], 0) if _ARCHITECTURES[self._kind][2] else 0
            found.append(self._text.tensor(info, prefix + name, in_pairs))
        tower = self._tower
        if tower is not None:
            names, (up, down) = dict(_TOWER_NAMES), ("v.blk.#.ffn_up", "v.blk.#.ffn_down")
            if _has_swapped_names(tower):
                names[up], names[down] = names[down], names[up]
            for info in tower.infos.values():
                found.append(tower.tensor(info, _rename(tower, info.name, names)))
        return found

    def _text_config(self) -> dict[str, Any]:
        text, kind = self._text, self._kind
        architecture, model_type, _ = _ARCHITECTURES[kind]
        if f"{kind}.expert_count" in text.metadata:
            raise text.refuse("mixtures of experts are not supported")
        embedding = text.infos.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise text.refuse("the tensor token_embd.weight is missing")
        heads = text.whole(f"{kind}.attention.head_count")
        width = text.whole(f"{kind}.embedding_length")
        head_dim = text.whole(f"{kind}.attention.key_length", width // heads)
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": width,
            "intermediate_size": text.whole(f"{kind}.feed_forward_length"),
            "num_hidden_layers": text.whole(f"{kind}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": text.whole(f"{kind}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": text.whole(f"{kind}.context_length"),
            "rms_norm_eps": text.get(f"{kind}.attention.layer_norm_rms_epsilon"),
            "rope_theta": text.metadata.get(f"{kind}.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in text.infos,
            "dtype": str(DTYPE).removeprefix("torch."),
        }
        if kind == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in text.infos
        ids = {name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")}
        config |= {name: text.metadata[key] for name, key in ids.items() if key in text.metadata}
        return config | self._rope(head_dim, config["rope_theta"])

    def _rope(self, head_dim: int, theta: float) -> dict[str, Any]:
        """The configuration of scaled rotary frequencies. Raises: UnsupportedCheckpoint for other scalings."""
        text, kind = self._text, self._kind
        if text.metadata.get(f"{kind}.rope.dimension_count", head_dim) != head_dim:
            raise text.refuse(f"{kind}.rope.dimension_count is not the head width {head_dim}")
        scaling = text.metadata.get(f"{kind}.rope.scaling.type", "none")
        factor = text.metadata.get(f"{kind}.rope.scaling.factor", 1.0)
        if scaling == "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
        if scaling != "none":
            raise text.refuse(f"rope.scaling.type {scaling!r:.40} is not supported, only 'linear'")
        info = text.infos.get(_ROTARY)
        if info is None:
            return {}
        # llama.cpp stores the factors of Llama 3.1's scaling, not its parameters
        factors = text.tensor(info, _ROTARY).map().float()
        scaling = RopeScaling("llama3", round(float(factors.max()), 3))
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        if not torch.allclose(factors, plain / llama3_frequencies(plain, scaling), rtol=1e-3):
            raise text.refuse(f"{_ROTARY} is not the scaling of Llama 3.1, the only supported one")
        parameters = {name: x for name, x in asdict(scaling).items() if name != "kind"}
        return {"rope_scaling": {"rope_type": "llama3", **parameters}}


def _rename(file: _File, name: str, names: Mapping[str, str]) -> str:
    """The name of a tensor in transformers. Raises: UnsupportedCheckpoint."""
    number, key = _NUMBER.search(name), _NUMBER.sub("#", name, count=1)
    stem, _, part = key.rpartition(".")
    found = f"{names[stem]}.{part}" if stem in names else names.get(key)
    if found is None or (stem in names and part not in ("weight", "bias")):
        raise file.refuse(f"the tensor {name:.80} does not belong to this architecture")
    return found.replace("#", number[0]) if number else found


def _llava_config(file: _File, text: dict[str, Any], slot: tuple[int, str]) -> dict[str, Any]:
    """The content of LLaVA's `config.json`. Raises: UnsupportedCheckpoint for other towers and projectors."""
    kind = file.get("general.architecture")
    projector = file.metadata.get("clip.projector_type", "mlp")
    if kind != "clip" or projector != "mlp" or "clip.vision.image_grid_pinpoints" in file.metadata:
        what = f"clip.projector_type {projector!r:.40}" if kind == "clip" else f"{kind!r:.40}"
        if projector == "mlp" and kind == "clip":
            what = "images in tiles"
        raise file.refuse(f"{what}: only CLIP with LLaVA's projector 'mlp' is supported")
    num_layers = file.whole("clip.vision.block_count")
    features = file.metadata.get("clip.vision.feature_layer")
    if features is None:  # LLaVA reads the second to last layer; older files have no layer after it
        features = [num_layers - 1 if "v.post_ln.weight" in file.infos else num_layers]
    is_gelu = file.metadata.get("clip.use_gelu", False)
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": file.whole("clip.vision.embedding_length"),
        "intermediate_size": file.whole("clip.vision.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": file.whole("clip.vision.attention.head_count"),
        "image_size": file.whole("clip.vision.image_size"),
        "patch_size": file.whole("clip.vision.patch_size"),
        "layer_norm_eps": file.metadata.get("clip.vision.attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu" if is_gelu else "quick_gelu",
        "projection_dim": file.metadata.get("clip.vision.projection_dim", 768),
    }
    if file.metadata.get("clip.use_silu", False):
        raise file.refuse("clip.use_silu is true; only gelu is supported")
    shared = ("dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": vision,
        "vision_feature_layer": features if len(features) > 1 else features[0],
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_index": slot[0],
        **{name: text[name] for name in shared if name in text},
    }


def _has_swapped_names(file: _File) -> bool:
    """Whether `ffn_down` is the expanding layer, as in files of llama.cpp's older converter."""
    info = file.infos.get("v.blk.0.ffn_down.weight")
    width, inner = (file.whole(f"clip.vision.{n}_length") for n in ("embedding", "feed_forward"))
    return info is not None and width != inner and info.shape == (inner, width)


def write_tokenizer(file: Path, target: Path) -> None:
    """Write tokenizer and chat template of a GGUF file. Raises: UnsupportedCheckpoint, OSError."""
    with readable(f"{file.resolve().name}: the tokenizer"):
        architecture, content, settings = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(architecture, content)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    tokenizer.save_pretrained(target)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, default=str) + "\n"
    file.write_text(text, encoding="utf-8")
