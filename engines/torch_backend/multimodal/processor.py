"""What stands before the engine: image bytes to pixels, messages to prompts.

Made by the loader, called by the worker's pool. Thread-safe: nothing in it changes. It must not know the queue.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.core.runner import Prompt, Tokenizer
from engines.image_decoder import Decode, decode_image
from engines.text.prompt import PromptBuilder
from engines.text.tokenizer import HfTokenizer
from engines.torch_backend.multimodal.image_processor import ImageProcessor
from shared.protocol import ChatMessage


class TorchProcessor:
    """Keeps the engine's `Processor` protocol for one checkpoint."""

    is_quick = False  #: its chat template may take its time

    def __init__(
        self,
        tokenizer: HfTokenizer,
        image_processor: ImageProcessor,
        prompt_builder: PromptBuilder,
        max_model_len: int,
        tokens_per_image: int,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.tokens_per_image = tokens_per_image
        self._image_processor = image_processor
        self._prompt_builder = prompt_builder

    def process_image(
        self, data: bytes, expected_size: tuple[int, int], decode: Decode = decode_image
    ) -> np.ndarray:
        """Decode and resize one image. Shapes: returns (3, H, W) float32. Raises: InvalidImage."""
        return self._image_processor.process(data, expected_size, decode)

    def build_prompt(
        self, messages: Sequence[ChatMessage], images: Sequence[tuple[str, Any]]
    ) -> Prompt:
        """Apply the chat template. Raises: InvalidRequest."""
        return self._prompt_builder.build(messages, images)
