"""From the fleet's events to a `ResponseObject` and the events of its stream.

Order of a stream: `created`, `in_progress`; for each item `output_item.added`,
`content_part.added`, deltas, the text's and the part's `done`, `output_item.done`; then `completed`
or `incomplete`. What the model thinks is an item before the message.

A delta takes as many sequence numbers as it has tokens: a stream that is resumed, where tokens
arrive together, counts as the first did.

Source: OpenAI API reference, "Streaming events" of Responses.
"""

from collections.abc import Sequence

import msgspec

from gateway.api.answers import encode, merge_tokens, num_reasoning_tokens
from gateway.api.chat.answer import to_choice_logprobs
from gateway.api.chat.schemas import ChatLogprob
from gateway.api.fields import timings_of
from gateway.api.responses.schemas import (
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputTokensDetails,
    ReasoningContent,
    ReasoningItem,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    ShownReasoning,
    ShownText,
    TextContent,
)
from gateway.api.responses.translate import KeptConversation, ResponseOptions
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import AnswerHead, Frame, Totals
from gateway.http import sse
from gateway.http.errors import ApiError
from shared.protocol import ChatMessage, Finished, FinishReason, TextPart, Tokens

_SERVER_ERROR = "server_error"


class ResponseAnswer:
    """One answer, whole or in events."""

    def __init__(self, options: ResponseOptions, head: AnswerHead) -> None:
        self.options = options
        self.head = head
        self._id = head.id.removeprefix("resp_")
        self._thought = ""
        self._text = ""
        self._logprobs: list[ChatLogprob] = []
        self._sequence = 0
        self._has_begun = False
        self._open: OutputItem | None = None  # as it began
        self._done: list[OutputItem] = []
        self._final: ResponseObject | None = None

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """A `ResponseObject`."""
        for _, event in events:
            if isinstance(event, Tokens):
                self._take(event)
        status = _status(totals)
        if self._thought:
            self._done.append(self._reasoning("completed"))
        self._done.append(self._message(status))
        self._final = self._response(status, totals)
        return encode(self._final)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """Events; those that belong together are one frame."""
        frames: list[Frame] = []
        for _, event in merge_tokens(events):
            if not self._has_begun:
                frames.append((0, self._begin()))
            if isinstance(event, Tokens) and (data := self._add(event)):
                frames.append((event.index + event.num_tokens, data))
        if totals is not None:
            frames.append((totals.num_output_tokens + 1, self._end(totals)))
        return frames

    def record(self) -> bytes | None:
        """The conversation up to a complete answer; None if its client does not want it kept."""
        if self._final is None or not self.options.messages:
            return None
        answer = ChatMessage("assistant", (TextPart(self._text),), self._thought)
        messages = (*self.options.messages, answer)
        return encode(KeptConversation(messages, msgspec.Raw(encode(self._final))))

    def failed(self, error: ApiError) -> bytes:
        """How a stream ends that cannot be completed."""
        told = self._event(
            "error", code=error.code or _SERVER_ERROR, message=error.message, param=error.param
        )
        response = self._response("failed", None)
        response.error = ResponseError(_SERVER_ERROR, error.message)
        return self._event("response.failed", response=response) + told

    def _take(self, event: Tokens) -> list[ChatLogprob]:
        """Note what a piece says."""
        self._thought += event.reasoning
        self._text += event.text
        if not self.options.with_logprobs:
            return []
        logprobs = to_choice_logprobs(event.logprobs).content
        self._logprobs += logprobs
        return logprobs

    def _begin(self) -> bytes:
        self._has_begun = True
        response = self._response("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _add(self, event: Tokens) -> bytes:
        """The events of the next tokens; none where they complete no text."""
        logprobs, data = self._take(event), b""
        if event.reasoning:
            data += self._open_item(ReasoningItem(f"rs_{self._id}", "in_progress", []))
        if event.reasoning:
            data += self._delta("response.reasoning_text.delta", event.reasoning)
        if event.text or logprobs:
            data += self._open_message()
            data += self._delta("response.output_text.delta", event.text, logprobs)
        self._sequence += event.num_tokens - 1 if data else event.num_tokens
        return data

    def _open_message(self) -> bytes:
        return self._open_item(MessageItem(f"msg_{self._id}", "in_progress", []))

    def _open_item(self, item: OutputItem) -> bytes:
        """Begin an item, unless it has begun; the one before it ends."""
        if type(self._open) is type(item):
            return b""
        data = self._close_item("completed")
        self._open = item
        data += self._event("response.output_item.added", output_index=len(self._done), item=item)
        part = TextContent("") if isinstance(item, MessageItem) else ReasoningContent("")
        return data + self._event("response.content_part.added", **self._place(), part=part)

    def _delta(self, type_: str, text: str, logprobs: list[ChatLogprob] | None = None) -> bytes:
        return self._event(type_, **self._place(), delta=text, logprobs=logprobs)

    def _close_item(self, status: str) -> bytes:
        """End the item that is open."""
        item, place = self._open, self._place()
        if isinstance(item, MessageItem):
            whole: OutputItem = self._message(status)
            kind, logprobs = "output_text", self._logprobs
        elif isinstance(item, ReasoningItem):
            whole, kind, logprobs = self._reasoning(status), "reasoning_text", None
        else:
            return b""
        [part] = whole.content
        data = self._event(f"response.{kind}.done", **place, text=part.text, logprobs=logprobs)
        data += self._event("response.content_part.done", **place, part=part)
        data += self._event("response.output_item.done", output_index=len(self._done), item=whole)
        self._done.append(whole)
        self._open = None
        return data

    def _end(self, totals: Totals) -> bytes:
        status = _status(totals)
        data = b"" if self._has_begun else self._begin()
        data += self._open_message() + self._close_item(status)
        self._final = self._response(status, totals)
        return data + self._event(f"response.{status}", response=self._final) + sse.DONE

    def _place(self) -> dict[str, object]:
        """Of the part that is open."""
        item_id = self._open.id if self._open is not None else None
        return {"item_id": item_id, "output_index": len(self._done), "content_index": 0}

    def _event(self, type_: str, **fields: object) -> bytes:
        event = ResponseEvent(type=type_, sequence_number=self._sequence, **fields)  # type: ignore[arg-type]
        self._sequence += 1
        return sse.frame(encode(event), type_.encode())

    def _message(self, status: str) -> MessageItem:
        return MessageItem(f"msg_{self._id}", status, [TextContent(self._text, self._logprobs)])

    def _reasoning(self, status: str) -> ReasoningItem:
        return ReasoningItem(f"rs_{self._id}", status, [ReasoningContent(self._thought)])

    def _response(self, status: str, totals: Totals | None) -> ResponseObject:
        """As far as it is."""
        options = self.options
        response = ResponseObject(
            id=self.head.id,
            created_at=self.head.created,
            status=status,
            model=self.head.model,
            previous_response_id=options.previous_response_id,
            instructions=options.instructions,
            output=tuple(self._done),
            top_p=options.top_p,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            top_logprobs=options.top_logprobs,
            temperature=options.temperature,
            reasoning=ShownReasoning(options.effort),
            max_output_tokens=options.max_output_tokens,
            store=options.store,
            service_tier=options.service_tier,
            metadata=options.metadata,
            safety_identifier=options.safety_identifier,
            prompt_cache_key=options.prompt_cache_key,
            user=options.user,
        )
        if options.text.format is not None:
            response.text = ShownText(options.text.format)
        if totals is not None:
            response.completed_at = self.head.created + _duration_s(totals)
            response.usage = to_usage(totals)
            response.timings = timings_of(totals)
            if status == "incomplete":
                response.incomplete_details = IncompleteDetails("max_output_tokens")
        return response


def _status(totals: Totals) -> str:
    is_cut = any(event.finish_reason is FinishReason.LENGTH for event in totals.finished)
    return "incomplete" if is_cut else "completed"


def _duration_s(totals: Totals) -> int:
    """Of the fleet's work, in whole seconds."""
    return round(max(map(_total_s, totals.finished), default=0.0))


def _total_s(event: Finished) -> float:
    timings = event.timings
    return timings.queue_s + timings.preprocess_s + timings.prefill_s + timings.decode_s


def to_usage(totals: Totals) -> ResponseUsage:
    """The `usage` object."""
    prompt, num_output = totals.prompt, totals.num_output_tokens
    return ResponseUsage(
        prompt.num_prompt_tokens,
        InputTokensDetails(prompt.num_cached_tokens, prompt.num_image_tokens),
        num_output,
        OutputTokensDetails(num_reasoning_tokens(totals)),
        prompt.num_prompt_tokens + num_output,
    )
