"""`POST /tokenize` and `/detokenize`: the token ids that a model reads of a request, and back.

A conversation is rendered, its images loaded and expanded, as for an answer, by a worker.

Source: vLLM, "Tokenizer API".
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.answers import TokenizedAnswer
from gateway.api.chat.schemas import ChatCompletionRequest, ChatMessageParam
from gateway.api.chat.translate import translate
from gateway.api.conversation import check_text_chars
from gateway.api.fields import (
    UNSUPPORTED,
    ModelName,
    RequestStruct,
    TokenId,
    UserName,
    invalid,
)
from gateway.api.openapi import describe_operation
from gateway.api.tools import ToolField
from gateway.calls.surface import Answer, AnswerHead, Plan, Surface
from gateway.http.body import JsonBody
from gateway.http.context import RequestContext
from gateway.http.errors import InvalidRequest
from shared.protocol import (
    Generate,
    ModelCard,
    SamplingParams,
    TemplateOption,
    TextPart,
    Tokenize,
    Tokenized,
)
from shared.settings.limits import LimitSettings


class TokenizeRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt, or messages."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1)] | None = None
    #: Of a prompt: whether the tokenizer puts its own around it, such as BOS.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None  #: each token as the vocabulary spells it
    chat_template_kwargs: dict[str, TemplateOption] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    user: UserName | None = None
    tools: list[ToolField] | None = None


class TokenList(msgspec.Struct):
    """The answer: `count` tokens, those of images included."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None


class DetokenizeRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    model: ModelName
    tokens: list[TokenId]
    user: UserName | None = None


class DetokenizedPrompt(msgspec.Struct):
    """The answer."""

    prompt: str


class TokenizeOptions(msgspec.Struct, frozen=True):
    """What an answer must know."""

    max_model_len: int = 0
    with_strings: bool = False


class DetokenizeOptions(msgspec.Struct, frozen=True):
    """There are none."""


_TOKENIZE_BODY = JsonBody(TokenizeRequest, unsupported=UNSUPPORTED["/tokenize"])
_DETOKENIZE_BODY = JsonBody(DetokenizeRequest)


class Tokenizing(Surface):
    """A prompt or a conversation as token ids."""

    name = "tokenize"
    path = "/tokenize"
    task = "tokenize"
    id_prefix = "tok-"
    options = TokenizeOptions

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits

    def read(self, body: bytes, context: RequestContext) -> TokenizeRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _TOKENIZE_BODY.decode(body, context)
        if request.prompt is None and request.messages is None:
            message = "Missing required field: prompt, or messages."
            raise InvalidRequest(message, param="prompt", code="missing_field")
        if request.prompt is not None and request.messages is not None:
            raise invalid("messages", "send prompt or messages, not both")
        if request.messages is not None and request.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template adds them; leave it out")
        return request

    def plan(self, request: TokenizeRequest, context: RequestContext, card: ModelCard) -> Plan:
        """One task. Raises: InvalidRequest."""
        images = ()
        if request.prompt is not None:
            check_text_chars(len(request.prompt), "prompt", self.limits)
            of = Generate(
                (),
                SamplingParams(),
                prompt=TextPart(request.prompt),
                add_special_tokens=request.add_special_tokens is not False,
            )
        else:
            assert request.messages is not None
            plan = translate(
                ChatCompletionRequest(
                    model=request.model,
                    messages=request.messages,
                    tools=request.tools,
                    chat_template_kwargs=request.chat_template_kwargs,
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                ),
                context,
                card,
                self.limits,
            )
            [of], images = plan.tasks, plan.images
            assert isinstance(of, Generate)
        with_strings = bool(request.return_token_strs)
        return Plan(
            [Tokenize(of, with_strings=with_strings)],
            TokenizeOptions(card.max_model_len, with_strings),
            images,
        )

    def answer(self, options: TokenizeOptions, head: AnswerHead) -> Answer:
        """A `TokenList`."""

        def to_list(made: Tokenized) -> TokenList:
            strings = made.strings if options.with_strings else None
            return TokenList(made.num_tokens, options.max_model_len, made.token_ids, strings)

        return TokenizedAnswer(to_list)

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request."""
        return describe_operation(
            operation_id="tokenize",
            summary="Turn a prompt or a conversation into token ids",
            tag="tokenizer",
            request=TokenizeRequest,
            answer=TokenList,
            limits=self.limits,
        )


class Detokenizing(Surface):
    """Token ids as text."""

    name = "detokenize"
    path = "/detokenize"
    task = "tokenize"
    id_prefix = "detok-"
    options = DetokenizeOptions

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.max_commas = limits.max_input_commas

    def read(self, body: bytes, context: RequestContext) -> DetokenizeRequest:
        """The checked body. Raises: InvalidRequest."""
        return _DETOKENIZE_BODY.decode(body, context)

    def plan(self, request: DetokenizeRequest, context: RequestContext, card: ModelCard) -> Plan:
        """One task. Raises: InvalidRequest."""
        if len(request.tokens) > self.limits.max_input_tokens:
            raise invalid("tokens", f"send at most {self.limits.max_input_tokens}")
        return Plan([Tokenize(token_ids=tuple(request.tokens))], DetokenizeOptions())

    def answer(self, options: DetokenizeOptions, head: AnswerHead) -> Answer:
        """A `DetokenizedPrompt`."""
        return TokenizedAnswer(lambda made: DetokenizedPrompt(made.text))

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request."""
        return describe_operation(
            operation_id="detokenize",
            summary="Turn token ids into text",
            tag="tokenizer",
            request=DetokenizeRequest,
            answer=DetokenizedPrompt,
            limits=self.limits,
        )
