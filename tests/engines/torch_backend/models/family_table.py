"""Tiny random models of families, each made of transformers' own configuration class; nothing is downloaded."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from engines.packages.checkpoint_files import make_tokenizer

#: of the tokenizer: its bytes and merges lie below
IMAGE_ID = 300
TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    create: Callable[[], PreTrainedConfig]

    def __str__(self) -> str:
        return self.name

    @property
    def architecture(self) -> str:
        """The class that transformers runs it with."""
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(self.create())].__name__


def text(name: str, config_class: str, **more: Any) -> Family:
    return Family(name, lambda: getattr(transformers, f"{config_class}Config")(**{**TEXT, **more}))


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
    text(
        "Gemma 2", "Gemma2", head_dim=16, sliding_window=6, attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
        query_pre_attn_scalar=24, **MIXED,
    ),
    text("Gemma 3, text", "Gemma3Text", head_dim=16, sliding_window=6, query_pre_attn_scalar=16, **MIXED),
    text(
        "Gemma 3n, text", "Gemma3nText", num_hidden_layers=4, head_dim=16, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=320,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
    ),
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
    text("SmolLM3", "SmolLM3"),
    text("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    text("Qwen3-MoE", "Qwen3Moe", head_dim=16, **EXPERTS),
    text("GPT-OSS", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=6, **MIXED),
    text("DeepSeek V2", "DeepseekV2", q_lora_rank=None, **LATENT),
    text("DeepSeek V3", "DeepseekV3", q_lora_rank=16, **LATENT),
]  # fmt: skip


def write_checkpoint(family: Family, directory: Path) -> None:
    """A family's files as transformers saves them, with random weights that make answers differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family.create()).float()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.data += noise * 0.1
        elif "embed" in name or "wte" in name:
            parameter.data = noise * 0.35
        else:
            inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            parameter.data = noise * 1.6 / inputs**0.5
    model.save_pretrained(directory)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    make_tokenizer(IMAGE_ID).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
