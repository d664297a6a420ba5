"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from gateway.api.answers import (
    Addition,
    Block,
    BlockStream,
    WholeAnswer,
    encode,
    find_tokenized,
    num_reasoning_tokens,
)
from gateway.api.chat import to_logprobs
from gateway.api.chat.schemas import ChatLogprob
from gateway.api.fields import UNSUPPORTED, Listing, timings_of
from gateway.api.responses.schemas import (
    CallItem,
    CountRequest,
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputTokensDetails,
    ReasoningContent,
    ReasoningItem,
    ResponseError,
    ResponseEvent,
    ResponseFields,
    ResponseObject,
    ResponseRequest,
    ResponseText,
    ResponseUsage,
)
from gateway.api.responses.translate import (
    Continued,
    KeptConversation,
    ResponseOptions,
    template_options,
    tools_of,
    translate,
    translate_input,
)
from gateway.api.vector_stores import Deleted, ListQuery
from gateway.calls.kept import IMAGE_ID, KeptAnswers
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, NotFound
from gateway.http.exchange import SSE_DONE, RequestContext, sse_event
from shared.protocol import (
    ChatMessage,
    FinishReason,
    ImagePart,
    ModelCard,
    OutputLogprob,
    TextPart,
    Tokens,
    ToolCall,
    Usage,
)
from shared.records.store import Record

