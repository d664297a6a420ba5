"""Creates requests of new random tokens and one new random image, processed by the checkpoint's processor."""

import random
from dataclasses import replace
from itertools import count
from pathlib import Path

from PIL import Image

from benchmarks.peers.peer import NUM_TEXT_TOKENS
from engines.core.sequence import EngineRequest, Prompt
from engines.text.processor import create_processor
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.registry import find_family
from shared.protocol import ChatMessage, ImagePart, SamplingParams

#: (width, height) of every image, before the model's processor resizes or tiles it.
IMAGE_SIZE = (640, 480)


class ExamplePrompts:
    """Creates new prompts: images of noise, and random tokens without control tokens."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises: UnsupportedCheckpoint, also for a model that does not support images."""
        family, config = find_family(checkpoint)
        self._multimodal = family.processor(checkpoint, config)
        self.slot_id = self._multimodal.slot_id
        if self.slot_id is None:
            raise UnsupportedCheckpoint("the model does not support images")
        self._processor = create_processor(checkpoint, self._multimodal)
        tokenizer = self._processor.tokenizer
        self._plain_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)]
        self._random = random.Random(0)
        self._numbers = count()
        self.num_tokens = len(self.make().token_ids)

    def make(self, num_text: int = NUM_TEXT_TOKENS) -> Prompt:
        """The tokens of an image, then the tokens of text."""
        width, height = IMAGE_SIZE
        noise = Image.frombytes("RGB", IMAGE_SIZE, self._random.randbytes(3 * width * height))
        pixels = self._processor.process_image(noise)
        messages = [ChatMessage("user", (ImagePart(0),))]
        built = self._processor.build_prompt(messages, [(f"example-{next(self._numbers)}", pixels)])
        [image] = built.images
        ids = built.token_ids[image.offset : image.offset + image.num_tokens]
        ids += self.text(num_text)
        images = (replace(image, offset=0),)
        return Prompt(ids, images, self._multimodal.positions(Prompt(ids, images)))

    def text(self, count: int) -> list[int]:
        """Random tokens that are not control tokens."""
        return self._random.choices(self._plain_ids, k=count)

    def request(self, prompt: Prompt, max_tokens: int) -> EngineRequest:
        """A request for a greedy answer of exactly `max_tokens` tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request_id = f"request-{next(self._numbers)}"
        ids, images = prompt.token_ids, prompt.images
        return EngineRequest(request_id, ids, sampling, images, positions=prompt.positions)
