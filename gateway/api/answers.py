"""Encoders that the text APIs share: streams of chunks or blocks, merged token events, usage."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.fields import OpenAiSampling, StreamOptions, find_service_tier, timings_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import AnswerHead, Frame, Totals
from gateway.http.exchange import SSE_DONE, sse_event
from shared.protocol import (
    CallEvent,
    Finished,
    OutputLogprob,
    Priority,
    PromptLogprob,
    Started,
    Tokenized,
    Tokens,
    Usage,
    join_tokens,
)
from shared.version import package_version

SYSTEM_FINGERPRINT = f"vlm-fleet-{package_version()}"

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    """The prompt's tokens by kind. Cached tokens may be of any kind."""

    cached_tokens: int
    audio_tokens: int
    image_tokens: int
    text_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    #: Absent if the answer has no reasoning.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def to_usage(totals: Totals) -> CompletionUsage:
    """The `usage` object. A prompt is counted once for all of its choices."""
    usage = usage_of(totals.prompt, totals.num_output_tokens)
    if count := num_reasoning_tokens(totals):
        usage.completion_tokens_details = CompletionTokensDetails(count)
    return usage


def num_reasoning_tokens(totals: Totals) -> int:
    return sum(event.usage.num_reasoning_tokens for event in totals.finished)


def usage_of(prompt: Usage, num_output: int) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=prompt.num_prompt_tokens,
        completion_tokens=num_output,
        total_tokens=prompt.num_prompt_tokens + num_output,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=prompt.num_cached_tokens,
            audio_tokens=prompt.num_audio_tokens,
            image_tokens=prompt.num_image_tokens,
            text_tokens=prompt.num_text_tokens,
        ),
    )


class PromptTokenScore(msgspec.Struct):
    """vLLM's entry for a token of the prompt, or for an alternative to it."""

    logprob: float
    rank: int  #: 1 for the most probable token
    decoded_token: str


#: One entry per position: scores by token id, the prompt's own token first. null for the first position.
PromptLogprobs = list[dict[str, PromptTokenScore] | None]


class PromptTokens:
    """Token ids and logprobs of one choice's prompt. Events may repeat the logprobs of a position."""

    def __init__(self) -> None:
        self._found: dict[int, PromptLogprob] = {}
        self.token_ids: tuple[int, ...] = ()  #: empty unless the request asks for them

    def add(self, event: object) -> None:
        if isinstance(event, Started):
            self.token_ids = event.prompt_token_ids
        elif isinstance(event, Tokens):
            for entry in event.prompt_logprobs:
                self._found[entry.position] = entry

    @property
    def entries(self) -> list[PromptLogprob]:
        return list(self._found.values())

    def to_prompt_logprobs(self) -> PromptLogprobs:
        """The prompt in the format of vLLM's `prompt_logprobs`."""
        return [_to_scores(entry) if entry.rank else None for entry in self.entries]


def _to_scores(entry: PromptLogprob) -> dict[str, PromptTokenScore]:
    own = PromptTokenScore(entry.chosen.logprob, entry.rank, entry.chosen.token)
    scores = {str(entry.token_id): own}
    for rank, (token_id, rival) in enumerate(entry.top, 1):
        scores.setdefault(str(token_id), PromptTokenScore(rival.logprob, rank, rival.token))
    return scores


def merge_tokens(events: Sequence[ChoiceEvent]) -> Iterator[ChoiceEvent]:
    """Join adjacent token events of the same choice."""
    if len([event for _, event in events if isinstance(event, Tokens)]) < 2:
        yield from events
        return
    for (index, has_tokens), run in groupby(events, lambda e: (e[0], isinstance(e[1], Tokens))):
        if has_tokens:
            pieces: list[Any] = [event for _, event in run]
            yield index, join_tokens(pieces[0].request_id, pieces[0].attempt, pieces)
        else:
            yield from run


