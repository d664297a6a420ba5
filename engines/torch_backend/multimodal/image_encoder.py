"""Encodes the images of a step, caches their features, and assigns them to the step's image slots.

Used by the runner. On a CPU, the time for images in a step is limited: images are encoded one after another, each in
parts over several steps. On a GPU, all missing images of a step are encoded together.
"""

import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.core.runner import SequenceFailure
from engines.core.sequence import ImageInput, ScheduledSequence, Sequence
from engines.torch_backend.step import ImageSlots, SequenceRows

if TYPE_CHECKING:
    from engines.torch_backend.models.registry import FamilyModel

NOT_FINITE = "The model's features of an image are not finite numbers."
UNFIT = "An image was not prepared for this model."
TOO_LARGE = "An image needs more memory than the model's device has: send a smaller one."
#: If fewer prompt tokens precede a missing image, a step for them alone is not worth reading all weights.
FEWEST_TOKENS = 64
#: Maximum time for images in a step in which no request decodes. Longer steps delay the watchdog, requests and aborts.
SECONDS_ALONE = 0.25


#: (tenant's salt, image hash). Tenants do not share entries, because timing would reveal images of other tenants.
ImageKey = tuple[str, str]


class EncoderCache:
    """Cache of image features with a limit in bytes.

    Entries that running requests still read are pinned, even beyond the limit. Others are evicted in order of last use.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._features: OrderedDict[ImageKey, Tensor] = OrderedDict()
        self._pinned: dict[str, set[ImageKey]] = {}  # by request
        self._bytes_per_row = 0  # of the widest features so far
        self.num_bytes = 0
        self.num_queries = 0
        self.num_hits = 0

    def __contains__(self, key: ImageKey) -> bool:
        return key in self._features

    def is_pinned_by(self, request_id: str, key: ImageKey) -> bool:
        return key in self._pinned.get(request_id, ())

    def count(self, num_queries: int, num_hits: int) -> None:
        """Count lookups of an image, and how many found it."""
        self.num_queries += num_queries
        self.num_hits += num_hits

    def put(self, key: ImageKey, features: Tensor, readers: Iterable[str] = ()) -> None:
        """Store features, pinned for the requests that read them."""
        assert key not in self._features
        self._features[key] = features
        for request_id in readers:
            self.pin(request_id, key)
        self.num_bytes += features.nbytes
        self._bytes_per_row = max(self._bytes_per_row, features.nbytes // max(1, len(features)))

    def reserve(self, num_rows: int) -> bool:
        """Evict entries to make room for new features. Returns False if the pinned entries leave too little."""
        return self._evict(num_rows * self._bytes_per_row)

    def pin(self, request_id: str, key: ImageKey) -> Tensor:
        """The features of an image, pinned for a request. Raises: KeyError if they are not in the cache."""
        self._features.move_to_end(key)
        self._pinned.setdefault(request_id, set()).add(key)
        return self._features[key]

    def unpin(self, request_id: str, key: ImageKey) -> None:
        """Unpin an image that the request has read completely. Idempotent."""
        keys = self._pinned.get(request_id, set())
        keys.discard(key)
        if not keys:
            self._pinned.pop(request_id, None)
        self._evict()

    def release(self, request_id: str) -> None:
        """Unpin all images of a request that has ended. Idempotent."""
        for key in list(self._pinned.get(request_id, ())):
            self.unpin(request_id, key)

    def clear(self) -> None:
        """Remove all images, and reset the counts."""
        self.__init__(self._max_bytes)

    def _evict(self, num_new_bytes: int = 0) -> bool:
        """Evict entries that are not pinned, the least recently used first, until the new bytes fit the limit."""
        limit = self._max_bytes - num_new_bytes
        pinned = {key for keys in self._pinned.values() for key in keys}
        unpinned = iter([key for key in self._features if key not in pinned])
        while self.num_bytes > limit and (key := next(unpinned, None)) is not None:
            self.num_bytes -= self._features.pop(key).nbytes
        return self.num_bytes <= limit


@dataclass(slots=True)
class _Missing:
    """An image that is not in the cache, with the requests of the step that read it."""

    image: ImageInput
    readers: list[str] = field(default_factory=list)


@dataclass(eq=False)
class ImageEncoder:
    """Vision tower and projector with a cache."""

    _model: "FamilyModel"
    cache: EncoderCache
    _max_batch: int  #: images that are encoded together
    _device: torch.device
    _dtype: torch.dtype
    _begun: tuple[ImageKey, Generator[None, None, Tensor]] | None = None
    _wanted_by: set[str] = field(default_factory=set)  #: requests that wait for the begun image

    def release(self, request_id: str) -> None:
        """Stop encoding an image that only this ended request waits for. Idempotent."""
        self.cache.release(request_id)
        self._wanted_by.discard(request_id)
        if not self._wanted_by:
            self.close()

    def close(self) -> None:
        """Cancel the image whose encoding has begun. Idempotent."""
        if self._begun is not None:
            self._begun[1].close()
        self._begun = None

    def encode_missing(
        self, items: list[ScheduledSequence], max_vision_s: float | None = None
    ) -> tuple[float, dict[str, int], frozenset[str]]:
        """Encode the images that a step reads and that are not in the cache.

        The time is limited to `max_vision_s` in steps in which other requests decode, else to `SECONDS_ALONE`. None
        means no limit. In steps in which others decode, a request first computes the prompt tokens before its image,
        and encodes the image in later steps. Returns the seconds spent, and `num_computed` and `over_budget` of
        `StepResult`. Encoded images are pinned for their requests. Raises: SequenceFailure.
        """
        missing = self._find_missing(items)
        if not missing:
            return 0.0, {}, frozenset()
        started = time.perf_counter()
        before = self._num_ready(items, missing.keys())
        wanted = missing
        if has_streams := any(map(_is_stream, items)):
            wanted = {
                k: each for k, each in missing.items() if not all(map(before.get, each.readers))
            }
        if max_vision_s is None:
            unfinished = self._encode(wanted)
        elif has_streams:
            unfinished = wanted.keys() - {self._work_on_one(wanted, max_vision_s)}
        else:
            unfinished = self._work_on_all(wanted)
        if self._begun is not None and self._begun[0] in missing:
            self._wanted_by.update(missing[self._begun[0]].readers)
        vision_s = time.perf_counter() - started if wanted else 0.0
        for key, each in wanted.items():
            if key in unfinished:
                continue
            if key not in self.cache:
                raise SequenceFailure(each.readers[0], NOT_FINITE)
            self.cache.count(len(each.readers), len(each.readers) - 1)
        ready = self._num_ready(items, unfinished | (missing.keys() - wanted.keys()))
        num_computed = before if has_streams else ready
        over_budget = frozenset(name for name, num in ready.items() if num == num_computed[name])
        return vision_s, num_computed, over_budget

    def _num_ready(self, items: list[ScheduledSequence], missing: Set[ImageKey]) -> dict[str, int]:
        """For each request that reads a missing image, the number of tokens before the image that can be computed."""
        ready: dict[str, int] = {}
        for item in items:
            for image in item.images:
                if _key(item.sequence, image) in missing:
                    count = image.offset - item.start
                    is_enough = count >= FEWEST_TOKENS and not self._model.binds_prompts
                    ready[item.sequence.request_id] = count if is_enough else 0
                    break
        return ready

    def _find_missing(self, items: list[ScheduledSequence]) -> dict[ImageKey, _Missing]:
        """The images of a step that are not in the cache. Cached images are pinned. Raises: SequenceFailure."""
        missing: dict[ImageKey, _Missing] = {}
        for item in items:
            request_id = item.sequence.request_id
            for image in item.images:
                key = _key(item.sequence, image)
                if self.cache.is_pinned_by(request_id, key):
                    continue
                if key in self.cache:
                    self.cache.count(1, 1)
                    self.cache.pin(request_id, key)
                    continue
                if key not in missing:
                    if self._model.num_features(image) != image.num_slots:
                        raise SequenceFailure(request_id, UNFIT)
                    missing[key] = _Missing(image)
                missing[key].readers.append(request_id)
        return missing

    def place(
        self, items: list[ScheduledSequence], sequences: list[SequenceRows]
    ) -> list[ImageSlots]:
        """The features of a step's image slots; a chunk can contain a part of an image."""
        slots = []
        for item, own in zip(items, sequences, strict=True):
            for image in item.images:
                features = self.cache.pin(item.sequence.request_id, _key(item.sequence, image))
                row = 0
                for start, stop in image.slot_runs:
                    first = max(image.offset + start, own.num_computed)
                    last = min(image.offset + stop, own.num_context)
                    if first < last:
                        rows = row - image.offset - start  # token index to row of `features`
                        place = own.start + first - own.num_computed
                        slots_of = getattr(image.pixels, "slots_of", "image")
                        own_rows = features[first + rows : last + rows]
                        slots.append(ImageSlots(place, own_rows, image.kind, slots_of))
                    row += stop - start
        return slots

    def unpin_done(self, items: list[ScheduledSequence]) -> None:
        """Unpin the images whose last slot a step has computed."""
        for item in items:
            for image in item.images:
                if image.offset + image.num_tokens <= item.end:
                    self.cache.unpin(item.sequence.request_id, _key(item.sequence, image))

    def _encode(self, missing: dict[ImageKey, _Missing]) -> Set[ImageKey]:
        """Encode missing images in batches. Returns the keys of images that do not fit into the cache in this step."""
        waiting = list(missing.items())
        while waiting:
            slots = [each.image.num_slots for _, each in waiting[: self._max_batch]]
            while not (fits := self.cache.reserve(sum(slots))) and len(slots) > 1:
                slots.pop()
            if not fits and len(waiting) < len(missing):
                return {key for key, _ in waiting}
            part, waiting = waiting[: len(slots)], waiting[len(slots) :]
            images = [each.image for _, each in part]
            with _fitting(part[0][1] if len(part) == 1 else None):
                features = self._model.encode(images, self._device, self._dtype)
            # also waits for the GPU, because its time would otherwise count as prefill
            are_finite = torch.stack([rows.isfinite().all() for rows in features]).tolist()
            for (key, each), rows, is_finite in zip(part, features, are_finite, strict=True):
                if is_finite:
                    # a separate copy, so that evicting one image frees its memory
                    self.cache.put(key, rows.clone(), each.readers)
        return frozenset()

    def _work_on_all(self, missing: dict[ImageKey, _Missing]) -> Set[ImageKey]:
        """Encode images one by one for `SECONDS_ALONE`; returns the keys that are still missing."""
        left = dict(missing)
        until = time.perf_counter() + SECONDS_ALONE
        while left and (key := self._work_on_one(left, until - time.perf_counter())) is not None:
            del left[key]
            if time.perf_counter() >= until:
                break
        return left.keys()

    def _work_on_one(self, missing: dict[ImageKey, _Missing], seconds: float) -> ImageKey | None:
        """Continue the begun image, or begin one. Returns its key if it is complete, else None."""
        if not missing:
            return None
        if self._begun is None or self._begun[0] not in missing:
            self.close()
            self._wanted_by = set()
            key = next(iter(missing))
            image = missing[key].image
            self.cache.reserve(image.num_slots)
            with _fitting(missing[key]):
                parts = self._model.encode_in_parts(image, self._device, self._dtype)
                next(parts)  # stops before the first part
            self._begun = key, parts
        key, parts = self._begun
        started = before = time.perf_counter()
        longest = 0.0
        self._begun = None  # set again below, unless a part raises or is the last
        while not longest or before - started + longest <= seconds:
            try:
                with _fitting(missing[key]):
                    next(parts)
            except StopIteration as stop:
                if stop.value.isfinite().all():
                    self.cache.put(key, stop.value, missing[key].readers)
                return key
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        self._begun = key, parts
        return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out. The CPU allocator raises plain RuntimeErrors."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def _fitting(single: _Missing | None) -> Iterator[None]:
    """Raises: SequenceFailure if memory runs out while a single image is encoded."""
    try:
        yield
    except RuntimeError as error:
        if single is None or not is_out_of_memory(error):
            raise
        raise SequenceFailure(single.readers[0], TOO_LARGE) from error


def _is_stream(item: ScheduledSequence) -> bool:
    """Whether a stream waits for this step's tokens."""
    is_smooth = item.sequence.is_smooth
    return is_smooth and item.num_new_tokens - len(item.draft) == 1 and item.samples


def _key(sequence: Sequence, image: ImageInput) -> ImageKey:
    return sequence.cache_salt, image.image_hash
