"""The input of a token-based engine: token ids and images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from engines.base import Adapter
from engines.core.constraint import Constraint
from shared.protocol import Priority, SamplingParams, TemplateOption

if TYPE_CHECKING:
    from engines.text.tools import ToolFormat


NO_OPTIONS: Mapping[str, TemplateOption] = {}


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a prompt: a run of `num_tokens` tokens from `offset`, some of which are slots for features.

    `image_hash` identifies the image and its processing in every cache; `pixels` is the output of the runner's image
    processor. Other tokens of the run, such as line breaks, are embedded as text.
    """

    offset: int
    num_tokens: int
    image_hash: str
    pixels: Any
    slots: tuple[tuple[int, int], ...] = ()
    """Runs of slots as (start, stop) within the image. Empty: all tokens are slots."""
    #: Grid size, where positions depend on it.
    grid: tuple[int, ...] = ()
    #: Whether attention within a run of slots is bidirectional, so that one step computes it.
    is_whole: bool = False
    num_frames: int = 0  #: of a video

    @property
    def slot_runs(self) -> tuple[tuple[int, int], ...]:
        return self.slots or ((0, self.num_tokens),)

    @property
    def num_slots(self) -> int:
        """Number of feature rows."""
        return sum(stop - start for start, stop in self.slot_runs)


#: Rotary positions of a prompt: R rows with one number per token. Empty: 0, 1, 2 ... in every row.
Positions = tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prepared request. Output tokens of an earlier attempt are continued."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    is_thinking: bool = False  #: the prompt ends within the reasoning
    is_raw: bool = False  #: reasoning is not separated from the text
    positions: Positions = ()  #: of the prompt; output tokens continue behind the largest
    adapter: Adapter | None = None
    tool_format: "ToolFormat | None" = None  #: set if the answer may call functions
    constraint: Constraint | None = None  #: grammar of the answer, at its start


class Prompt(Struct, frozen=True):
    """Token ids with one run of tokens per image, in the order of the message parts."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    positions: Positions = ()
    is_thinking: bool = False  #: whether it ends within the reasoning
