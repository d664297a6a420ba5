"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api.openapi import branch, describe_operation
from gateway.api.responses.answer import ResponseAnswer
from gateway.api.responses.schemas import (
    NEUTRAL_VALUES,
    CountRequest,
    InputTokens,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
)
from gateway.api.responses.translate import (
    ResponseOptions,
    check_supported,
    template_options,
    translate,
    translate_input,
)
from gateway.api.tokenize import made_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http import sse
from gateway.http.body import JsonBody
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError
from shared.protocol import Generate, ModelCard, SamplingParams, Tokenize
from shared.settings.limits import LimitSettings

_HINTS = {
    "role": "Supported roles are system, developer, user and assistant.",
    "type": "Supported items are message and reasoning, supported parts input_text, output_text "
    "and input_image.",
    "detail": "Supported values are auto, low, high and original.",
}
_BODY = JsonBody(ResponseRequest, hints=_HINTS)
_COUNT_BODY = JsonBody(CountRequest, hints=_HINTS)
_TRACED = ("temperature", "top_p", "top_k", "seed", "max_output_tokens")


class _Input(Surface):
    """What both have in common."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Workers know the input as messages."""
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        return error.status, error.body()


class Responses(_Input):
    """A message, whole or streamed."""

    name = "response"
    path = "/v1/responses"
    task = "generate"
    id_prefix = "resp_"
    options = ResponseOptions

    def read(self, body: bytes, context: RequestContext) -> ResponseRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _BODY.decode(body)
        check_supported(request)
        return request

    def plan(self, request: ResponseRequest, context: RequestContext, card: ModelCard) -> Plan:
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
        _write_neutral(properties)
        return operation, schemas


def _write_neutral(properties: dict[str, Any]) -> None:
    for name in NEUTRAL_VALUES.keys() & properties.keys():
        allowed = [None, *map(msgspec.json.decode, NEUTRAL_VALUES[name])]
        properties[name] = {"enum": allowed, "default": None, "description": "Unsupported."}


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
        request = _COUNT_BODY.decode(body)
        check_supported(request)
        return request

    def plan(self, request: CountRequest, context: RequestContext, card: ModelCard) -> Plan:
        """One task. Raises: InvalidRequest."""
        conversation = translate_input(request, self.limits)
        of = Generate(
            tuple(conversation.messages),
            SamplingParams(),
            template_options=template_options(request, card),
        )
        return Plan([Tokenize(of, with_ids=False)], CountOptions(), conversation.sources)

    def answer(self, options: CountOptions, head: AnswerHead) -> Answer:
        """An `InputTokens`."""
        return CountAnswer()

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
        _write_neutral(schemas["CountRequest"]["properties"])
        return operation, schemas


class CountAnswer:
    """An `InputTokens`; it is never streamed."""

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """The body."""
        return msgspec.json.encode(InputTokens(made_of(events).num_tokens))

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """There are none."""
        return []
