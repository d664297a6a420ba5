"""What a token-based engine takes: a prompt's token ids, and the images in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.base import Adapter
from engines.core.constraint import Constraint
from shared.protocol import Priority, SamplingParams

if TYPE_CHECKING:
    from engines.text.tools import ToolFormat


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a prompt: a run of `num_tokens` tokens from `offset`, some of which are slots.

    `image_hash` identifies it in every cache, together with how it was processed; `pixels` is
    whatever the runner's own image processor made. Tokens of the run that are no slots, such as
    line breaks, are embedded as text.
    """

    offset: int
    num_tokens: int
    image_hash: str
    pixels: Any
    slots: tuple[tuple[int, int], ...] = ()
    """Runs of slots as (start, stop) within the image, filled in order. Empty: all of it."""
    #: Rows and columns of slots and the like, where positions depend on them.
    grid: tuple[int, ...] = ()
    #: Whether the tokens of a run of slots see each other: one step computes all of them.
    is_whole: bool = False

    @property
    def slot_runs(self) -> tuple[tuple[int, int], ...]:
        """Where features go, as (start, stop) within the image."""
        return self.slots or ((0, self.num_tokens),)

    @property
    def num_slots(self) -> int:
        """Rows of features that the image has."""
        return sum(stop - start for start, stop in self.slot_runs)


#: Rotary positions of a prompt: R rows of one number a token. Empty: 0, 1, 2 ... in every row.
Positions = tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt ready for the engine. Output tokens of an earlier attempt are continued."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    is_thinking: bool = False  #: the prompt has begun what the model thinks before its answer
    is_raw: bool = False  #: nothing of its answer is kept apart, whatever it marks as thinking
    positions: Positions = ()  #: of the prompt; output tokens go on behind the largest
    adapter: Adapter | None = None
    tool_format: "ToolFormat | None" = None  #: of calls that the answer may hold
    constraint: Constraint | None = None  #: what each answer is held to, at its start
