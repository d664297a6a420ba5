"""The family of all checkpoints that no other family claims, and that transformers implements."""

from pathlib import Path

from engines.packages.checkpoint_json import Fields, shown
from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.processor import MultimodalProcessor, TextOnly
from engines.torch_backend.models.generic.config import GenericConfig, find_class, read_config
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.multimodal.transformers_images import TransformersImages
from engines.torch_backend.parallel.mesh import Mesh


class GenericFamily:
    """Any model of the installed transformers that writes text, of images or not."""

    architectures = ()
    model_type = ""

    def __init__(self, lowers: bool = True) -> None:
        """`lowers`: our own program computes the decoders that it can say."""
        self._lowers = lowers

    def claims(self, config: Fields) -> bool:
        return find_class(config) is not None

    def check(self, config: Fields) -> GenericConfig:
        """Raises: UnsupportedCheckpoint."""
        model_class = find_class(config)
        if model_class is None:
            given = config.get("architectures")
            raise config.refuse("architectures", f"is {shown(given)}, unknown to transformers")
        return read_config(config, model_class)

    def build(self, config: GenericConfig, mesh: Mesh) -> GenericModel:
        """The model, still without modules: transformers makes them with the weights."""
        return GenericModel(config, self._lowers, mesh)

    def rename(self, name: str, config: GenericConfig) -> str:
        """Names are transformers' to read."""
        return name

    def processor(self, directory: Path, config: GenericConfig) -> MultimodalProcessor:
        """Transformers' own, where the model takes images. Raises: UnsupportedCheckpoint."""
        if not config.takes_images:
            return TextOnly(PLAIN_TEMPLATE)
        return TransformersImages(directory, config.model_class, config.full)


FAMILY = GenericFamily()