def with_ends(
    events: Sequence[ChoiceEvent], *, joins: bool
) -> Iterator[tuple[int, CallEvent, Finished | None]]:
    """Yield (choice, event, end) for the merged events. `end`: `Finished`, for a choice's last event; else None.

    `joins`: if tokens of the same attempt directly precede `Finished`, they are the last event, else `Finished` is.
    """
    if len(events) == 1:
        [(index, event)] = events
        yield index, event, event if isinstance(event, Finished) else None
        return
    merged = list(merge_tokens(events))
    joined: CallEvent | None = None
    for place, (index, event) in enumerate(merged, 1):
        if isinstance(event, Finished):
            if event is not joined:
                yield index, event, event
        elif joins and isinstance(event, Tokens) and place < len(merged):
            following, later = merged[place]
            is_end = following == index and later.attempt == event.attempt
            joined = later if is_end and isinstance(later, Finished) else None
            yield index, event, joined
        else:
            yield index, event, None


class Block(msgspec.Struct):
    """Reasoning, text or a function call of an answer. `pieces` are the text, or the arguments of the call."""

    index: int
    kind: Literal["thought", "text", "call"]
    call_id: str = ""
    name: str = ""
    pieces: list[str] = msgspec.field(default_factory=list)
    logprobs: list[OutputLogprob] = msgspec.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments of a call are complete."""
        arguments = self.text.encode()
        try:  # values stay raw, because the decoder refuses very large numbers
            return msgspec.json.decode(arguments, type=dict[str, msgspec.Raw]) is not None
        except msgspec.MsgspecError:
            return False
        except RecursionError:
            bare = _TEXTS.sub(b"", arguments)
            return b'"' not in bare and len(_OPENED.findall(bare)) == len(_CLOSED.findall(bare))

    @property
    def json(self) -> msgspec.Raw:
        """The arguments of a call; an empty object if they are incomplete."""
        return msgspec.Raw(self.text.encode() if self.is_whole else b"{}")


#: Arguments that nest too deeply for the decoder are complete if all brackets match: a grammar restricts them to JSON.
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPENED, _CLOSED = re.compile(rb"[{\[]"), re.compile(rb"[}\]]")

Addition = tuple[Block, str, tuple[OutputLogprob, ...]]


class Blocks:
    """The blocks of one choice: reasoning (if the client requests it), text, calls."""

    def __init__(self, answer_id: str, choice: int = 0, *, with_thought: bool = True) -> None:
        self.all: list[Block] = []
        self._answer_id = answer_id
        self._choice = choice
        self._with_thought = with_thought
        self._num_calls = 0
        self._held: tuple[OutputLogprob, ...] = ()  # logprobs of tokens whose text is incomplete

    def add(self, event: Tokens) -> list[Addition]:
        """Add tokens. Returns the additions by block; the addition to a new block may be empty."""
        added: list[Addition] = []
        if event.reasoning and self._with_thought:
            added.append(self._grow("thought", event.reasoning))
        self._held += event.logprobs
        if event.text or (self._held and self.all and self.all[-1].kind == "text"):
            added.append(self._grow("text", event.text, self._release()))
        for piece in event.calls:
            if piece.index == self._num_calls:
                name = call_id(self._answer_id, self._choice, self._num_calls)
                self.all.append(Block(len(self.all), "call", name, piece.name))
                self._num_calls += 1
            added.append(self._grow("call", piece.arguments))
        if self._num_calls:
            self._held = ()
        return added

    def add_all(self, events: Sequence[ChoiceEvent]) -> None:
        for _, event in events:
            if isinstance(event, Tokens):
                self.add(event)

    def complete(self) -> Block:
        """The last block. Adds an empty text block if neither text nor calls follow the reasoning."""
        if not self.all or self.all[-1].kind == "thought":
            self._grow("text", "", self._release())
        return self.all[-1]

    def _release(self) -> tuple[OutputLogprob, ...]:
        held, self._held = self._held, ()
        return held

    def _grow(self, kind: str, text: str, logprobs: tuple[OutputLogprob, ...] = ()) -> Addition:
        if not self.all or self.all[-1].kind != kind:
            self.all.append(Block(len(self.all), kind))  # type: ignore[arg-type]
        block = self.all[-1]
        block.pieces.append(text)
        block.logprobs.extend(logprobs)
        return block, text, logprobs

    @property
    def text(self) -> str:
        return self._join("text")

    @property
    def thought(self) -> str:
        return self._join("thought")

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind == "call"]

    def _join(self, kind: str) -> str:
        return "".join(block.text for block in self.all if block.kind == kind)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call. All readers of a stream compute the same id."""
    return f"call_{answer_id[-20:]}{choice:02x}{index:02x}"


