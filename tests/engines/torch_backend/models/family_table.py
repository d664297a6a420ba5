"""Tiny random models of all families, created from transformers' own configuration classes without downloads."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from benchmarks.checkpoint_files import make_tokenizer

#: Image token of the tokenizer; its bytes and merges have lower IDs.
IMAGE_ID = 300
IMAGE_IDS: dict[str, Any] = {"image_token_id": IMAGE_ID, "image_token_index": IMAGE_ID}
TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
SPACES: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
GEMMA3N_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row of the table. A family with images has a processor and an image placeholder of its template."""

    name: str
    create: Callable[[], PreTrainedConfig]
    shares_prefixes: bool = True
    create_processor: Callable[[], Any] | None = None
    placeholder: str = ""
    embedding_std: float = 0.35  #: large enough for different answers
    opening: str = ""  #: text at the beginning of a prompt
    video_placeholder: str = ""  #: as the template writes a video; empty: not tested
    audio_placeholder: str = ""
    class_name: str = ""  #: of models that are not in transformers' list for images and text
    #: Applies a processor that builds prompts itself to images and a text; such families have no template.
    read: Callable[[Any, list[Any], str], Any] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def auto(self) -> Any:
        """Returns the class with which transformers runs the family."""
        if self.class_name:
            return getattr(transformers, self.class_name)
        auto: Any = AutoModelForImageTextToText if self.create_processor else AutoModelForCausalLM
        return auto._model_mapping[type(self.create())]

    @property
    def architecture(self) -> str:
        return self.auto.__name__

    @property
    def kind(self) -> str:
        """Returns the family's name in the list of tested architectures."""
        text_config = self.create().get_text_config(decoder=True)
        suffix = f"/{text_config.model_type}" if self.create_processor else ""
        return self.architecture + suffix


def text(name: str, config_class: str, shares_prefixes: bool = True, **more: Any) -> Family:
    create = getattr(transformers, f"{config_class}Config")
    return Family(name, lambda: create(**{**TEXT, **more}), shares_prefixes)


