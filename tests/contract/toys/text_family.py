"""A family that takes no images: a decoder alone, as transformers' causal language models keep it."""

from pathlib import Path

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.hf_config import check_llama, complete, llama_config
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.multimodal.processor import TextOnly
from engines.torch_backend.parallel.mesh import Mesh

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


class TextModelConfig:
    """A decoder, in full precision."""

    quantization = None

    def __init__(self, text: TextConfig) -> None:
        self.text = text


class TextModel(FamilyModel):
    """A decoder."""

    def __init__(self, config: TextModelConfig, mesh: Mesh) -> None:
        super().__init__()
        self.config = config
        self.language_model = Llama(config.text, mesh)


class TextFamily:
    """Qwen2 without images."""

    architectures = ("Qwen2ForCausalLM",)
    model_type = "qwen2"

    def check(self, config: Fields) -> TextModelConfig:
        """A decoder of the LLaMA family. Raises: UnsupportedCheckpoint."""
        check_llama(config)
        return TextModelConfig(llama_config(config, complete("qwen2", config)))

    def build(self, config: TextModelConfig, mesh: Mesh) -> TextModel:
        """The model, its weights still undefined."""
        return TextModel(config, mesh)

    def rename(self, name: str, config: TextModelConfig) -> str | None:
        """The decoder's names are transformers' own."""
        is_tied = config.text.tie_word_embeddings and name == "lm_head.weight"
        return None if is_tied or name.endswith("inv_freq") else f"language_model.{name}"

    def processor(self, directory: Path, config: TextModelConfig) -> TextOnly:
        """There are no images."""
        return TextOnly(TEMPLATE)


FAMILY = TextFamily()