class ChunkOptions(msgspec.Struct, frozen=True):
    """Options of an answer. They are copied, because the request may be large and is not retained."""

    include_usage: bool = False
    continuous_usage: bool = False  #: whether every chunk has the usage so far
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    with_token_ids: bool = False
    #: Unset if the request has no `service_tier`.
    service_tier: str | UnsetType = UNSET

    @classmethod
    def of(cls, request: OpenAiSampling, priority: Priority, **fields: Any) -> Self:
        stream = request.stream_options or StreamOptions()
        return cls(
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage_stats,
            with_prompt_logprobs=request.prompt_logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
            service_tier=find_service_tier(request.service_tier, priority),
            **fields,
        )


Options = TypeVar("Options", bound=ChunkOptions)


def by_choice(events: Sequence[ChoiceEvent], totals: Totals) -> Iterator[tuple[int, Tokens, str]]:
    """Index, joined tokens and finish reason of each choice of a complete answer."""
    pieces: list[list[Tokens]] = [[] for _ in totals.finished]
    reasons = [""] * len(pieces)
    for index, event in events:
        if isinstance(event, Tokens):
            pieces[index].append(event)
        elif isinstance(event, Finished):
            reasons[index] = event.finish_reason.value
    for index, own in enumerate(pieces):
        whole = own[0] if len(own) == 1 else join_tokens("", 0, own or [Tokens("", 0, 0, ())])
        yield index, whole, reasons[index]


