"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Response

from gateway.api.answers import TokenizedAnswer
from gateway.api.fields import UNSUPPORTED
from gateway.api.openapi import branch, describe_operation
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
from gateway.api.routes import Caller, Operation
from gateway.api.vector_stores import ListQuery
from gateway.calls.kept import IMAGE_ID, KeptAnswers
from gateway.calls.surface import Answer, AnswerHead, Plan, Surface
from gateway.http import sse
from gateway.http.body import JsonBody
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError, NotFound
from shared.protocol import (
    ChatMessage,
    Generate,
    ImagePart,
    ModelCard,
    SamplingParams,
    TextPart,
    Tokenize,
)
from shared.records.api import Record
from shared.settings.limits import LimitSettings

_HINTS = {
    "role": "Supported roles are system, developer, user and assistant.",
    "type": "Supported items are message, reasoning, function_call, custom_tool_call and their outputs, "
    "supported parts input_text, output_text and input_image.",
    "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
    "detail": "Supported values are auto, low, high and original.",
}
_BODY = JsonBody(ResponseRequest, _HINTS, UNSUPPORTED["/v1/responses"])
_COUNT_BODY = JsonBody(CountRequest, _HINTS, UNSUPPORTED["/v1/responses/input_tokens"])
_TRACED = ("temperature", "top_p", "top_k", "seed", "max_output_tokens")


class _Input(Surface):
    """What both have in common."""

    keeps_answers = True

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits

    def previous(self, request: ResponseFields) -> str | None:
        """The answer from which it goes on."""
        return request.previous_response_id

    def go_on(self, request: ResponseFields, kept: Record) -> Continued:
        """With the messages of that answer."""
        return Continued(request, read_kept(kept).messages, kept.images)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Workers know the input as messages."""
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        return error.status, error.body()


class Responses(_Input):
    """A message, whole or streamed."""

    name = "response"
    operation = "chat"
    path = "/v1/responses"
    task = "generate"
    id_prefix = "resp_"
    batchable = True
    options = ResponseOptions

    def read(self, body: bytes, context: RequestContext) -> ResponseRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _BODY.decode(body, context)
        return request

    def record(self, answer: Answer) -> bytes | None:
        """Its conversation, unless `store` is false."""
        assert isinstance(answer, ResponseAnswer)
        return answer.record()

    def plan(
        self, request: ResponseRequest | Continued, context: RequestContext, card: ModelCard
    ) -> Plan:
        """One task. Raises: InvalidRequest."""
        return translate(request, context, card, self.limits)

    def answer(self, options: ResponseOptions, head: AnswerHead) -> Answer:
        """A `ResponseObject` or its events."""
        return ResponseAnswer(options, head)

    def describe(self, request: ResponseRequest) -> Mapping[str, Any]:
        """What was asked for, in numbers."""
        numbers = {name: getattr(request, name) for name in _TRACED}
        return {"stream": bool(request.stream), **numbers}

    def numbered(self, frame: bytes, position: int) -> bytes:
        """Its last event alone has the id: whoever has less of it gets all again."""
        return sse.numbered_last(frame, position)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        """The response as it failed, and the error."""
        assert isinstance(answer, ResponseAnswer)
        return answer.failed(error)

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request, with the operator's limits."""
        operation, schemas = describe_operation(
            operation_id="create_response",
            summary="Answer text and images",
            tag="responses",
            request=ResponseRequest,
            answer=ResponseObject,
            chunk=ResponseEvent,
            limits=self.limits,
        )
        properties = schemas["ResponseRequest"]["properties"]
        branch(properties["max_output_tokens"], "integer")["maximum"] = (
            self.limits.max_output_tokens
        )
        branch(properties["top_logprobs"], "integer")["maximum"] = self.limits.max_top_logprobs
        return operation, schemas


class ResponseItemsQuery(ListQuery, frozen=True, kw_only=True):
    """Which part of a list."""

    include: str = ""


