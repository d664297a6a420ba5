"""The family of all checkpoints that transformers implements and no other family claims."""

from pathlib import Path

from transformers import Qwen2_5OmniThinkerConfig

from engines.packages.checkpoint_json import Fields, one_line
from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.processor import MultimodalProcessor
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.config import GenericConfig, find_class, read_config
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.multimodal.transformers_audio import TransformersAudio
from engines.torch_backend.multimodal.transformers_images import TransformersImages

#: Prefixes of weights of Qwen2.5-Omni that only generate speech.
_SPEECH = ("talker.", "token2wav.")


class GenericFamily:
    """Any model of the installed transformers that generates text, with or without images and audio."""

    architectures = ()
    model_type = ""

    def __init__(self, lowers: bool = True) -> None:
        """`lowers`: use this project's decoder where it can compute the model."""
        self._lowers = lowers

    def claims(self, config: Fields) -> bool:
        return find_class(config) is not None

    def check(self, config: Fields) -> GenericConfig:
        model_class = find_class(config)
        assert model_class is not None
        return read_config(config, model_class)

    def build(self, config: GenericConfig) -> GenericModel:
        """Create the model without modules, because transformers creates them when it loads the weights."""
        return GenericModel(config, self._lowers)

    def rename(self, name: str, config: GenericConfig) -> str | None:
        """The same name, because transformers maps names when it loads weights; None for weights of speech."""
        is_omni = isinstance(config.full, Qwen2_5OmniThinkerConfig)
        return None if is_omni and name.startswith(_SPEECH) else name

    def processor(self, directory: Path, config: GenericConfig) -> MultimodalProcessor:
        """Transformers' processor, if the model accepts images or audio. Raises: UnsupportedCheckpoint."""
        if not config.takes_media:
            return MultimodalProcessor(PLAIN_TEMPLATE)
        try:
            if not config.takes_images:
                return TransformersAudio(directory, config.model_class)
            return TransformersImages(directory, config.model_class, config.full)
        except (UnsupportedCheckpoint, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # any type: a panic in tokenizers is not an Exception
            raise UnsupportedCheckpoint(
                f"transformers' processor of {config.model_class.__name__} fails: {one_line(error)}"
            ) from error


FAMILY = GenericFamily()
