"""From the fleet's events to OpenAI's words: a whole answer, or the chunks of a stream.

Order of a stream: for each choice a role chunk, content chunks and a chunk with `finish_reason`;
then, if asked for, a chunk without choices that holds the usage; then `[DONE]`.

Source: OpenAI API reference, "Create chat completion" and "Streaming events".
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from gateway.api.answers import (
    SYSTEM_FINGERPRINT,
    Blocks,
    CompletionUsage,
    PromptTokens,
    call_id,
    encode,
    to_usage,
    usage_of,
    with_ends,
)
from gateway.api.chat.schemas import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprob,
    Choice,
    ChoiceDelta,
    ChoiceLogprobs,
    ChunkChoice,
    TopLogprob,
)
from gateway.api.chat.translate import ChatOptions
from gateway.api.fields import Timings, timings_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import AnswerHead, Frame, Totals
from gateway.http.exchange import SSE_DONE, sse_event
from shared.protocol import (
    CallEvent,
    CallPiece,
    Finished,
    OutputLogprob,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)


class ChatAnswer:
    """One answer, whole or in chunks."""

    def __init__(self, options: ChatOptions, head: AnswerHead) -> None:
        self.options = options
        self.head = head
        self._no_usage = None if options.include_usage else UNSET
        self._begun: set[int] = set()
        self._num_tokens = 0
        self._prompt = Usage(0)
        self._counts: dict[int, int] = {}  # output tokens so far, by choice

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """A `ChatCompletion`."""
        choices = [
            _GatheredChoice(self.head.id, index, self.options)
            for index in range(len(totals.finished))
        ]
        prompt = PromptTokens()
        for index, event in events:
            choices[index].add(event)
            if index == 0:
                prompt.add(event)
        completion = ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.package or SYSTEM_FINGERPRINT,
            choices=[choice.to_choice(index) for index, choice in enumerate(choices)],
            usage=to_usage(totals),
            service_tier=self.options.service_tier,
            timings=timings_of(totals),
        )
        if self.options.with_prompt_logprobs:
            completion.prompt_logprobs = prompt.to_prompt_logprobs()
        if self.options.with_token_ids:
            completion.prompt_token_ids = prompt.token_ids
        return encode(completion)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """Chunks; the last ones hold the usage and the timings, where they are asked for."""
        frames: list[Frame] = []
        timings = UNSET if totals is None else timings_of(totals)
        last = events[-1][1] if events else None
        for index, event, end in with_ends(events, joins=self.options.continuous_usage):
            if self.options.continuous_usage:
                self._count(index, event)
            if index not in self._begun:
                self._begun.add(index)
                choice = ChunkChoice(index, ChoiceDelta("assistant", ""))
                token_ids = UNSET
                if isinstance(event, Started) and self.options.with_token_ids:
                    token_ids = event.prompt_token_ids
                frames.append((0, self._chunk(choice, prompt_token_ids=token_ids)))
            choice = ChunkChoice(index, ChoiceDelta())
            if isinstance(event, Tokens) and self._tells(event):
                choice = self._content(index, event)
                if end is None:
                    frames.append((event.index + event.num_tokens, self._chunk(choice)))
            if end is not None:
                self._num_tokens = end.usage.num_output_tokens
                choice.finish_reason = end.finish_reason.value
                is_end = end is last and not self.options.include_usage
                chunk = self._chunk(choice, timings if is_end else UNSET)
                frames.append((self._num_tokens + 1, chunk))
        if totals is not None:
            frames += self._end(totals, timings)
        return frames

    def _end(self, totals: Totals, timings: Timings) -> Iterator[Frame]:
        if self.options.include_usage:
            yield self._num_tokens + 2, self._encode([], to_usage(totals), timings)
        yield self._num_tokens + 3, SSE_DONE

    def _tells(self, event: Tokens) -> bool:
        """Whether there is anything for the client in it."""
        return bool(
            event.text
            or event.calls
            or (event.reasoning and self.options.with_reasoning)
            or (event.logprobs and self.options.with_logprobs)
            or (event.token_ids and self.options.with_token_ids)
        )

    def _content(self, index: int, event: Tokens) -> ChunkChoice:
        logprobs = to_choice_logprobs(event.logprobs) if self.options.with_logprobs else None
        delta = ChoiceDelta(content=event.text)
        if event.reasoning and self.options.with_reasoning:
            delta.reasoning_content = event.reasoning
            delta.content = event.text or UNSET
        if event.calls:
            delta.tool_calls = [self._call(index, piece) for piece in event.calls]
            delta.content = event.text or UNSET
        token_ids = event.token_ids if self.options.with_token_ids else UNSET
        return ChunkChoice(index, delta, logprobs, token_ids=token_ids)

    def _call(self, choice: int, piece: CallPiece) -> AnswerCall:
        """What is added to a call; its id and name come once."""
        call = AnswerCall(AnswerFunction(arguments=piece.arguments), index=piece.index)
        if piece.name:
            call.id, call.type = call_id(self.head.id, choice, piece.index), "function"
            call.function.name = piece.name
        return call

    def _chunk(
        self,
        choice: ChunkChoice,
        timings: Timings = UNSET,
        prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        usage = self._no_usage
        if self.options.continuous_usage:
            usage = usage_of(self._prompt, sum(self._counts.values()))
        return self._encode([choice], usage, timings, prompt_token_ids)

    def _count(self, index: int, event: CallEvent) -> None:
        """Note the counts so far, for the chunk of this event."""
        if isinstance(event, Tokens):
            self._counts[index] = event.index + event.num_tokens
        elif isinstance(event, Started | Finished):
            self._prompt = event.usage

    def _encode(
        self,
        choices: list[ChunkChoice],
        usage: CompletionUsage | UnsetType | None,
        timings: Timings,
        prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        chunk = ChatCompletionChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.package or SYSTEM_FINGERPRINT,
            choices=choices,
            service_tier=self.options.service_tier,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            timings=timings,
        )
        return sse_event(encode(chunk))


class _GatheredChoice:
    """One choice so far."""

    def __init__(self, answer_id: str, index: int, options: ChatOptions) -> None:
        self._options = options
        self._blocks = Blocks(answer_id, index, with_thought=options.with_reasoning)
        self._logprobs: list[OutputLogprob] = []
        self._token_ids: list[int] = []
        self._finish_reason = ""

    def add(self, event: object) -> None:
        if isinstance(event, Tokens):
            self._blocks.add(event)
            self._logprobs.extend(event.logprobs)
            self._token_ids.extend(event.token_ids)
        elif isinstance(event, Finished):
            self._finish_reason = event.finish_reason.value

    def to_choice(self, index: int) -> Choice:
        """The choice as it stands."""
        logprobs = to_choice_logprobs(self._logprobs) if self._options.with_logprobs else None
        message = AnswerMessage(self._blocks.text)
        if thought := self._blocks.thought:
            message.reasoning_content = thought
        if calls := self._blocks.calls:
            message.content = message.content or None
            message.tool_calls = [
                AnswerCall(AnswerFunction(call.name, call.text), call.call_id, "function")
                for call in calls
            ]
        token_ids = self._token_ids if self._options.with_token_ids else UNSET
        return Choice(index, message, self._finish_reason, logprobs, token_ids)


def to_choice_logprobs(logprobs: Sequence[OutputLogprob]) -> ChoiceLogprobs:
    """The `logprobs` object of a choice."""
    return ChoiceLogprobs([_to_logprob(entry) for entry in logprobs])


def _to_logprob(entry: OutputLogprob) -> ChatLogprob:
    chosen = entry.chosen
    top = [TopLogprob(rival.token, rival.logprob, _bytes(rival)) for rival in entry.top]
    return ChatLogprob(chosen.token, chosen.logprob, _bytes(chosen), top)


def _bytes(entry: TokenLogprob) -> tuple[int, ...]:
    return tuple(entry.token_bytes)
