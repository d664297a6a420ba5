"""Texts and images in one space: `CLIPModel` of transformers, with its own processor.

Shape letters: n rows of one length, V numbers of a vector.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from engines.base import Decode, PreparedImage
from engines.pooling.batch import Row
from engines.pooling.encoder import Picture, Texts, give_vectors, num_bytes
from shared.protocol import Embed, ImagePart, ImageRef, Task


class ClipEncoder:
    """Two towers. Rows of one length are one forward pass: nothing is padded."""

    tasks: tuple[str, ...] = ("embed",)
    shorter_dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = {}
    decodes_images = True
    prepares_quickly = True

    def __init__(self, model: Any, texts: Texts, processor: Any) -> None:
        self._model: Any = model
        self.texts = texts
        self._processor = processor
        self.dimensions: int = model.config.projection_dim
        vision = model.config.vision_config
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2 + 1

    def process_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """Pixels as the processor makes them. Shapes: (3, height, width). Raises: InvalidImage."""
        picture = decode(data, (image.width, image.height))
        return self._processor(images=picture, return_tensors="np")["pixel_values"][0]

    def rows(self, task: Task, images: Sequence[PreparedImage]) -> list[Row]:
        """One row for each input. Raises: PromptTooLong, InvalidRequest."""
        assert isinstance(task, Embed)
        return [self._row(task, index, images) for index in range(len(task.inputs))]

    def _row(self, task: Embed, index: int, images: Sequence[PreparedImage]) -> Row:
        part = task.inputs[index]
        if isinstance(part, ImagePart):
            image = images[part.image]
            picture = Picture(image.content, task.dimensions, task.is_normalized, image.image_hash)
            size = self.image_tokens
            return Row(picture, size, "image", size, picture.identity)
        words = self.texts.words(task, index)
        return Row(words, len(words.ids), identity=words.identity)

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> None:
        """All rows of a step, of one kind."""
        model, device = self._model, self._model.device
        if rows[0].kind == "image":
            pixels = [torch.as_tensor(row.content.pixels) for row in rows]
            made = model.get_image_features(torch.stack(pixels).to(device, model.dtype))
            give_vectors(rows, _vectors(made), is_normalized=False)
            return
        for _, group in groupby(rows, key=lambda row: row.num_tokens):
            part = list(group)
            ids = torch.tensor([row.content.ids for row in part], device=device)
            give_vectors(part, _vectors(model.get_text_features(ids)), is_normalized=False)

    def memory_bytes(self) -> dict[str, int]:
        """The weights."""
        return {"weights": num_bytes(self._model)}

    def close(self) -> None:
        """Free the weights."""
        self._model = torch.nn.Module()


def _vectors(made: Any) -> torch.Tensor:
    """Shapes: (n, V) float32; releases of transformers differ in what they wrap it in."""
    return getattr(made, "pooler_output", made).float()
