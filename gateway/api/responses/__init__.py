"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec
from starlette.responses import Response

from gateway.api.answers import WholeAnswer, find_tokenized
from gateway.api.fields import UNSUPPORTED, Listing
from gateway.api.responses.answer import ResponseAnswer
from gateway.api.responses.schemas import (
    CallItem,
    CountRequest,
    InputTokens,
    ResponseEvent,
    ResponseFields,
    ResponseObject,
    ResponseRequest,
    ResponseText,
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
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, NotFound
from gateway.http.exchange import RequestContext
from shared.protocol import ChatMessage, ImagePart, ModelCard, TextPart
from shared.records.store import Record


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
