"""`transformers` as a peer: its own model of a checkpoint, with its own caches.

Runs in a separate process. The forward pass is called directly, with greedy sampling, to avoid the overhead of
`generate`. For each batch size, the faster of its dynamic and static caches is used.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, StaticCache
from transformers.utils.logging import disable_progress_bar

from benchmarks.peers.prompts import ExamplePrompts
from engines.core.sequence import Prompt
from engines.torch_backend.models.generic.self_check import encoder_inputs, whole_inputs
from engines.torch_backend.multimodal.processed import ProcessedImage

_MAX_STEPS = 128


class HuggingFace:
    """The model in one precision, with one kind of cache."""

    def __init__(self, checkpoint: Path, precision: str, num_threads: int) -> None:
        """Load the model. Raises: the errors of transformers."""
        torch.set_num_threads(num_threads)
        self._dtype = getattr(torch, precision)
        self._prompts = ExamplePrompts(checkpoint)
        self._num_context = self._prompts.num_tokens
        disable_progress_bar()
        model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=self._dtype)
        self._model: Any = model.eval()
        self._is_static: dict[int, bool] = {}  # by batch size: whether the static cache is faster
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def decode(self, batch_size: int, num_steps: int) -> float:
        """Decode after contexts of random keys and values."""
        if batch_size not in self._is_static:
            times = {kind: self._decode(batch_size, 3, kind) for kind in (False, True)}
            self._is_static[batch_size] = times[True] < times[False]
        return self._decode(batch_size, num_steps, self._is_static[batch_size])

    def _decode(self, batch_size: int, num_steps: int, is_static: bool) -> float:
        cache = self._filled_cache(batch_size, is_static)
        token_ids = torch.full((batch_size, 1), 5)
        token_ids = self._next_tokens(input_ids=token_ids, past_key_values=cache)  # unmeasured
        started = time.perf_counter()
        for _ in range(num_steps):
            token_ids = self._next_tokens(input_ids=token_ids, past_key_values=cache)
        return time.perf_counter() - started

    @torch.inference_mode()
    def prefill(self) -> float:
        """One forward pass with logits of the last token only."""
        token_ids = torch.tensor([self._prompts.text(self._num_context)])
        started = time.perf_counter()
        self._next_tokens(input_ids=token_ids, logits_to_keep=1)
        return time.perf_counter() - started

    @torch.inference_mode()
    def image(self) -> float:
        inputs = encoder_inputs(self._model, _image(self._prompts.make()))
        started = time.perf_counter()
        self._model.base_model.get_image_features(**inputs)
        return time.perf_counter() - started

    @torch.inference_mode()
    def first_token(self) -> float:
        prompt = self._prompts.make()
        token_ids = torch.tensor([prompt.token_ids])
        inputs = whole_inputs(self._model, token_ids, self._prompts.slot_id, _image(prompt))
        started = time.perf_counter()
        self._next_tokens(input_ids=token_ids, **inputs, logits_to_keep=1)
        return time.perf_counter() - started

    def _next_tokens(self, **inputs: Any) -> Tensor:
        logits = self._model(**inputs).logits
        next_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        next_ids.tolist()  # a server needs the ids on the CPU too
        return next_ids

    def _filled_cache(self, batch_size: int, is_static: bool) -> DynamicCache | StaticCache:
        config = self._model.config
        text, cache = config.get_text_config(decoder=True), DynamicCache(config=config)
        if is_static:
            cache = StaticCache(config=config, max_cache_len=self._num_context + _MAX_STEPS)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shape = (batch_size, text.num_key_value_heads, self._num_context - 1, width)
        noise = torch.randn(shape, generator=self._generator).to(self._dtype)
        for layer in range(text.num_hidden_layers):
            cache.update(noise.clone(), noise.clone(), layer)
        if hasattr(self._model.base_model, "rope_deltas"):
            self._model.base_model.rope_deltas = None  # left by another prompt
        return cache


def _image(prompt: Prompt) -> ProcessedImage:
    """The image in the format of transformers' processor."""
    [image] = prompt.images
    if isinstance(image.pixels, ProcessedImage):
        return image.pixels
    pixels = torch.as_tensor(image.pixels)[None]
    return ProcessedImage({"pixel_values": pixels}, "", image.num_slots)