_SERVER_ERROR = "server_error"
#: Names of a block's text in events.
_KINDS = {
    "thought": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


class _Input(Surface):
    tag = "responses"
    keeps_answers = True
    hints: ClassVar = {
        "role": "Supported roles are system, developer, user and assistant.",
        "type": "Supported items are message, reasoning, function_call, custom_tool_call and their outputs, "
        "supported parts input_text, output_text and input_image.",
        "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
        "detail": "Supported values are auto, low, high and original.",
    }

    def previous(self, request: ResponseFields) -> str | None:
        return request.previous_response_id

    def go_on(self, request: ResponseFields, kept: Record) -> Continued:
        return Continued(request, read_kept(kept).messages, kept.images)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Workers' errors name the input `messages`."""
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        return error.status, error.body()


class Responses(_Input):
    """Answer text and images."""

    name = "response"
    operation = "chat"
    path = "/v1/responses"
    task = "generate"
    id_prefix = "resp_"
    batchable = True
    options = ResponseOptions
    request_type = ResponseRequest
    answer_type = ResponseObject
    chunk_type = ResponseEvent
    traced = ("stream", "temperature", "top_p", "top_k", "seed", "max_output_tokens")
    unsupported = UNSUPPORTED["/v1/responses"]

    def record(self, answer: Answer) -> bytes | None:
        assert isinstance(answer, ResponseAnswer)
        return answer.record()

    def plan(
        self, request: ResponseRequest | Continued, context: RequestContext, card: ModelCard
    ) -> Plan:
        return translate(request, context, card, self.limits)

    def answer(self, options: ResponseOptions, head: AnswerHead) -> Answer:
        return ResponseAnswer(options, head)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        assert isinstance(answer, ResponseAnswer)
        return answer.failed(error)


class ResponseItemsQuery(ListQuery, frozen=True, kw_only=True):
    include: str = ""


class InputItemText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class InputItemImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image of the input, without its bytes."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str = "auto"


class ShownItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: str
    content: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class CallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class ResponseItemList(Listing[ShownItem | CallItem | CallOutputItem]):
    """A page of the input of an answer, which includes earlier answers of the conversation."""


def read_kept(record: Record) -> KeptConversation:
    """Raises: NotFound if another version of vlm-fleet stored the record."""
    try:
        return _kept_decoder.decode(record.data)
    except msgspec.MsgspecError:
        raise _not_kept() from None


def _not_kept() -> NotFound:
    return NotFound("There is no such response, or it has expired.", code="response_not_found")


_kept_decoder = msgspec.json.Decoder(KeptConversation)
_PATH = "/v1/responses/{response_id}"


class StoredResponses(Resource):
    tag = "responses"

    def __init__(self, kept: KeptAnswers) -> None:
        self._kept = kept

    @operation("GET", _PATH, answer_type=ResponseObject)
    async def retrieve_response(self, caller: Caller) -> Response:
        """Retrieve a stored response."""
        kept = await self._find(caller)
        return Response(bytes(kept.response), media_type="application/json")

    @operation("DELETE", _PATH)
    async def delete_response(self, caller: Caller) -> Deleted:
        """Delete a stored response."""
        name = caller.path["response_id"]
        if name.startswith(IMAGE_ID) or not await self._kept.delete(caller.context.tenant, name):
            raise _not_kept()
        return Deleted(name, "response")

    @operation("GET", _PATH + "/input_items")
    async def list_input_items(self, caller: Caller, query: ResponseItemsQuery) -> ResponseItemList:
        """List the input of a stored response."""
        kept = await self._find(caller)
        digits = caller.path["response_id"].removeprefix("resp_")
        items = [
            item
            for index, message in enumerate(kept.messages[:-1])
            for item in _show_message(message, f"{digits}_{index}")
        ]
        if query.order == "desc":
            items.reverse()
        names = [item.id for item in items]
        if query.after in names:
            items = items[names.index(query.after) + 1 :]
        return ResponseItemList.of(items[: query.limit], len(items) > query.limit)

    async def _find(self, caller: Caller) -> KeptConversation:
        """Raises: NotFound."""
        record = await self._kept.get(caller.context.tenant, caller.path["response_id"])
        if record is None:
            raise _not_kept()
        return read_kept(record)


def _show_message(
    message: ChatMessage, name: str
) -> Iterator[ShownItem | CallItem | CallOutputItem]:
    parts = [_show(message, part) for part in message.parts]
    if message.role == "tool":
        yield CallOutputItem(f"fco_{name}", message.tool_call_id, parts)
        return
    if not message.tool_calls or any(part != TextPart("") for part in message.parts):
        yield ShownItem(f"msg_{name}", message.role, parts)
    for place, call in enumerate(message.tool_calls):
        yield CallItem(f"fc_{name}_{place}", "completed", call.id, call.name, call.arguments)


def _show(
    message: ChatMessage, part: TextPart | ImagePart
) -> InputItemText | InputItemImage | ResponseText:
    if isinstance(part, ImagePart):
        return InputItemImage()
    return ResponseText(part.text) if message.role == "assistant" else InputItemText(part.text)


class ResponseInputTokens(_Input):
    """Count the tokens of an input, images included."""

    name = "response_input_tokens"
    path = "/v1/responses/input_tokens"
    task = "tokenize"
    id_prefix = "count_"
    request_type = CountRequest
    answer_type = InputTokens
    unsupported = UNSUPPORTED["/v1/responses/input_tokens"]

    def plan(
        self, request: CountRequest | Continued, context: RequestContext, card: ModelCard
    ) -> Plan:
        kept = request if isinstance(request, Continued) else None
        asked = request.request if isinstance(request, Continued) else request
        conversation = translate_input(asked, self.limits, kept)
        options = template_options(asked, card, context)
        return conversation.count(options, tools_of(asked, card, self.limits))

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(lambda events, _: InputTokens(find_tokenized(events).num_tokens))


class ResponseAnswer(BlockStream):
    """Encodes the events of a call as a `ResponseObject`, or as the events of a stream.

    Order of a stream: `created`, `in_progress`; for each item `output_item.added`, `content_part.added`, deltas, `done` of
    the text and of the part, `output_item.done`; then `completed` or `incomplete`. Reasoning is an item before the message.
    Each function call is an item after the message, whose deltas are parts of the arguments.

    Each token takes one sequence number, also if tokens are sent together. So a resumed stream, which groups tokens
    differently, continues with the same numbers.

    Source: OpenAI API reference, "Streaming events" of Responses.
    """

    def __init__(self, options: ResponseOptions, head: AnswerHead) -> None:
        super().__init__(head)
        self.options = options
        self._id = head.id.removeprefix("resp_")
        self._sequence = 0
        self._done: list[OutputItem] = []
        self._final: ResponseObject | None = None

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        self._blocks.add_all(events)
        status, last = _status(totals), self._blocks.complete()
        self._done = [
            self._item(block, status if block is last else "completed")
            for block in self._blocks.all
        ]
        self._final = self._response(status, totals)
        return encode(self._final)

    def record(self) -> bytes | None:
        """The conversation with the complete answer, to be stored. None: it is not stored."""
        if self._final is None or not self.options.messages:
            return None
        blocks = self._blocks
        parts = (TextPart(blocks.text),)
        calls = tuple(ToolCall(call.call_id, call.name, call.text) for call in blocks.calls)
        answer = ChatMessage("assistant", parts, blocks.thought, calls)
        messages = (*self.options.messages, answer)
        return encode(KeptConversation(messages, msgspec.Raw(encode(self._final))))

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""
        response = self._response("failed", None)
        response.error = ResponseError(_SERVER_ERROR, error.message)
        failed = self._event("response.failed", response=response)
        return failed + self._event(
            "error", code=error.code or _SERVER_ERROR, message=error.message, param=error.param
        )

    def begun(self, prompt: Usage) -> bytes:
        response = self._response("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def grown(self, event: Tokens, added: Sequence[Addition]) -> bytes:
        data, num_deltas = b"", 0
        for block, text, logprobs in added:
            data += self.grow(block)
            if text or logprobs:
                num_deltas += 1
                shown = self._logprobs(logprobs) if block.kind == "text" else None
                type_ = f"response.{_KINDS[block.kind]}.delta"
                data += self._event(type_, **self._place(block), delta=text, logprobs=shown)
        self._sequence += max(0, event.num_tokens - num_deltas)
        return data

    def opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress", is_empty=True)
        data = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return data
        part = self._part(block, is_empty=True)
        return data + self._event("response.content_part.added", **self._place(block), part=part)

    def closed(self, block: Block, totals: Totals | None) -> bytes:
        item = self._item(block, "completed" if totals is None else _status(totals))
        place, type_ = self._place(block), f"response.{_KINDS[block.kind]}.done"
        if isinstance(item, CallItem):
            data = self._event(type_, **place, name=item.name, arguments=item.arguments)
        else:
            part = self._part(block)
            logprobs = part.logprobs if isinstance(part, ResponseText) else None
            data = self._event(type_, **place, text=part.text, logprobs=logprobs)
            data += self._event("response.content_part.done", **place, part=part)
        data += self._event("response.output_item.done", output_index=block.index, item=item)
        self._done.append(item)
        return data

    def ended(self, totals: Totals) -> bytes:
        status = _status(totals)
        self._final = self._response(status, totals)
        return self._event(f"response.{status}", response=self._final) + SSE_DONE

    def _item_id(self, block: Block) -> str:
        if block.kind == "call":
            return f"fc_{self._id}_{block.index}"
        return f"{'rs' if block.kind == 'thought' else 'msg'}_{self._id}"

    def _place(self, block: Block) -> dict[str, object]:
        """The fields of events that identify the block."""
        place: dict[str, object] = {
            "item_id": self._item_id(block),
            "output_index": block.index,
        }
        return place if block.kind == "call" else place | {"content_index": 0}

    def _event(self, type_: str, **fields: object) -> bytes:
        event = ResponseEvent(type=type_, sequence_number=self._sequence, **fields)  # type: ignore[arg-type]
        self._sequence += 1
        return sse_event(encode(event), type_.encode())

    def _item(self, block: Block, status: str, *, is_empty: bool = False) -> OutputItem:
        """A block as an item. `is_empty`: without content, as when the item is added."""
        name = self._item_id(block)
        if block.kind == "call":
            arguments = "" if is_empty else block.text
            return CallItem(name, status, block.call_id, block.name, arguments)
        content: list[Any] = [] if is_empty else [self._part(block)]
        kind = MessageItem if block.kind == "text" else ReasoningItem
        return kind(name, status, content)

    def _part(self, block: Block, *, is_empty: bool = False) -> ResponseText | ReasoningContent:
        text = "" if is_empty else block.text
        if block.kind == "thought":
            return ReasoningContent(text)
        return ResponseText(text, () if is_empty else self._logprobs(block.logprobs))

    def _logprobs(self, logprobs: Sequence[OutputLogprob]) -> list[ChatLogprob]:
        return to_logprobs(logprobs) if self.options.with_logprobs else []

    def _response(self, status: str, totals: Totals | None) -> ResponseObject:
        response = replace(
            self.options.response,
            id=self.head.id,
            created_at=self.head.created,
            status=status,
            model=self.head.model,
            output=tuple(self._done),
        )
        if totals is not None:
            worked_s = max([event.timings.total_s for event in totals.finished], default=0.0)
            response.completed_at = self.head.created + round(worked_s)
            response.usage = to_usage(totals)
            response.timings = timings_of(totals)
            if status == "incomplete":
                response.incomplete_details = IncompleteDetails("max_output_tokens")
        return response


def _status(totals: Totals) -> str:
    is_cut = any(event.finish_reason is FinishReason.LENGTH for event in totals.finished)
    return "incomplete" if is_cut else "completed"


def to_usage(totals: Totals) -> ResponseUsage:
    prompt, num_output = totals.prompt, totals.num_output_tokens
    return ResponseUsage(
        prompt.num_prompt_tokens,
        InputTokensDetails(
            prompt.num_cached_tokens, prompt.num_image_tokens, prompt.num_audio_tokens
        ),
        num_output,
        OutputTokensDetails(num_reasoning_tokens(totals)),
        prompt.num_prompt_tokens + num_output,
    )
