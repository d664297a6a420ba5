"""Joint embeddings of texts and images: `CLIPModel` and `SiglipModel` of transformers with their processors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from engines.base import Decode, PreparedImage
from engines.pooling.batch import Row
from engines.pooling.encoder import Texts, give_vectors
from engines.pooling.engine import PoolingModel
from engines.pooling.layers import num_bytes
from shared.protocol import Embed, ImagePart, ImageRef


@dataclass(frozen=True, slots=True)
class Filling:
    """Pads texts to the fixed length of a text tower without an attention mask."""

    length: int
    token_id: int
    is_left: bool = False

    def fill(self, ids: Sequence[int]) -> Sequence[int]:
        padding = [self.token_id] * (self.length - len(ids))
        return [*padding, *ids] if self.is_left else [*ids, *padding]


class ClipEncoder(PoolingModel):
    """A text and an image tower. Rows of equal length share a forward pass."""

    decodes_images = True

    def __init__(
        self, model: Any, texts: Texts, processor: Any, filling: Filling | None = None
    ) -> None:
        """`filling` is set for SigLIP, which has no projections and no class token."""
        self._model: Any = model
        self.texts = texts
        self._processor = processor
        self._filling = filling
        config, vision = model.config, model.config.vision_config
        self.image_tokens = (vision.image_size // vision.patch_size) ** 2 + (filling is None)
        self.dimensions: int = vision.hidden_size if filling else config.projection_dim

    def process_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """Processed pixels. Shapes: (3, height, width). Raises: InvalidImage."""
        decoded = decode(data, (image.width, image.height))
        return self._processor(images=decoded, return_tensors="np")["pixel_values"][0]

    def row(self, task: Embed, index: int, images: Sequence[PreparedImage]) -> Row:
        part = task.inputs[index]
        if isinstance(part, ImagePart):
            image, size = images[part.image], self.image_tokens
            return Row(image.content, size, "image", size, identity=image.image_hash.encode())
        words = self.texts.words(task, index)
        length = self._filling.length if self._filling else len(words.ids)
        padding = length - len(words.ids)
        return Row(words, length, num_padding=padding, identity=words.identity)

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> None:
        model, device = self._model, self._model.device
        if rows[0].kind == "image":
            pixels = [torch.as_tensor(row.content) for row in rows]
            made = model.get_image_features(torch.stack(pixels).to(device, model.dtype))
            give_vectors(rows, made.pooler_output.float())
            return
        for _, group in groupby(rows, key=lambda row: row.num_tokens):
            part = list(group)
            ids: list[Sequence[int]] = [list(row.content.ids) for row in part]
            if self._filling:
                ids = [self._filling.fill(each) for each in ids]
            made = model.get_text_features(torch.tensor(ids, device=device))
            give_vectors(part, made.pooler_output.float())

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": num_bytes(self._model)}

    def close(self) -> None:
        self._model = torch.nn.Module()
