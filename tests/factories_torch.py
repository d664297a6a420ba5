"""Random tiny LLaVA models, as transformers' and as our model with the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from engines.core.engine import BatchingEngine
from engines.core.sequence import Batch, EngineRequest, ImageInput
from engines.mock.engine import MockProcessor
from engines.torch_backend.layers.linear import FLOAT, Linear, QuantizedMethod, quantizable_layers
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.models.config import RopeScaling, TextConfig, VisionConfig
from engines.torch_backend.models.llava import FAMILY, Llava, VLMConfig
from engines.torch_backend.models.registry import FamilyModel, rename_weights
from engines.torch_backend.multimodal import image_encoder, processed
from engines.torch_backend.ops.linear.cpu import pack_linears
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.integrity import check_scheduler

IMAGE_TOKEN_ID = 90
#: Prompts with no, one and several images, which are given as seeds.
PROMPTS: dict[str, list[list[int] | int]] = {
    "text": [list(range(3, 17))],
    "one": [[5, 6, 7], 1, [8, 9, 10, 11]],
    "two": [[5, 6, 7], 1, [8, 9], 2, [12, 13]],
    "again": [[20, 21], 2, [22], 2, [23, 24, 25]],
    "neighbours": [3, 1, [30, 31, 32]],
}
LLAMA3_SCALING = RopeScaling("llama3", 4.0, 1.0, 4.0, 64)


def make_vision_config(**changes: Any) -> VisionConfig:
    config = VisionConfig(
        hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, image_size=24, patch_size=8
    )
    return replace(config, **changes)


def make_text_config(**changes: Any) -> TextConfig:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "head_dim": 8}
    config = TextConfig(
        **sizes, num_layers=2, num_heads=4, num_kv_heads=2, max_position_embeddings=256
    )
    return replace(config, **changes)


def make_vlm_config(
    *, vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **changes: Any
) -> VLMConfig:
    config = VLMConfig(
        vision=make_vision_config(**(vision or {})),
        text=make_text_config(**(text or {})),
        image_token_id=IMAGE_TOKEN_ID,
        vision_feature_layers=(-2,),
        vision_feature_select_strategy="default",
    )
    return replace(config, **changes)


#: Names of our fields, with transformers' names if they differ.
VISION_FIELDS = {
    "hidden_size": "", "intermediate_size": "", "image_size": "", "patch_size": "", "hidden_act": "",
    "layer_norm_eps": "", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
}  # fmt: skip
TEXT_FIELDS = {
    "vocab_size": "", "hidden_size": "", "intermediate_size": "", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "",
    "max_position_embeddings": "", "rms_norm_eps": "", "attention_bias": "", "mlp_bias": "",
    "tie_word_embeddings": "", "hidden_act": "",
}  # fmt: skip


def fields_of(config: VisionConfig | TextConfig, names: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of our config under transformers' names."""
    return {theirs or ours: getattr(config, ours) for ours, theirs in names.items()}


