"""The pictures of a step: which must be encoded, and where their features go.

Used by the runner. It encodes the missing pictures of all requests together, keeps features for later in an
`EncoderCache`, and must not know the decoder's caches, sampling or logits.
"""

import time

import torch

from engines.base import ImageInput, SequenceFailure
from engines.sequence import ScheduledSequence, Sequence
from engines.torch_backend.attention import Span
from engines.torch_backend.encoder_cache import EncoderCache, PictureKey
from engines.torch_backend.models.llava import Llava, PictureSlots


class PictureEncoder:
    """Vision tower and projector behind a cache. At most `max_batch` pictures go through them at once."""

    def __init__(
        self,
        model: Llava,
        cache: EncoderCache,
        max_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.cache = cache
        self._model = model
        self._max_batch = max_batch
        self._device = device
        self._dtype = dtype

    def encode_missing(self, items: list[ScheduledSequence]) -> float:
        """Encode the pictures that a step reads and the cache does not hold. Returns: seconds spent.

        Every picture that is read is pinned for its request afterwards. Raises: SequenceFailure.
        """
        missing: dict[PictureKey, ImageInput] = {}
        wanted: list[tuple[str, PictureKey]] = []
        for item in items:
            for image in item.images:
                key = _key(item.sequence, image)
                if self.cache.is_pinned_by(item.sequence.request_id, key):
                    continue
                wanted.append((item.sequence.request_id, key))
                is_known = key in self.cache or key in missing
                self.cache.count_query(hit=is_known)
                if not is_known:
                    self._check(item.sequence, image)
                    missing[key] = image
        vision_s = self._encode(list(missing.items())) if missing else 0.0
        for request_id, key in wanted:
            self.cache.pin(request_id, key)
        return vision_s

    def place(self, items: list[ScheduledSequence], spans: list[Span]) -> list[PictureSlots]:
        """Where in the flat batch which features belong; a chunk may hold a part of a picture."""
        slots = []
        for item, span in zip(items, spans, strict=True):
            for image in item.images:
                features = self.cache.pin(item.sequence.request_id, _key(item.sequence, image))
                first = max(image.offset, span.num_computed)
                last = min(image.offset + image.num_tokens, span.num_context)
                slots.append(
                    PictureSlots(
                        start=span.start + first - span.num_computed,
                        features=features[first - image.offset : last - image.offset],
                    )
                )
        return slots

    def let_go(self, items: list[ScheduledSequence]) -> None:
        """Unpin the pictures whose last slot a step has computed."""
        for item in items:
            end = item.sequence.num_computed_tokens + item.num_new_tokens
            for image in item.images:
                if image.offset + image.num_tokens <= end:
                    self.cache.unpin(item.sequence.request_id, _key(item.sequence, image))

    def _check(self, sequence: Sequence, image: ImageInput) -> None:
        config = self._model.config
        size = config.vision.image_size
        is_fit = tuple(image.pixels.shape) == (3, size, size)
        if not is_fit or image.num_tokens != config.tokens_per_image:
            raise SequenceFailure(sequence.request_id, "A picture was not prepared for this model.")

    def _encode(self, missing: list[tuple[PictureKey, ImageInput]]) -> float:
        started = time.perf_counter()
        for start in range(0, len(missing), self._max_batch):
            part = missing[start : start + self._max_batch]
            pixels = torch.stack([torch.as_tensor(image.pixels) for _, image in part])
            features = self._model.encode_images(pixels.to(self._device, self._dtype))
            for (key, _), picture in zip(part, features, strict=True):
                # a copy of its own, so that evicting one picture frees its memory
                self.cache.put(key, picture.clone())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the time would count as prefill
        return time.perf_counter() - started


def _key(sequence: Sequence, image: ImageInput) -> PictureKey:
    return sequence.cache_salt, image.image_hash
