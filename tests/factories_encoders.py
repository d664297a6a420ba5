"""Encoder directories with a few layers of random weights, created offline, and reference results of transformers."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    DistilBertConfig,
    ElectraConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    XLMRobertaConfig,
)

WORDS = [f"w{index}" for index in range(200)]
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
VOCAB_SIZE = len(SPECIALS) + len(WORDS)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "bert": lambda: BertConfig(**SMALL, max_position_embeddings=64),
    "roberta": lambda: RobertaConfig(**SMALL, max_position_embeddings=66),
    "xlm-roberta": lambda: XLMRobertaConfig(**SMALL, max_position_embeddings=66, type_vocab_size=1),
    "electra": lambda: ElectraConfig(**SMALL, embedding_size=16, max_position_embeddings=64),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=32, n_layers=3, n_heads=4, hidden_dim=64, pad_token_id=0,
        max_position_embeddings=64,
    ),
    "mpnet": lambda: MPNetConfig(**SMALL, max_position_embeddings=66),
    "qwen3": lambda: Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=64),
}  # fmt: skip


def make_tokenizer(directory: Path, **options: Any) -> None:
    """Writes a tokenizer of listed words with `<s>` and `</s>`; a pair has `</s>` between its parts, and type IDs."""
    vocab = {word: index for index, word in enumerate([*SPECIALS, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=64,
        bos_token="<s>", eos_token="</s>", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **options,
    ).save_pretrained(directory)  # fmt: skip


def spread(model: Any) -> Any:
    """Scales the weights, so that answers differ clearly."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_encoder(
    directory: Path,
    kind: str,
    *,
    pooling: str = "mean",
    normalize: bool = False,
    dense: Sequence[dict[str, Any]] = (),
    **own: Any,
) -> Path:
    """Writes an encoder with the files of sentence-transformers. `dense`: the `config.json` of each dense module."""
    torch.manual_seed(7)
    config = CONFIGS[kind]()
    for name, value in own.pop("config", {}).items():
        setattr(config, name, value)
    spread(AutoModel.from_config(config)).save_pretrained(directory)
    make_tokenizer(directory)
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((f"{index}_Dense", "Dense") for index, _ in enumerate(dense, 2)),
        *([("2_Normalize", "Normalize")] if normalize else []),
    ]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind_}"}
        for n, (path, kind_) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": config.hidden_size}
            | {f"pooling_mode_{name}": mode == pooling for mode, name in modes.items()}
        )
    )
    for index, values in enumerate(dense, 2):
        make_dense(directory / f"{index}_Dense", values)
    (directory / "config_sentence_transformers.json").write_text(json.dumps(own))
    return directory


def make_dense(folder: Path, values: dict[str, Any]) -> None:
    """Writes a dense module of sentence-transformers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    shape = (values["out_features"], values["in_features"])
    tensors = {"linear.weight": torch.randn(shape) * 0.3}
    if values.get("bias", True):
        tensors["linear.bias"] = torch.randn(shape[0]) * 0.3
    if values.get("use_residual") and shape[0] != shape[1]:
        tensors["residual.weight"] = torch.randn(shape) * 0.3
    save_file(tensors, folder / "model.safetensors")


VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def make_siglip(directory: Path, padding_side: str = "right") -> Path:
    """Writes two towers of two layers; texts have 16 tokens."""
    torch.manual_seed(7)
    text = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 16, "projection_size": 32}
    config = SiglipConfig(text_config=text, vision_config=VISION)
    spread(SiglipModel(config)).save_pretrained(directory)
    make_tokenizer(directory, padding_side=padding_side)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(directory)
    return directory


def make_scorer(
    directory: Path, kind: str, config: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Writes a cross-encoder with one label; `config` has changes."""
    torch.manual_seed(7)
    model = CONFIGS[kind]()
    for name, value in {**config, "num_labels": 1}.items():
        setattr(model, name, value)
    spread(AutoModelForSequenceClassification.from_config(model)).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def make_clip(directory: Path) -> Path:
    """Writes two towers of two layers."""
    torch.manual_seed(7)
    text = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 24}
    config = CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    spread(CLIPModel(config)).save_pretrained(directory)
    make_tokenizer(directory)
    CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(directory)
    return directory


@lru_cache(maxsize=1)
def _loaded(directory: Path, auto: Any) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(directory), auto.from_pretrained(directory).eval()


@torch.inference_mode()
def reference(directory: Path, text: str, pooling: str, *, normalize: bool = False) -> torch.Tensor:
    """Returns the vector of one text, by transformers and the formula of sentence-transformers."""
    tokenizer, model = _loaded(directory, AutoModel)
    inputs = tokenizer(text, return_tensors="pt")
    if getattr(model.config, "type_vocab_size", 0) <= 1 or model.config.model_type == "mpnet":
        inputs.pop("token_type_ids", None)
    hidden = model(**inputs).last_hidden_state[0]
    ways = {"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.amax(0), "last": hidden[-1]}
    pooled = ways[pooling]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled


@torch.inference_mode()
def reference_score(directory: Path, query: str, document: str) -> torch.Tensor:
    """Returns the unnormalized score of one pair, by transformers."""
    tokenizer, model = _loaded(directory, AutoModelForSequenceClassification)
    inputs = tokenizer(query, document, return_tensors="pt")
    if getattr(model.config, "type_vocab_size", 0) <= 1:
        inputs.pop("token_type_ids", None)
    return model(**inputs).logits[0, 0]