def _gpt2() -> PreTrainedConfig:
    return transformers.GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    )  # fmt: skip


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = [
    text("Llama", "Llama"),
    text("Llama 3 rope", "Llama", rope_parameters=LLAMA3_ROPE),
    text("Mistral, window", "Mistral", sliding_window=8, head_dim=16),
    text("Qwen2", "Qwen2"),
    text("Qwen3", "Qwen3", head_dim=16),
    text("Gemma", "Gemma", head_dim=16),
    text(
        "Gemma 2", "Gemma2", head_dim=16, sliding_window=6, attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
        query_pre_attn_scalar=24, **MIXED,
    ),
    text("Gemma 3, text", "Gemma3Text", head_dim=16, sliding_window=6, query_pre_attn_scalar=24, **MIXED),
    text("Gemma 3n, text", "Gemma3nText", **GEMMA3N_TEXT),
    text("Phi", "Phi"),
    text("Phi-3", "Phi3", num_key_value_heads=4),
    text("StableLM", "StableLm"),
    text("StarCoder 2", "Starcoder2", sliding_window=8),
    Family("GPT-2", _gpt2),
    text("GPT-NeoX", "GPTNeoX"),
    text("OLMo 2", "Olmo2"),
    text(
        "Granite", "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    text("Cohere 2", "Cohere2", sliding_window=6, **MIXED),
    text("SmolLM3", "SmolLM3", num_hidden_layers=4),
    text("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    text("Qwen3-MoE", "Qwen3Moe", head_dim=16, **EXPERTS),
    text("GPT-OSS", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=6, **MIXED),
    text("DeepSeek V2", "DeepseekV2", q_lora_rank=None, **LATENT),
    text("DeepSeek V3", "DeepseekV3", q_lora_rank=16, **LATENT),
    text(
        "Qwen3-Next", "Qwen3Next", shares_prefixes=False, head_dim=16, layer_types=["linear_attention", "full_attention"],
        **DELTA, **EXPERTS, shared_expert_intermediate_size=32,
    ),
    text(
        "Falcon-H1", "FalconH1", shares_prefixes=False, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=8, mamba_chunk_size=8,
    ),
    text("Bamba", "Bamba", shares_prefixes=False, attn_layer_indices=[1], **SPACES),
    text(
        "Granite 4 hybrid", "GraniteMoeHybrid", shares_prefixes=False, layer_types=["mamba", "attention"],
        shared_intermediate_size=96, num_local_experts=0, **SPACES,
    ),
    text(
        "LFM2", "Lfm2", shares_prefixes=False, layer_types=["conv", "full_attention"], conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    ),
]  # fmt: skip


VIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
CLIP: dict[str, Any] = {**VIT, "image_size": 28, "patch_size": 14}
SIGLIP: dict[str, Any] = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
SMALL_TOWER: dict[str, Any] = {**CLIP, "patch_size": 7}
CLIP_TOWER: dict[str, Any] = {**CLIP, "model_type": "clip_vision_model"}
QIANFAN_TOWER: dict[str, Any] = {**SMALL_TOWER, "image_size": [28, 28], "patch_size": [7, 7]}
TILES = [[28, 56], [56, 28], [56, 56]]
SQUARE = {"height": 28, "width": 28}
#: Limits for patch grids: at least one patch of 28 by 28 pixels, at most twelve.
GRIDS = {"shortest_edge": 784, "longest_edge": 784 * 12}


def tokens(*special: str, **named: str) -> Callable[[], Any]:
    """Returns a factory for a tokenizer with special tokens, whose IDs start at 302; named tokens come first."""

    def create() -> Any:
        backend = make_tokenizer(IMAGE_ID)
        backend.add_special_tokens(
            [
                AddedToken(each, special=True, normalized=False)
                for each in (*named.values(), *special)
            ]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
            extra_special_tokens=named or None,
        )

    return create


def sub(model_type: str, **more: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **more}


def own(
    name: str, placeholder: str, kind: str, tokens: Callable[[], Any], *, images: dict[str, Any] | None = None,
    videos: dict[str, Any] | None = None, sounds: Callable[[], Any] | None = None, by: str = "",
    images_by: str = "", videos_by: str = "", options: Mapping[str, Any] = MappingProxyType({}), **more: Any,
) -> Family:  # fmt: skip
    """Returns a row whose processors have these options. Their classes are named after the model, or after `by`.

    `more` has fields of `Family` and of the configuration.
    """
    by = by or kind
    fields = {field: more.pop(field) for field in [*more] if field in Family.__dataclass_fields__}
    config_class = getattr(transformers, f"{kind}Config")

    def create_processor() -> Any:
        cls, made = partial(getattr, transformers), {}
        if images is not None:
            made["image_processor"] = cls(f"{images_by or by}ImageProcessor")(**images)
        if videos is not None:
            made["video_processor"] = cls(f"{videos_by or by}VideoProcessor")(**videos)
        if sounds is not None:
            made["feature_extractor"] = sounds()
        return cls(f"{by}Processor")(tokenizer=tokens(), **made, **options)

    def create() -> PreTrainedConfig:
        return config_class(**deepcopy(more))

    fields = {"create_processor": create_processor, **fields}
    return Family(name, create, placeholder=placeholder, **fields)


QWEN: dict[str, Any] = {
    "images": {"patch_size": 14, "min_pixels": 784, "max_pixels": 784 * 12}, "images_by": "Qwen2VL", "videos": {},
    "tokens": tokens("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "placeholder": "<|vision_start|><|image_pad|><|vision_end|>", "tie_word_embeddings": False, "image_token_id": 302,
    "video_token_id": 303,
}  # fmt: skip
OMNI_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def qwen(
    name: str, config_class: str, vision: dict[str, Any], shares_prefixes: bool = True, **more: Any
) -> Family:
    rope: dict[str, Any] = OMNI_ROPE
    if is_third := "3" in config_class:
        rope = {**rope, "mrope_interleaved": True}
        more["head_dim"] = 16
    return own(
        name, kind=config_class, by="Qwen3VL" if is_third else config_class, **QWEN, vision_config=vision,
        videos_by="Qwen3VL" if is_third else "Qwen2VL",
        text_config={**TEXT, "rope_parameters": rope, **more}, vision_start_token_id=304, vision_end_token_id=305,
        shares_prefixes=shares_prefixes,
    )  # fmt: skip


TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2_TOWER = {**TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
PIXTRAL_TOWER = {**VIT, "image_size": 56, "patch_size": 7, "head_dim": 16, "model_type": "pixtral"}
MROPE: dict[str, Any] = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0,
}  # fmt: skip


GEMMA4_TEXT: dict[str, Any] = {
    **TEXT, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 320,
}  # fmt: skip
GLM_IDS: dict[str, Any] = {
    "image_token_id": 302, "video_token_id": 303, "image_start_token_id": 304, "image_end_token_id": 305,
    "video_start_token_id": 306, "video_end_token_id": 307,
}  # fmt: skip


def _glm(name: str, by: str, kind: str, vision: dict[str, Any], **more: Any) -> Family:
    return own(
        name, "<|begin_of_image|><|image|><|end_of_image|>", kind,
        tokens(
            "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        images={"patch_size": 14, "size": GRIDS}, videos={}, by=by,
        text_config={**TEXT, "rope_parameters": MROPE, "head_dim": 16, **more},
        vision_config={**TOWER, "image_size": 56, **vision}, tie_word_embeddings=False, **GLM_IDS,
    )  # fmt: skip


LLAVA: dict[str, Any] = {
    "images": {"size": {"shortest_edge": 28}, "crop_size": SQUARE}, "by": "Llava", "images_by": "CLIP",
    "options": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "vision_config": CLIP_TOWER, "text_config": sub("llama"), **IMAGE_IDS,
}  # fmt: skip
NEXT: dict[str, Any] = {
    **LLAVA, "images": {**LLAVA["images"], "image_grid_pinpoints": TILES}, "images_by": "LlavaNext",
    "image_grid_pinpoints": TILES, "vision_feature_layer": -2,
}  # fmt: skip
SMOL: dict[str, Any] = {
    "images": {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, "options": {"image_seq_len": 4},
    "text_config": sub("llama"), "image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": 0,
}  # fmt: skip
SMOL_TILES = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
INTERN: dict[str, Any] = {
    "tokens": tokens(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", video_token="<video>"
    ),
    "images": {"size": SQUARE, "min_patches": 1, "max_patches": 4}, "images_by": "GotOcr2",
    "options": {"image_seq_length": 4}, "image_token_id": 302,
}  # fmt: skip
INTERN_VL: dict[str, Any] = {
    **INTERN, "kind": "InternVL", "videos": {}, "downsample_ratio": 0.5,
    "vision_config": {**QIANFAN_TOWER, "model_type": "internvl_vision"},
}  # fmt: skip


def _pixtral(patch: int) -> dict[str, Any]:
    return {
        "images": {"size": {"longest_edge": 56}, "patch_size": {"height": patch, "width": patch}},
        "images_by": "Pixtral", "vision_config": PIXTRAL_TOWER, "image_token_id": 302,
    }  # fmt: skip


def _gemma4(name: str, audio_config: Any = None, **more: Any) -> Family:
    return own(
        name, "<|image|>", "Gemma4",
        tokens(
            image_token="<|image|>", video_token="<|video|>", audio_token="<|audio|>", boi_token="<|image>",
            eoi_token="<image|>", boa_token="<|audio>", eoa_token="<audio|>",
        ),
        images={"patch_size": 7, "pooling_kernel_size": 2, "max_soft_tokens": 70}, videos={},
        sounds=lambda: transformers.Gemma4AudioFeatureExtractor(), options={"image_seq_length": 70},
        text_config={**GEMMA4_TEXT, **more}, image_token_id=302, video_token_id=303,
        audio_token_id=304, boi_token_id=305, eoi_token_id=306, audio_config=audio_config,
        vision_config={
            **VIT, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "patch_size": 7,
            "position_embedding_size": 64,
        },
        embedding_std=0.02,
    )  # fmt: skip


VQ: dict[str, Any] = {
    "embed_dim": 16, "num_embeddings": 8, "latent_channels": 16, "base_channels": 32, "channel_multiplier": [1, 1],
    "num_res_blocks": 1, "num_patches": 4,
}  # fmt: skip


def _read_paligemma(processor: Any, images: list[Any], text: str) -> Any:
    """Applies the processor, which builds prompts itself and requires an image."""
    if images:
        made = processor(
            images=[images], text=["<image>" * len(images) + text], return_tensors="pt"
        )
        del made["labels"]
        return made
    made = processor.tokenizer(f"<s>{text}\n", return_tensors="pt")
    made["token_type_ids"] = torch.zeros_like(made["input_ids"])
    return made


def _paligemma(name: str, kind: str, **more: Any) -> Family:
    return own(
        name, "", "PaliGemma", tokens(), images={"size": SQUARE, "image_seq_length": 4}, images_by="Siglip",
        vision_config=SIGLIP, text_config=sub(kind, head_dim=16, vocab_size=1600, **more),
        image_token_index=IMAGE_ID, projection_dim=64, hidden_size=64,
        shares_prefixes=False, read=_read_paligemma, embedding_std=0.1,
    )  # fmt: skip


FAMILIES += [
    own(
        "LLaVA, SigLIP", "<image>", "Llava", tokens(), images={"size": SQUARE}, images_by="Siglip",
        options={"patch_size": 14, "vision_feature_select_strategy": "full"},
        vision_config=SIGLIP, text_config=sub("qwen3", head_dim=16), **IMAGE_IDS,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    ),
    own("LLaVA-NeXT", "<image>", "LlavaNext", tokens(), **{**NEXT, "by": "LlavaNext", "text_config": sub("mistral")}),
    own(
        "LLaVA-OneVision", "<image>", "LlavaOnevision",
        tokens("<video>"),
        images={"size": SQUARE, "image_grid_pinpoints": TILES},
        options={"num_image_tokens": 4, "vision_feature_select_strategy": "full"}, videos={},
        vision_config={**CLIP, "model_type": "siglip_vision_model"}, text_config=sub("qwen2"),
        **IMAGE_IDS, video_token_id=302,
        image_grid_pinpoints=TILES, vision_aspect_ratio="anyres_max_9",
    ),
    own(
        "Pixtral", "[IMG]", "Llava", tokens("[IMG]", "[IMG_BREAK]", "[IMG_END]"), by="Pixtral",
        options={"patch_size": 7}, **_pixtral(7), text_config=sub("mistral", head_dim=16), image_token_index=302,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
    own(
        "Mistral 3", "[IMG]", "Mistral3", tokens("[IMG]", "[IMG_BREAK]", "[IMG_END]"), by="Pixtral",
        options={"patch_size": 7, "spatial_merge_size": 2}, **_pixtral(14), text_config=sub("mistral", head_dim=16),
        image_token_index=302, spatial_merge_size=2,
    ),
    own(
        "Idefics3", "<image>", "Idefics3", tokens("<global-img>", *SMOL_TILES), **SMOL,
        vision_config={**SMALL_TOWER, "model_type": "idefics3_vision"},
    ),
    own("InternVL 3", "<IMG_CONTEXT>", **INTERN_VL, text_config=sub("qwen3", head_dim=16)),
    qwen("Qwen2-VL", "Qwen2VL", QWEN2_TOWER),
    qwen("Qwen2.5-VL", "Qwen2_5_VL", {**TOWER, "window_size": 56, "fullatt_block_indexes": [1]}),
    qwen(
        "Qwen3-VL", "Qwen3VL",
        {**TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    ),
    qwen(
        "Qwen3-VL-MoE", "Qwen3VLMoe",
        {**TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}, **EXPERTS,
    ),
    own(
        "Gemma 3", "<start_of_image>", "Gemma3",
        tokens(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"),
        images={"size": SQUARE}, options={"image_seq_length": 4},
        vision_config=SIGLIP,
        image_token_id=302, image_token_index=302, boi_token_index=303, eoi_token_index=304,
        mm_tokens_per_image=4,
        text_config={
            **TEXT, **MIXED, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16,
            "final_logit_softcapping": None,
        },
        embedding_std=0.02,
    ),
    own("LLaVA 1.5", "<image>", "Llava", tokens(), **LLAVA),
    own("ViP-LLaVA", "<image>", "VipLlava", tokens(), **LLAVA, vision_feature_layers=[-1, -2]),
    own(
        "SmolVLM", "<image>", "SmolVLM",
        tokens("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *SMOL_TILES), **SMOL, videos={},
        vision_config={**SMALL_TOWER, "model_type": "smolvlm_vision"},
    ),
    _glm("GLM-4.1V", "Glm4v", "Glm4v", {}),
    _glm("GLM-OCR", "Glm46V", "GlmOcr", {}),
    _glm(
        "GLM-4.5V", "Glm4v", "Glm4vMoe", {}, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    _glm("GLM-4.6V", "Glm46V", "Glm46V", {"model_type": "glm4v_vision"}, model_type="glm4v_text"),
    own(
        "PaddleOCR-VL", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "PaddleOCRVL",
        tokens("<|IMAGE_START|>", "<|IMAGE_END|>", image_token="<|IMAGE_PLACEHOLDER|>"),
        images={"patch_size": 14, "size": GRIDS},
        text_config={**TEXT, "rope_parameters": MROPE, "head_dim": 16}, image_token_id=302,
        video_token_id=305, vision_start_token_id=303, vision_end_token_id=304,
        tie_word_embeddings=False,
        vision_config={**VIT, "image_size": 56, "patch_size": 14, "spatial_merge_size": 2},
    ),
    own(
        "ERNIE 4.5 VL", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "Ernie4_5_VLMoe",
        tokens(
            image_token="<|IMAGE_PLACEHOLDER|>", video_token="<|VIDEO_PLACEHOLDER|>",
            image_start_token="<|IMAGE_START|>", image_end_token="<|IMAGE_END|>",
            video_start_token="<|VIDEO_START|>", video_end_token="<|VIDEO_END|>",
        ),
        images={"patch_size": 14, "size": GRIDS}, videos={"draw_on_frames": False},
        text_config={
            **TEXT, "moe_intermediate_size": [32, 16], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
            "spatial_merge_size": 2,
        },
        tie_word_embeddings=False, **GLM_IDS,
    ),
    _gemma4(
        "Gemma 4 E", num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        audio_config={
            "model_type": "gemma4_audio", "use_clipped_linears": False, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "output_proj_dims": 48, "subsampling_conv_channels": [128, 4],
            "conv_kernel_size": 3, "attention_chunk_size": 4, "attention_context_left": 5,
        },
    ),
    _gemma4(
        "Gemma 4", use_bidirectional_attention="vision", num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    own(
        "Gemma 3n", "<image_soft_token>", "Gemma3n",
        tokens(
            boi_token="<start_of_image>", boa_token="<start_of_audio>", eoi_token="<end_of_image>",
            image_token="<image_soft_token>", eoa_token="<end_of_audio>", audio_token="<audio_soft_token>",
        ),
        images={"size": {"height": 64, "width": 64}}, images_by="Siglip",
        sounds=lambda: transformers.Gemma3nAudioFeatureExtractor(), options={"image_seq_length": 4},
        # Tokens of images and audio have their own embeddings.
        text_config={**TEXT, **GEMMA3N_TEXT, "vocab_size_per_layer_input": 304}, boi_token_id=302,
        boa_token_id=303, eoi_token_id=304, image_token_id=305, eoa_token_id=306,
        audio_token_id=307, vision_soft_tokens_per_image=4,
        vision_config={
            "model_args": {"channel_multiplier": 0.02, "msfa_output_resolution": 2}, "vocab_offset": 304,
            "vocab_size": 2,
        },
        audio_config={
            "hidden_size": 32, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2,
            "sscp_conv_channel_size": [8, 4], "vocab_offset": 306, "vocab_size": 14,
        },
        embedding_std=0.1,
    ),
    own(
        "Kimi K2.5", "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "Kimi_K25",
        tokens(
            "<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>",
        ),
        images={"patch_size": 14, "max_patches": 48, "size": {"max_height": 84, "max_width": 84}}, videos={},
        text_config={**sub("deepseek_v3", q_lora_rank=16), **LATENT},
        vision_config={**VIT, "pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=32, image_token_id=302, video_token_id=303, tie_word_embeddings=False,
    ),
    own(
        "Llama 4", "<|image|>", "Llama4",
        tokens(
            "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        images={"size": SQUARE, "max_patches": 4}, options={"patch_size": 7},
        text_config={
            **TEXT, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": 8, "floor_scale": 8, "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 7, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        image_token_index=305, boi_token_index=303, eoi_token_index=304,
    ),
    own(
        "Command A Vision", "<|IMG_PATCH|>", "Cohere2Vision",
        tokens(
            image_token="<|IMG_PATCH|>", boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>",
            img_line_break_token="<|IMG_LINE_BREAK|>",
        ),
        images={"size": SQUARE, "max_patches": 4, "patch_size": 2},
        text_config=sub("cohere2", sliding_window=6, head_dim=16, **MIXED),
        vision_config={**SIGLIP, "patch_size": 7}, image_token_id=302, alignment_intermediate_size=96,
    ),
    own(
        "Aya Vision", "<image>", "AyaVision",
        tokens(
            "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL",
            *[f"TILE_{i}" for i in range(1, 5)],
        ),
        images={**INTERN["images"], "crop_to_patches": True}, images_by="GotOcr2",
        options={"patch_size": 7, "img_size": 28, "downsample_factor": 2},
        text_config=sub("cohere2", sliding_window=6, head_dim=16, **MIXED),
        vision_config={**SIGLIP, "patch_size": 7}, image_token_index=304, image_token_id=304,
    ),
    qwen(
        "Qwen3.5", "Qwen3_5", {**TOWER, "num_position_embeddings": 64}, shares_prefixes=False,
        layer_types=["linear_attention", "full_attention"], **DELTA,
    ),
    qwen(
        "Qwen3.5-MoE", "Qwen3_5Moe", {**TOWER, "num_position_embeddings": 64}, shares_prefixes=False,
        layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32, **EXPERTS, **DELTA,
    ),
    own(
        "MiniCPM-V 4.6", "<image_pad>", "MiniCPMV4_6",
        tokens(
            image_token="<image_pad>", video_token="<video_pad>", image_start_token="<image_start>",
            image_end_token="</image_start>", slice_start_token="<slice>", slice_end_token="</slice>",
            image_id_start_token="<image_id>", image_id_end_token="</image_id>",
        ),
        images={"patch_size": 7, "scale_resolution": 56, "max_slice_nums": 2}, videos={},
        text_config=sub(
            "qwen3_5_text", head_dim=16, layer_types=["linear_attention", "full_attention"],
            rope_parameters={**MROPE, "mrope_interleaved": True}, **DELTA,
        ),
        image_token_id=302, video_token_id=303, insert_layer_id=0,
        vision_config={**VIT, "image_size": 56, "patch_size": 7, "insert_layer_id": 0},
        shares_prefixes=False,
    ),
    own(
        "LFM2-VL", "<image>", "Lfm2Vl",
        tokens(
            "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *[f"<|img_row_{i}_col_{j}|>" for i in (1, 2, 3, 4) for j in (1, 2, 3, 4)],
        ),
        images={
            "encoder_patch_size": 7, "tile_size": 28, "size": SQUARE, "min_image_tokens": 2, "max_image_tokens": 6,
            "max_tiles": 4,
        },
        text_config=sub(
            "lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, block_auto_adjust_ff_dim=False,
            vocab_size=330,
        ),
        image_token_id=IMAGE_ID, projector_hidden_size=48,
        vision_config={
            **VIT, "num_patches": 64, "patch_size": 7, "model_type": "siglip2_vision_model", "vision_use_head": False,
        },
        shares_prefixes=False, opening="<s>",
    ),
    own(
        "GOT-OCR 2", "<imgpad>", "GotOcr2",
        tokens("<imgpad>", "<img>", "</img>"),
        images={"size": {"height": 1024, "width": 1024}},
        text_config=sub("qwen2", max_position_embeddings=640), image_token_index=302, image_seq_length=256,
        vision_config={
            "hidden_size": 8, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "image_size": 1024, "patch_size": 16, "window_size": 2, "global_attn_indexes": [], "mlp_dim": 8,
        },
    ),
    own(
        "Aria", "<image>", "Aria",
        tokens(image_token="<image>"),
        images={}, options={"size_conversion": {980: 4}},
        text_config={**TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        image_token_index=IMAGE_ID, projector_patch_to_query_dict={49: 4},
        vision_config={**SMALL_TOWER, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 140},
    ),
    own(
        "DeepSeek-VL", "<image>", "DeepseekVL",
        tokens(image_token="<image>"),
        images={"size": SQUARE}, options={"num_image_tokens": 4},
        text_config=sub("llama"), image_token_id=IMAGE_ID,
        vision_config=SIGLIP,
    ),
    own(
        "DeepSeek-VL hybrid", "<image>", "DeepseekVLHybrid",
        tokens(image_token="<image>"),
        images={"size": SQUARE, "high_res_size": {"height": 128, "width": 128}}, options={"num_image_tokens": 4},
        text_config=sub("llama"), image_token_id=IMAGE_ID,
        vision_config=SIGLIP,
        high_res_vision_config={
            "model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 128, "patch_size": 16, "window_size": 2,
            "global_attn_indexes": [1], "mlp_dim": 48,
        },
    ),
    own(
        "Janus", "<image>", "Janus",
        tokens(image_token="<image>", boi_token="<begin_of_image>", eoi_token="<end_of_image>"),
        images={"size": SQUARE, "min_size": 2}, options={"num_image_tokens": 16},
        text_config=sub("llama"), image_token_id=IMAGE_ID,
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
            "mlp_ratio": 2, "projection_dim": 64, "num_image_tokens": 16, "depth": 1,
        },
        vq_config={**VQ, "image_token_embed_dim": 64, "projection_dim": 64},
    ),
    own(
        "EXAONE 4.5", kind="Exaone4_5_", videos_by="Qwen2VL", **QWEN,
        text_config=sub("exaone4", sliding_window=6, sliding_window_pattern=2, **MIXED),
        vision_config={**TOWER, "num_key_value_heads": 1, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    own(
        "LightOnOCR", "<|image_pad|>", "LightOnOcr",
        tokens(image_token="<|image_pad|>", image_break_token="<|vision_pad|>", image_end_token="<|vision_end|>"),
        options={"patch_size": 7}, **_pixtral(14), text_config=sub("qwen3", head_dim=16),
    ),
    own(
        "Qianfan-OCR", "<image>", "QianfanOCR", **INTERN, text_config=sub("qwen3", head_dim=16),
        vision_config=QIANFAN_TOWER,
    ),
    own(
        "HunYuan-VL", "<img_start><img><img_end>", "HunYuanVL",
        tokens("<img_newline>", image_token="<img>", image_start_token="<img_start>", image_end_token="<img_end>"),
        images={"patch_size": 14, "size": GRIDS},
        text_config={**TEXT, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2, 2]}},
        image_token_id=302, im_start_id=303, im_end_id=304,
        im_newline_id=305,
        vision_config={
            **VIT, "out_hidden_size": 64, "text_hidden_size": 64, "patch_size": 14, "img_max_token_num": 64,
            "max_image_size": 112, "min_image_size": 28,
        },
        opening="<s>",
    ),
    own(
        "VideoLLaMA 3", "<|image_pad|>", "VideoLlama3",
        QWEN["tokens"], images={"patch_size": 14, "size": GRIDS}, videos={},
        text_config=sub("qwen2"), image_token_id=302, video_token_id=303,
        vision_config={**VIT, "patch_size": 14},
    ),
    own(
        "LLaVA-NeXT-Video", "<image>", "LlavaNextVideo", tokens("<video>"),
        **{**NEXT, "by": "LlavaNextVideo"}, videos={}, videos_by="LlavaNextVideo", video_token_index=302,
    ),
    own(
        "Qwen2.5-Omni", "<|vision_bos|><|IMAGE|><|vision_eos|>", "Qwen2_5OmniThinker",
        tokens(
            image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>",
            vision_bos_token="<|vision_bos|>", vision_eos_token="<|vision_eos|>",
            audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
        ),
        images=QWEN["images"], images_by="Qwen2VL", videos={"patch_size": 14}, videos_by="Qwen2VL", by="Qwen2_5Omni",
        sounds=lambda: transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=4),
        text_config={**TEXT, "max_position_embeddings": 2048, "rope_parameters": OMNI_ROPE},
        vision_config={**TOWER, "window_size": 56, "fullatt_block_indexes": [1]},
        audio_config={
            "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 80,
            "max_source_positions": 200, "n_window": 50, "output_dim": 64,
        },
        image_token_index=302, video_token_index=303, audio_token_index=304,
        vision_start_token_id=305, vision_end_token_id=306,
        audio_start_token_id=307, audio_end_token_id=308,
    ),
    own("InternVL 2.5", "<IMG_CONTEXT>", **INTERN_VL, text_config=sub("qwen2")),
    _paligemma("PaliGemma", "gemma"),
    _paligemma("PaliGemma 2", "gemma2", sliding_window=6, query_pre_attn_scalar=16, **MIXED),
    own(
        "Ovis 2", "<image>", "Ovis2",
        tokens("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<IMG_ATOM>"),
        images={"size": SQUARE, "crop_to_patches": True, "max_patches": 4}, options={"image_seq_length": 4},
        text_config=sub("qwen2"), image_token_id=307,
        visual_indicator_token_ids=[302, 303, 304, 305, 306], hidden_size=64, vocab_size=320,
        vision_config={**SMALL_TOWER, "vocab_size": 40, "hidden_stride": 2},
    ),
    own(
        "Idefics2", "<image>", "Idefics2",
        tokens("<fake_token_around_image>", "<end_of_utterance>"),
        images={"size": {"longest_edge": 56, "shortest_edge": 28}}, options={"image_seq_len": 4},
        text_config=sub("mistral"), image_token_id=IMAGE_ID,
        vision_config={**SMALL_TOWER, "image_size": 56},
        perceiver_config={
            "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1,
        },
    ),
]  # fmt: skip


#: Models with images that the engine cannot run, and a part of the error.
REFUSED = [
    (
        own(
            "Llama 3.2 Vision", "<|image|>", "Mllama", tokens("<|image|>"),
            images={"size": SQUARE, "max_image_tiles": 2}, image_token_index=302,
        ),
        "cross attention to images are not supported",
    ),
    (
        own(
            "Fuyu", "|SPEAKER|", "Fuyu", tokens("|SPEAKER|", "|NEWLINE|"),
            images={"size": {"height": 56, "width": 56}, "patch_size": {"height": 14, "width": 14}},
            text_config=sub("persimmon"), image_token_id=302, patch_size=14,
        ),
        "FuyuProcessor returns no pixel_values",
    ),
]  # fmt: skip
#: Writes texts unchanged, and a placeholder for each image.
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACEHOLDER{% elif c['type'] == 'video' %}OF_VIDEO"
    "{% elif c['type'] == 'audio' %}OF_AUDIO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)


def named(name: str, families: Sequence[Family] = FAMILIES) -> Family:
    [family] = [each for each in families if each.name == name]
    return family


_written: dict[Family, dict[str, bytes]] = {}


def write_checkpoint(family: Family, directory: Path) -> None:
    """Writes a family's files as transformers saves them, with random weights that give different answers.

    The files are created once per process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if family not in _written:
        with TemporaryDirectory() as made:
            _make_checkpoint(family, Path(made))
            _written[family] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    for name, data in _written[family].items():
        (directory / name).write_bytes(data)


def _make_checkpoint(family: Family, directory: Path) -> None:
    torch.manual_seed(0)
    model = family.auto(family.create()).float()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.data += noise * 0.1
        elif "embed" in name or "wte" in name:
            parameter.data = noise * family.embedding_std
        else:
            inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            parameter.data = noise * 1.6 / inputs**0.5
    model.save_pretrained(directory)
    if family.create_processor is None:
        make_tokenizer(IMAGE_ID).save(str(directory / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        write_processor(family, directory)


def write_processor(family: Family, directory: Path) -> None:
    assert family.create_processor is not None
    family.create_processor().save_pretrained(directory)
    if family.read is not None:
        return
    template = family.opening + TEMPLATE.replace("PLACEHOLDER", family.placeholder)
    template = template.replace("OF_VIDEO", family.video_placeholder)
    template = template.replace("OF_AUDIO", family.audio_placeholder)
    (directory / "chat_template.jinja").write_text(template)
