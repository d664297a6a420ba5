"""From the fleet's events to OpenAI's chat: a whole answer, or the chunks of a stream.

Source: OpenAI API reference, "Create chat completion" and "Streaming events".
"""

from collections.abc import Sequence

from msgspec import UNSET

from gateway.api.answers import Blocks, ChunkStream, PromptTokens, call_id, to_usage
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
from gateway.api.fields import timings_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import AnswerHead, Totals
from shared.protocol import (
    CallEvent,
    CallPiece,
    Finished,
    OutputLogprob,
    Started,
    TokenLogprob,
    Tokens,
)


class ChatAnswer(ChunkStream):
    """A `ChatCompletion` or its chunks."""

    chunk_type = ChatCompletionChunk

    def __init__(self, options: ChatOptions, head: AnswerHead) -> None:
        super().__init__(options, head)
        self.options = options

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        choices = [
            _GatheredChoice(self.head.id, index, self.options)
            for index in range(len(totals.finished))
        ]
        prompt = PromptTokens()
        for index, event in events:
            choices[index].add(event)
            if index == 0:
                prompt.add(event)
        options = self.options
        return self.encode(
            ChatCompletion,
            [choice.to_choice(index) for index, choice in enumerate(choices)],
            usage=to_usage(totals),
            timings=timings_of(totals),
            prompt_logprobs=prompt.to_prompt_logprobs() if options.with_prompt_logprobs else UNSET,
            prompt_token_ids=prompt.token_ids if options.with_token_ids else UNSET,
        )

    def first_chunk(self, index: int, event: CallEvent) -> bytes:
        token_ids = UNSET
        if isinstance(event, Started) and self.options.with_token_ids:
            token_ids = event.prompt_token_ids
        choice = ChunkChoice(index, ChoiceDelta("assistant", ""))
        return self.chunk(choice, prompt_token_ids=token_ids)

    def empty(self, index: int) -> ChunkChoice:
        return ChunkChoice(index, ChoiceDelta())

    def content(self, index: int, event: Tokens) -> ChunkChoice | None:
        options = self.options
        has_content = (
            event.text
            or event.calls
            or (event.reasoning and options.with_reasoning)
            or (event.logprobs and options.with_logprobs)
            or (event.token_ids and options.with_token_ids)
        )
        if not has_content:
            return None
        logprobs = to_choice_logprobs(event.logprobs) if options.with_logprobs else None
        delta = ChoiceDelta(content=event.text)
        if event.reasoning and options.with_reasoning:
            delta.reasoning_content = event.reasoning
            delta.content = event.text or UNSET
        if event.calls:
            delta.tool_calls = [self._call(index, piece) for piece in event.calls]
            delta.content = event.text or UNSET
        token_ids = event.token_ids if options.with_token_ids else UNSET
        return ChunkChoice(index, delta, logprobs, token_ids=token_ids)

    def _call(self, choice: int, piece: CallPiece) -> AnswerCall:
        """An addition to a call; its id and name come once."""
        call = AnswerCall(AnswerFunction(arguments=piece.arguments), index=piece.index)
        if piece.name:
            call.id, call.type = call_id(self.head.id, choice, piece.index), "function"
            call.function.name = piece.name
        return call


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