def _rope_parameters(config: TextConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return parameters


def make_transformers_config(config: VLMConfig) -> LlavaConfig:
    vision, text = config.vision, config.text
    layers = config.vision_feature_layers
    return LlavaConfig(
        vision_config=CLIPVisionConfig(**fields_of(vision, VISION_FIELDS)),
        text_config=LlamaConfig(
            **fields_of(text, TEXT_FIELDS),
            rope_parameters=_rope_parameters(text),
            bos_token_id=None,
            eos_token_id=None,
        ),
        tie_word_embeddings=text.tie_word_embeddings,
        image_token_index=config.image_token_id,
        image_seq_length=config.tokens_per_image,
        projector_hidden_act=config.projector_hidden_act,
        multimodal_projector_bias=config.projector_bias,
        vision_feature_layer=layers[0] if len(layers) == 1 else list(layers),
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )


@dataclass(frozen=True)
class ModelPair:
    """The same weights in transformers' model and in ours."""

    config: VLMConfig
    theirs: LlavaForConditionalGeneration
    ours: Llava


def make_model_pair(config: VLMConfig, std: float = 0.3) -> ModelPair:
    """Returns random float32 weights, wide enough that greedy answers do not repeat one token."""
    torch.manual_seed(0)
    theirs = LlavaForConditionalGeneration(make_transformers_config(config)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            is_gain = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=float(is_gain), std=std)
    return ModelPair(config, theirs, load_ours(config, dict(theirs.state_dict())))


def quantize_pair(
    pair: ModelPair, scheme: QuantizedMethod, *, same_weights: bool = True, ops: Ops | None = None
) -> ModelPair:
    """Returns our model with quantized weights, and transformers' with the dequantized or the full ones."""
    with torch.device("meta"):
        ours = Llava(pair.config)
    for layer in quantizable_layers(ours, scheme):
        scheme.create(layer, torch.float32)
    weights = rename_weights(dict(pair.theirs.state_dict()), FAMILY, pair.config)
    for name, module in ours.named_modules():
        if isinstance(module, Linear) and module.method is not FLOAT:
            parts = scheme.quantize(weights.pop(f"{name}.weight"), torch.float32)
            weights |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    ours.load_state_dict(weights, assign=True)
    theirs = deepcopy(pair.theirs) if same_weights else pair.theirs
    for name, linear in ours.named_modules():
        if same_weights and isinstance(linear, Linear) and linear.method is not FLOAT:
            their_name = name.replace("language_model.model.", "model.language_model.")
            theirs.get_submodule(their_name).weight.data = linear.weight
    if ops is not None:
        pack_linears(ours, ops, torch.float32)
    return ModelPair(pair.config, theirs, ours.eval())


def halve_pair(pair: ModelPair) -> ModelPair:
    """Returns our decoder with matrices in bfloat16, and transformers' with the same values in float32."""
    theirs = deepcopy(pair.theirs)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ours = load_ours(pair.config, dict(theirs.state_dict()))
    for parameter in ours.language_model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16()
    return ModelPair(pair.config, theirs, ours)


def load_ours(config: VLMConfig, weights: dict[str, torch.Tensor]) -> Llava:
    with torch.device("meta"):
        model = Llava(config)
    model.load_state_dict(rename_weights(weights, FAMILY, config), assign=True)
    return model.eval()


class NumberTokenizer:
    """A tokenizer whose tokens are numbers; no token ends an answer."""

    vocab_size = 96
    eos_token_ids: frozenset[int] = frozenset()
    drops_leading_space = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def token_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()


class NumberProcessor(MockProcessor):
    """A processor whose prompts are numbers."""

    def __init__(self) -> None:
        super().__init__(tokens_per_image=4)
        self.tokenizer = NumberTokenizer()


def make_runner(pair: ModelPair, **changes: Any) -> TorchRunner:
    config = TorchSettings(**{"num_kv_blocks": 256, "block_size": 4, **changes})
    return TorchRunner(pair.ours, config, torch.device("cpu"), torch.float32)


def make_engine(pair: ModelPair, ops: Ops | None = None, **changes: Any) -> BatchingEngine:
    config = TorchSettings(**{"num_kv_blocks": 256, "block_size": 4, **changes})
    dtype = pair.ours.language_model.model.norm.weight.dtype
    runner = TorchRunner(pair.ours, config, torch.device("cpu"), dtype, ops=ops)
    return BatchingEngine(runner, NumberProcessor(), config)


@contextmanager
def smallest_chunks() -> Iterator[None]:
    """Encodes one part of a video per engine step, and computes the tokens of each chunk immediately."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processed, "CHUNK_SLOTS", 1)
        patch.setattr(image_encoder, "FEWEST_TOKENS", 1)
        patch.setattr(image_encoder, "SECONDS_ALONE", 0.0)
        yield


def encode_in_smallest_parts(engine: BatchingEngine) -> None:
    """Leaves no time for images in steps beside streams."""
    launch = engine.runner.launch
    engine.runner.launch = lambda batch: launch(Batch(batch.items, max_vision_s=0.0))


def make_pixels(seed: int) -> torch.Tensor:
    return torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(seed))


def make_request(
    config: VLMConfig,
    request_id: str,
    parts: list[list[int] | int],
    *,
    max_tokens: int = 20,
    output_token_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> EngineRequest:
    """`parts` in order: lists of text tokens, and images as the seeds of their pixels."""
    token_ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        num_slots = config.tokens_per_image
        images.append(ImageInput(len(token_ids), num_slots, f"hash-{part}", make_pixels(part)))
        token_ids += [config.image_token_id] * num_slots
    return EngineRequest(
        request_id,
        token_ids,
        SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling}),
        tuple(images),
        output_token_ids,
    )


def make_requests(pair: ModelPair, **sampling: Any) -> list[EngineRequest]:
    """Returns a request for each prompt."""
    return [
        make_request(pair.config, name, parts, **{"max_tokens": 16, **sampling})
        for name, parts in PROMPTS.items()
    ]


def run_to_end(engine: BatchingEngine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Returns all output tokens of each request, including those of earlier attempts."""
    tokens = {request.request_id: list(request.output_token_ids) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


def prefill_progress(engine: BatchingEngine, request: EngineRequest) -> list[tuple[int, int]]:
    """Returns the numbers of encoded images and computed prompt tokens after each step until the first token."""
    engine.add(request)
    found = []
    while not found or found[-1][1] < len(request.prompt_token_ids):
        engine.step()
        check_scheduler(engine.scheduler)
        computed = engine.scheduler.find(request.request_id).num_computed_tokens
        found.append((engine.runner.encoder_cache_counts()[0], computed))
    return found


class PlainAttention:
    """Causal attention over one sequence, in the simplest form."""

    def __init__(self, config: TextConfig, rotation: tuple[Tensor, Tensor]) -> None:
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.group = config.num_heads // config.num_kv_heads
        self.rotation = rotation

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        query, key, value = qkv.unflatten(1, (sum(self.sizes), -1)).split(self.sizes, dim=1)
        query, key = (rotate(x, *self.rotation) for x in heads.normed(query, key))
        key, value = (x.repeat_interleave(self.group, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        return out.transpose(0, 1).flatten(1)


@torch.inference_mode()
def plain_logits(model: FamilyModel, token_ids: Tensor) -> Tensor:
    """Returns the logits of one text, by the decoder alone. Shapes: (N,); returns (N, vocabulary)."""
    text, decoder = model.language_model.text, model.language_model
    rotary = model.rotary(len(token_ids), torch.float32, torch.device("cpu"))
    attend = PlainAttention(text, rotary.at(torch.arange(len(token_ids))))
    return decoder.logits(decoder(decoder.embed(token_ids), attend))


@torch.inference_mode()
def logits_of(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits of one of our families, or of a generic model."""
    if model.language_model is not None:
        return plain_logits(model, token_ids)
    with model.as_transformers_does() as inner:
        return inner(input_ids=token_ids[None]).logits[0]
