"""Loads embedding engines."""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipModel,
)

from engines.base import EngineStartError, LoadedEngine, Progress, UnsupportedCheckpoint
from engines.heap import keep_freed_memory
from engines.packages.checkpoint_json import one_line
from engines.packages.resolve import default_name, resolve_model
from engines.pooling.batch import Row
from engines.pooling.checkpoint import digest_of, read_sentence_config, read_shorter_dimensions
from engines.pooling.clip import ClipEncoder, Filling
from engines.pooling.encoder import PACKED_TYPES, SCORER_TYPES, Encoder, first_position
from engines.pooling.engine import PoolingEngine
from engines.pooling.layers import build_head, pack_linears, quantize_linears, take_layers
from engines.pooling.settings import EncoderSettings
from engines.pooling.texts import Texts, Words
from engines.silent_transformers import silent_transformers
from engines.text.tokenizer import readable
from engines.torch_backend.loading.check import check_memory, check_model
from engines.torch_backend.loading.load import choose_device, choose_dtype
from engines.torch_backend.loading.stored_tensors import finite
from engines.torch_backend.threads import set_num_threads


def load_pooling_engine(settings: EncoderSettings, progress: Progress | None) -> LoadedEngine:
    """Load a model and warm it up. Raises: EngineStartError."""
    began_at = time.perf_counter()
    report = (lambda share: progress("download", share)) if progress else None
    directory = resolve_model(settings.model, report)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    is_int8 = settings.quantization == "int8"
    if is_int8 and settings.dtype == "auto":
        dtype = torch.float32  # the int8 kernels use this type
    model = load_encoder(directory, device, dtype, settings.max_model_len, is_int8)
    set_num_threads(settings.num_threads, device, sum(model.memory_bytes().values()))
    if device.type == "cpu":
        keep_freed_memory()  # each layer of a batch frees tens of megabytes
    model.compute([Row(Words((0, 0, 0), (0, 0, 0)), 3)])
    engine = PoolingEngine(model, settings, {"load": time.perf_counter() - began_at})
    card = engine.card(
        settings.served_name or default_name(settings.model),
        max_model_len=model.texts.max_tokens,
        vocab_size=model.texts.vocab_size,
        image_tokens=model.image_tokens,
        digest=digest_of(directory),
        dtype=str(dtype).removeprefix("torch."),
        quantization="int8" if is_int8 else "",
        format="safetensors",
    )
    return LoadedEngine(engine, card)


def load_encoder(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    is_int8: bool = False,
) -> Encoder | ClipEncoder:
    """The model of a directory. Raises: UnsupportedCheckpoint, EngineStartError."""
    if not any(directory.glob("*.safetensors")):
        raise UnsupportedCheckpoint(
            f"{directory} has no safetensors weights; pickled ones (.bin) are not read, because "
            "unpickling can run any code"
        )
    kind, config = find_kind(directory)
    sentence = read_sentence_config(directory)
    model = _load_model(kind, directory, dtype).to(device).eval()
    layers = take_layers(model, device) if config.model_type in PACKED_TYPES else None
    prepare_linears(model, device, is_int8)
    has_images = kind in (CLIPModel, SiglipModel)
    text = config.text_config if has_images else config
    limits = (max_tokens, sentence.max_tokens, _num_positions(text))
    tokenizer = _load_tokenizer(directory)
    most = min(x for x in (*limits, tokenizer.model_max_length) if x is not None)
    texts = Texts(tokenizer.backend_tokenizer, most, text.vocab_size, sentence)
    if has_images:
        filling = _filling(text, tokenizer) if kind is SiglipModel else None
        with readable("preprocessor_config.json"):
            processor = AutoImageProcessor.from_pretrained(directory)
        return ClipEncoder(model, texts, processor, filling)
    is_scorer = kind is AutoModelForSequenceClassification
    head = build_head(sentence.modules, directory).to(device)
    encoder = Encoder(model, texts, sentence, is_scorer, layers, head)
    encoder.shorter_dimensions = read_shorter_dimensions(directory, encoder.dimensions)
    return encoder


