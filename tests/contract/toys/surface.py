"""An API in one file: `POST /v1/echo`.

It returns the prompt as text, whole or streamed, and has its own error format.
"""

from collections.abc import Sequence

import msgspec

from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, NoOptions, Plan, Surface, Totals
from gateway.http.errors import ApiError
from gateway.http.exchange import RequestContext, sse_event
from gateway.media.loader import ImageSource
from shared.protocol import (
    ChatMessage,
    Finished,
    Generate,
    ImagePart,
    ModelCard,
    SamplingParams,
    TextPart,
    Tokens,
)


class EchoRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    prompt: str
    images: tuple[str, ...] = ()
    stream: bool = False
    user: str | None = None


class EchoText(msgspec.Struct):
    id: str
    text: str
    is_last: bool = False


class EchoProblem(msgspec.Struct):
    problem: str
    code: str | None
    field: str | None


class EchoAnswer:
    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        text = "".join(event.text for _, event in events if isinstance(event, Tokens))
        return msgspec.json.encode(EchoText(self.head.id, text, is_last=True))

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        frames: list[Frame] = []
        for _, event in events:
            if isinstance(event, Tokens):
                frames.append(self._frame(event.index + event.num_tokens, event.text))
            elif isinstance(event, Finished):
                frames.append(self._frame(event.usage.num_output_tokens + 1, "", is_last=True))
        return frames

    def _frame(self, position: int, text: str, *, is_last: bool = False) -> Frame:
        return position, sse_event(msgspec.json.encode(EchoText(self.head.id, text, is_last)))


class Echo(Surface):
    """Return the prompt."""

    name = "echo"
    path = "/v1/echo"
    tag = "echo"
    task = "generate"
    id_prefix = "echo-"
    request_type = EchoRequest
    answer_type = chunk_type = EchoText
    error_type = EchoProblem

    def plan(self, request: EchoRequest, context: RequestContext, card: ModelCard) -> Plan:
        images = [ImageSource(url, f"images.[{i}]") for i, url in enumerate(request.images)]
        parts = TextPart(request.prompt), *map(ImagePart, range(len(images)))
        task = Generate((ChatMessage("user", parts),), SamplingParams(temperature=0))
        return Plan([task], NoOptions(), images, is_streamed=request.stream)

    def answer(self, options: NoOptions, head: AnswerHead) -> EchoAnswer:
        return EchoAnswer(head)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        return error.status, msgspec.json.encode(
            EchoProblem(error.message, error.code, error.param)
        )

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        return sse_event(self.error(error)[1])
