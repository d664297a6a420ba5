"""Text models whose decoder is our own program's: Llama, Mistral and Qwen2, and what is published under their names.

Reads the checkpoints of `LlamaForCausalLM`, `MistralForCausalLM` and `Qwen2ForCausalLM`. What one of them asks beyond
that program (a window within its context, another activation or rope scaling) the generic family runs.
"""

from pathlib import Path

from engines.packages.checkpoint_json import Fields, shown
from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.processor import TextOnly
from engines.torch_backend.models.config import TextConfig, beyond_our_program
from engines.torch_backend.models.hf_config import (
    check_llama,
    complete,
    llama_config,
    stored_quantization,
)
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.parallel.mesh import SINGLE, Mesh

_KINDS = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}


class CausalConfig:
    """A decoder, and the scheme that its weights are stored in."""

    def __init__(self, text: TextConfig, quantization: str | None) -> None:
        self.text = text
        self.quantization = quantization


class CausalModel(FamilyModel):
    """A decoder."""

    config: CausalConfig

    def __init__(self, config: CausalConfig, mesh: Mesh = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.language_model = Llama(config.text, mesh)


class CausalFamily:
    """Decoders of the LLaMA family."""

    architectures = tuple(_KINDS)
    model_type = "llama"

    def check(self, config: Fields) -> CausalConfig:
        """Raises: UnsupportedCheckpoint."""
        kind = config.get("model_type", self.model_type)
        if kind not in _KINDS.values():
            raise config.refuse(
                "model_type", f"is {shown(kind)}; known: {', '.join(_KINDS.values())}"
            )
        check_llama(config)
        full = complete(kind, config)
        text = llama_config(config, full, bool(config.flag("tie_word_embeddings", False)))
        if text.max_position_embeddings < full.max_position_embeddings:
            with beyond_our_program():
                raise config.refuse(
                    "sliding_window", "is within the context, not all of which is seen"
                )
        return CausalConfig(text, stored_quantization(config))

    def build(self, config: CausalConfig, mesh: Mesh) -> CausalModel:
        """The model, its weights still undefined."""
        return CausalModel(config, mesh)

    def rename(self, name: str, config: CausalConfig) -> str | None:
        """The decoder's names are transformers' own."""
        is_tied = config.text.tie_word_embeddings and name == "lm_head.weight"
        is_derived = name.endswith(".rotary_emb.inv_freq")
        return None if is_tied or is_derived else f"language_model.{name}"

    def processor(self, directory: Path, config: CausalConfig) -> TextOnly:
        return TextOnly(PLAIN_TEMPLATE)


FAMILY = CausalFamily()
