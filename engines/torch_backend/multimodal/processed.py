"""The output of a checkpoint's processor for one image, video or audio."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shared.protocol import MediaKind

#: Token types of slots.
TYPES: Mapping[str, int] = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The model's inputs for an image, video or audio, and its text in the prompt."""

    inputs: Mapping[str, Any]
    text: str
    num_slots: int
    #: The result if the image is not the only one of its prompt.
    among_others: "ProcessedImage | None" = None
    #: For each slot, the index of a visual indicator's feature, or -1 for the image's next row; empty: all -1.
    indicators: tuple[int, ...] = ()
    kind: MediaKind = "image"
    #: Kind of the slot tokens in its text; in some models, videos use image slots.
    slots_of: MediaKind = "image"
    slot_id: int | None = None
    num_frames: int = 0  #: of a video

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in self.inputs.values() if isinstance(x, Tensor))
        return own + (self.among_others.nbytes if self.among_others else 0)