class InputItemText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A text of an input."""

    text: str


class InputItemImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image of an input; its bytes are not sent back."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str = "auto"


class ShownItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message of an input."""

    id: str
    role: str
    content: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class CallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What came of a call."""

    id: str
    call_id: str
    output: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class ResponseItemList(msgspec.Struct):
    """A page of the messages before an answer, those of earlier answers included."""

    data: list[ShownItem | CallItem | CallOutputItem]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedResponse(msgspec.Struct):
    """Says that an answer is forgotten."""

    id: str
    object: str = "response"
    deleted: bool = True


def read_kept(record: Record) -> KeptConversation:
    """Raises: InvalidRequest if another version kept it."""
    try:
        return _kept_decoder.decode(record.data)
    except msgspec.MsgspecError:
        raise _not_kept() from None


def _not_kept() -> NotFound:
    return NotFound("No such response is kept, or not any more.", code="response_not_found")


_kept_decoder = msgspec.json.Decoder(KeptConversation)


class ResponseRoutes:
    """What is done with answers that are kept."""

    def __init__(self, kept: KeptAnswers) -> None:
        self._kept = kept

    def operations(self) -> list[Operation]:
        path = "/v1/responses/{response_id}"
        return [
            Operation("GET", path, "retrieve_response", "Retrieve a response that is kept",
                      self.retrieve, ResponseObject, tag="responses"),
            Operation("DELETE", path, "delete_response", "Forget a response", self.delete,
                      DeletedResponse, tag="responses"),
            Operation("GET", path + "/input_items", "list_input_items", "List its input",
                      self.list_items, ResponseItemList, query=ResponseItemsQuery, tag="responses"),
        ]  # fmt: skip

    async def retrieve(self, caller: Caller) -> Response:
        """`GET /v1/responses/{id}`"""
        kept = await self._find(caller)
        return Response(bytes(kept.response), media_type="application/json")

    async def delete(self, caller: Caller) -> DeletedResponse:
        """`DELETE /v1/responses/{id}`"""
        name = caller.path["response_id"]
        if name.startswith(IMAGE_ID) or not await self._kept.delete(caller.context.tenant, name):
            raise _not_kept()
        return DeletedResponse(name)

    async def list_items(self, caller: Caller) -> ResponseItemList:
        """`GET /v1/responses/{id}/input_items`"""
        query = caller.read_query(ResponseItemsQuery)
        kept = await self._find(caller)
        digits = caller.path["response_id"].removeprefix("resp_")
        items = [
            item
            for index, message in enumerate(kept.input)
            for item in _show_message(message, f"{digits}_{index}")
        ]
        if query.order == "desc":
            items.reverse()
        names = [item.id for item in items]
        if query.after in names:
            items = items[names.index(query.after) + 1 :]
        data, has_more = items[: query.limit], len(items) > query.limit
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return ResponseItemList(data, has_more, *ends)

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


class CountOptions(msgspec.Struct, frozen=True):
    """There are none."""


class ResponseInputTokens(_Input):
    """How many tokens the input of a response has, images included."""

    name = "response_input_tokens"
    path = "/v1/responses/input_tokens"
    task = "tokenize"
    id_prefix = "count_"
    options = CountOptions

    def read(self, body: bytes, context: RequestContext) -> CountRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _COUNT_BODY.decode(body, context)
        return request

    def plan(
        self, request: CountRequest | Continued, context: RequestContext, card: ModelCard
    ) -> Plan:
        """One task. Raises: InvalidRequest."""
        kept = request if isinstance(request, Continued) else None
        asked = request.request if isinstance(request, Continued) else request
        conversation = translate_input(asked, self.limits, kept)
        of = Generate(
            tuple(conversation.messages),
            SamplingParams(),
            template_options=template_options(asked, card, context),
            ending=conversation.ending,
            tools=tools_of(asked, card, self.limits),
        )
        return Plan([Tokenize(of, with_ids=False)], CountOptions(), conversation.sources)

    def answer(self, options: CountOptions, head: AnswerHead) -> Answer:
        """An `InputTokens`."""
        return TokenizedAnswer(lambda made: InputTokens(made.num_tokens))

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request."""
        operation, schemas = describe_operation(
            operation_id="count_response_input_tokens",
            summary="Count the tokens of an input",
            tag="responses",
            request=CountRequest,
            answer=InputTokens,
            limits=self.limits,
        )
        return operation, schemas
