"""Text models that this project's decoder computes: Llama, Mistral, Qwen2 and models with their architectures.

Checkpoints with features that the decoder lacks (a window shorter than the context, another activation or RoPE
scaling) are left to the generic family.
"""

from dataclasses import dataclass
from pathlib import Path

from engines.packages.checkpoint_json import Fields
from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.processor import MultimodalProcessor
from engines.torch_backend.models.config import BeyondOurProgram, TextConfig
from engines.torch_backend.models.hf_config import build_config, check_llama, llama_config
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel


@dataclass(frozen=True, slots=True)
class CausalConfig:
    text: TextConfig


class CausalModel(FamilyModel):
    config: CausalConfig

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = Llama(config.text)


class CausalFamily:
    architectures = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
    model_type = "llama"

    def check(self, config: Fields) -> CausalConfig:
        check_llama(config)
        full = build_config(config, self.model_type)
        text = llama_config(config, full)
        if text.max_position_embeddings < full.max_position_embeddings:
            reason = "is shorter than the context, which is not supported"
            raise BeyondOurProgram(config.refuse("sliding_window", reason))
        return CausalConfig(text)

    def build(self, config: CausalConfig) -> CausalModel:
        return CausalModel(config)

    def rename(self, name: str, config: CausalConfig) -> str | None:
        """Parameter names are those of transformers."""
        is_tied = config.text.tie_word_embeddings and name == "lm_head.weight"
        is_derived = name.endswith(".rotary_emb.inv_freq")
        return None if is_tied or is_derived else f"language_model.{name}"

    def processor(self, directory: Path, config: CausalConfig) -> MultimodalProcessor:
        return MultimodalProcessor(PLAIN_TEMPLATE)


FAMILY = CausalFamily()