class ChunkStream(Generic[Options]):
    """An answer of the chat or completions API, whole or in chunks.

    Each choice has a first chunk, chunks of content, and a chunk with `finish_reason`. The usage, if it is
    requested, and `[DONE]` come after all choices.
    """

    chunk_type: type[msgspec.Struct]
    num_choices = 2**31  #: choices per prompt; by default, all choices are of one prompt

    def __init__(self, options: Options, head: AnswerHead) -> None:
        self.head = head
        self.options = options
        #: Fields that all chunks have.
        self._constant = {
            "id": head.id,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.package or SYSTEM_FINGERPRINT,
            "service_tier": options.service_tier,
        }
        self._chunk: Any = None  # reused, because creating a chunk each time costs more
        self._begun: set[int] = set()
        self._num_tokens = 0
        self._counts: dict[int, int] = {}  # output tokens by choice
        self._prompt_usages: dict[int, Usage] = {}  # by prompt

    def can_begin(self, event: CallEvent) -> bool:
        """Whether the first chunk of a choice can be created."""
        return True

    def first_chunk(self, index: int, event: CallEvent) -> bytes | None:
        """The first chunk of a choice, if the API has one."""
        raise NotImplementedError

    def content(self, index: int, event: Tokens) -> Any | None:
        """The choice of a chunk with these tokens. None: there is nothing to send."""
        raise NotImplementedError

    def empty(self, index: int) -> Any:
        raise NotImplementedError

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        frames: list[Frame] = []
        timings = UNSET if totals is None else timings_of(totals)
        last = events[-1][1] if events else None
        for index, event, end in with_ends(events, joins=self.options.continuous_usage):
            if self.options.continuous_usage:
                self._count(index, event)
            if index not in self._begun and self.can_begin(event):
                self._begun.add(index)
                if (first := self.first_chunk(index, event)) is not None:
                    frames.append((0, first))
            choice = self.content(index, event) if isinstance(event, Tokens) else None
            if end is not None:
                self._num_tokens = end.usage.num_output_tokens
                choice = choice or self.empty(index)
                choice.finish_reason = end.finish_reason.value
                is_end = end is last and not self.options.include_usage
                chunk = self.chunk(choice, timings=timings if is_end else UNSET)
                frames.append((self._num_tokens + 1, chunk))
            elif choice is not None and isinstance(event, Tokens):
                frames.append((event.index + event.num_tokens, self.chunk(choice)))
        if totals is not None:
            if self.options.include_usage:
                usage = to_usage(totals)
                data = self.encode(self.chunk_type, [], usage=usage, timings=timings)
                frames.append((self._num_tokens + 2, sse_event(data)))
            frames.append((self._num_tokens + 3, SSE_DONE))
        return frames

    def chunk(self, choice: Any, timings: Any = UNSET) -> bytes:
        if self._chunk is None:
            self._chunk = self.chunk_type(choices=[], usage=self.usage(), **self._constant)
        chunk = self._chunk
        chunk.choices, chunk.timings = [choice], timings
        if self.options.continuous_usage:
            chunk.usage = self.usage()
        return sse_event(encode(chunk))

    def usage(self) -> CompletionUsage | UnsetType | None:
        """The `usage` of a chunk."""
        if self.options.continuous_usage:
            prompt = sum(self._prompt_usages.values(), Usage(0))
            return usage_of(prompt, sum(self._counts.values()))
        return None if self.options.include_usage else UNSET

    def encode(self, type_: type[msgspec.Struct], choices: list[Any], **fields: Any) -> bytes:
        return encode(type_(choices=choices, **self._constant, **fields))

    def _count(self, index: int, event: CallEvent) -> None:
        if isinstance(event, Tokens):
            self._counts[index] = event.index + event.num_tokens
        elif isinstance(event, Started | Finished):
            self._prompt_usages[index // self.num_choices] = event.usage


class BlockStream:
    """An answer in blocks. Each block opens, grows and closes before the next one opens."""

    def __init__(self, head: AnswerHead, *, with_thought: bool = True) -> None:
        self.head = head
        self._blocks = Blocks(head.id, with_thought=with_thought)
        self._has_begun = False
        self._open: Block | None = None

    def begun(self, prompt: Usage) -> bytes:
        raise NotImplementedError

    def opened(self, block: Block) -> bytes:
        raise NotImplementedError

    def grown(self, event: Tokens, added: Sequence[Addition]) -> bytes:
        """Events for added text. Calls `grow` for each addition, to open its block."""
        raise NotImplementedError

    def closed(self, block: Block, totals: Totals | None) -> bytes:
        """Events for the end of a block. `totals`: only for the last block."""
        raise NotImplementedError

    def ended(self, totals: Totals) -> bytes:
        raise NotImplementedError

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """The stream's events; events that belong together are one frame."""
        frames: list[Frame] = []
        for _, event in merge_tokens(events):
            if not self._has_begun:
                self._has_begun = True
                prompt = event.usage if isinstance(event, Started) else Usage(0)
                frames.append((0, self.begun(prompt)))
            if isinstance(event, Tokens) and (data := self.grown(event, self._blocks.add(event))):
                frames.append((event.index + event.num_tokens, data))
        if totals is not None:
            data = b"" if self._has_begun else self.begun(totals.prompt)
            data += self.grow(self._blocks.complete()) + self._close(totals) + self.ended(totals)
            frames.append((totals.num_output_tokens + 1, data))
        return frames

    def grow(self, block: Block) -> bytes:
        """Events that close the previous block and open `block`. Empty if `block` is open."""
        if self._open is block:
            return b""
        data = self._close(None)
        self._open = block
        return data + self.opened(block)

    def _close(self, totals: Totals | None) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self.closed(block, totals)


@dataclass
class WholeAnswer:
    """An answer that is never streamed."""

    _to_body: Callable[[Sequence[ChoiceEvent], Totals], msgspec.Struct]

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        return encode(self._to_body(events, totals))

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        return []


def find_tokenized(events: Sequence[ChoiceEvent]) -> Tokenized:
    [made] = [event for _, event in events if isinstance(event, Tokenized)]
    return made
