"""A family in one file: LLaVA with one, two or four tiles per image, between start and end tokens.

A wide image has two tiles, separated by a line break in the text; a large one has four. All tokens of an image have the
same rotary position, so an image uses one position of the context.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from engines.core.runner import NO_LIMITS, PixelLimits
from engines.core.sequence import ImageInput, Positions, Prompt
from engines.packages.checkpoint_json import Fields
from engines.text.chat_template import LLAVA_TEMPLATE
from engines.text.processor import Item, MultimodalProcessor
from engines.torch_backend.models import llava
from engines.torch_backend.models.llava import Llava, VLMConfig

ARCHITECTURE = "TiledLlavaForConditionalGeneration"
START, END = "<tiles>", "</tiles>"
PLACES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # rows and columns by the number of tiles


class TiledLlava(Llava):
    """LLaVA with several square tiles per image."""

    def num_features(self, image: ImageInput) -> int | None:
        """The features of all tiles."""
        size, pixels = self.config.vision.image_size, image.pixels
        is_tiled = pixels.ndim == 4 and tuple(pixels.shape[1:]) == (3, size, size)
        return len(pixels) * self.config.tokens_per_image if is_tiled else None

    def example_image(self) -> ImageInput:
        """An image of two tiles."""
        size, count = self.config.vision.image_size, 2 * self.config.tokens_per_image
        return ImageInput(0, count, "example", torch.zeros(2, 3, size, size))


class TileProcessor(MultimodalProcessor):
    """Cuts an image into tiles."""

    def __init__(self, slot_id: int, side: int, tile_tokens: int) -> None:
        super().__init__(LLAVA_TEMPLATE)
        self.slot_id, self.side, self.tile_tokens = slot_id, side, tile_tokens

    @property
    def image_tokens(self) -> int:
        """The tokens of four tiles, of start and end, and of the line breaks."""
        return 4 * self.tile_tokens + 2 + 3

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> np.ndarray:
        """Shapes: returns (tiles, 3, side, side) float32."""
        width, height = image.size
        tiles = 4 if min(width, height) > self.side else 2 if width > height else 1
        rows, columns = PLACES[tiles]
        image = image.resize((columns * self.side, rows * self.side))
        values = np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1
        parts = values.reshape(3, rows, self.side, columns, self.side).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(parts.reshape(tiles, 3, self.side, self.side))

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """Tiles as runs of slots between start and end."""
        made = []
        for name, pixels in images:
            text = START + "\n".join([slot * self.tile_tokens] * len(pixels)) + END
            num_tokens = len(pixels) * (self.tile_tokens + 1) + 1
            made.append(Item(name, num_tokens, pixels, text))
        return made

    def positions(self, prompt: Prompt) -> Positions:
        """All tokens of an image have the same position."""
        row, place = [0] * len(prompt.token_ids), -1
        inside = {
            index: image.offset
            for image in prompt.images
            for index in range(image.offset, image.offset + image.num_tokens)
        }
        for index in range(len(row)):
            place += inside.get(index, index) == index
            row[index] = place
        return (row,)


class TiledLlavaFamily:
    """LLaVA's decoder, tower and names, with tiled images."""

    architectures = (ARCHITECTURE,)
    model_type = "tiled_llava"

    def check(self, config: Fields) -> VLMConfig:
        """Checks the config as LLaVA does; a class token is refused."""
        config.one_of("vision_feature_select_strategy", ("default",))
        return llava.FAMILY.check(config)

    def build(self, config: VLMConfig) -> TiledLlava:
        """The model, its weights still undefined."""
        return TiledLlava(config)

    def rename(self, name: str, config: VLMConfig) -> str | None:
        """Renames weights as LLaVA does."""
        return llava.FAMILY.rename(name, config)

    def processor(self, directory: Path, config: VLMConfig) -> TileProcessor:
        """Needs no file of the checkpoint."""
        return TileProcessor(
            config.image_token_id, config.vision.image_size, config.tokens_per_image
        )


FAMILY = TiledLlavaFamily()