def prepare_linears(model: torch.nn.Module, device: torch.device, is_int8: bool) -> None:
    """Pack or quantize the weights for the CPU kernels. Raises: EngineStartError."""
    if is_int8 and device.type != "cpu":
        raise EngineStartError(
            "VLM_ENGINE__QUANTIZATION: embedding models support int8 on a CPU only; set it to none"
        )
    if is_int8:
        quantize_linears(model)
    elif device.type == "cpu":
        pack_linears(model)


@readable("the tokenizer")
def _load_tokenizer(directory: Path) -> Any:
    """The tokenizer of transformers, else of `tokenizer.json`. Raises: UnsupportedCheckpoint."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (ImportError, OSError, ValueError, KeyError, AttributeError):
        tokenizer = None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        if not (directory / "tokenizer.json").is_file():
            raise UnsupportedCheckpoint(
                f"{directory} has no tokenizer.json, and transformers cannot create a fast tokenizer from its files"
            )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer


def _filling(config: Any, tokenizer: Any) -> Filling:
    """Pad texts to one length, because SigLIP was trained on such texts without a mask."""
    pad = tokenizer.pad_token_id
    return Filling(
        config.max_position_embeddings,
        config.pad_token_id if pad is None else pad,
        tokenizer.padding_side == "left",
    )


def find_kind(directory: Path) -> tuple[Any, Any]:
    """The class of transformers for a model, and its configuration. Raises: UnsupportedCheckpoint."""
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # invalid values raise errors of any type
        raise UnsupportedCheckpoint(f"config.json: {one_line(error)}") from error
    return _kind((config.architectures or [""])[0], config, directory), config


def find_engine(directory: Path, num_weight_bytes: int) -> str:
    """The engine that can run a model here, if need be in int4. Raises: UnsupportedCheckpoint, ModelTooLarge."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_model(directory, num_weight_bytes, device, "int4")
    except UnsupportedCheckpoint as problem:
        try:
            find_kind(directory)
        except UnsupportedCheckpoint:
            raise problem from None
        check_memory(num_weight_bytes, device)
        return "pooling"
    return "torch"


def _kind(architecture: str, config: Any, directory: Path) -> Any:
    if architecture in ("CLIPModel", "SiglipModel"):
        return CLIPModel if architecture == "CLIPModel" else SiglipModel
    if architecture.endswith("ForSequenceClassification"):
        if config.num_labels != 1:
            raise UnsupportedCheckpoint(
                f"config.json: {architecture} has {config.num_labels} labels; a model for rerank must have one"
            )
        if config.model_type not in SCORER_TYPES:
            raise UnsupportedCheckpoint(
                f"config.json: {config.model_type} is not supported for rerank; supported are {', '.join(SCORER_TYPES)}"
            )
        return AutoModelForSequenceClassification
    if not all(hasattr(config, name) for name in ("hidden_size", "vocab_size")):
        raise UnsupportedCheckpoint(
            f"config.json: {architecture or config.model_type} is not a text encoder; models that embed texts and "
            "images must be CLIPModel or SiglipModel"
        )
    is_sentence = (directory / "modules.json").is_file()
    if not is_sentence and "For" in architecture and not architecture.endswith("ForMaskedLM"):
        raise UnsupportedCheckpoint(
            f"config.json: {architecture} is not an embedding model: it is not an encoder such as BertModel, and "
            "has no modules.json. For a chat model, set VLM_ENGINE__KIND=torch"
        )
    return AutoModel


def _load_model(kind: Any, directory: Path, dtype: torch.dtype) -> Any:
    try:
        with silent_transformers():
            model, info = kind.from_pretrained(
                directory, use_safetensors=True, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # damaged files raise errors of any type
        raise UnsupportedCheckpoint(f"the weights cannot be loaded: {one_line(error)}") from error
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        raise UnsupportedCheckpoint(
            f"the weights lack {sorted(missing)[0]} and {len(missing) - 1} more tensors"
        )
    if kind is AutoModel and hasattr(model, "pooler"):
        model.pooler = None
    for name, weight in model.named_parameters():
        finite(name, weight.detach())
    return model


def _num_positions(config: Any) -> int | None:
    number = getattr(config, "max_position_embeddings", None)
    if number is None:
        return None
    if config.model_type in PACKED_TYPES:
        return number - first_position(config)
    return number - 2 if config.model_type == "mpnet" else number
