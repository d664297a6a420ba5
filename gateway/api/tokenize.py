"""`POST /tokenize` and `/detokenize`: convert a prompt or a conversation to token ids, and token ids to text.

A worker applies the chat template and expands images to tokens, exactly as it does for a chat completion.

Source: vLLM, "Tokenizer API".
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api.answers import WholeAnswer, find_tokenized
from gateway.api.completions import ChatCompletionRequest, ChatMessageParam, translate
from gateway.api.fields import (
    UNSUPPORTED,
    ModelName,
    RequestStruct,
    TokenId,
    UserName,
    check_chars,
    check_most,
    copy_fields,
    doc,
    invalid,
)
from gateway.api.generation import ToolField
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import RequestContext
from shared.protocol import Generate, ModelCard, SamplingParams, TemplateOption, TextPart, Tokenize


class TokenizeRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt, or messages."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1)] | None = None
    #: Whether the tokenizer adds special tokens, such as BOS, to a prompt.
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[
        bool | None, doc("Also return the tokens as strings, as the vocabulary spells them.")
    ] = None
    chat_template_kwargs: dict[str, TemplateOption] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    user: UserName | None = None
    tools: list[ToolField] | None = None


class VideoFrames(msgspec.Struct):
    used: int
    total: int


class TokenList(msgspec.Struct):
    """Token ids of the prompt, and their number. Both include image tokens."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None
    #: For each video, the number of frames that the model sees and the number of all frames.
    frames: list[VideoFrames] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(RequestStruct, frozen=True, kw_only=True):
    model: ModelName
    tokens: list[TokenId]
    user: UserName | None = None


class DetokenizedPrompt(msgspec.Struct):
    prompt: str


class TokenizeOptions(msgspec.Struct, frozen=True):
    max_model_len: int = 0
    with_strings: bool = False


class Tokenization(Surface):
    """Tokenize a prompt or a conversation."""

    name = "tokenize"
    path = "/tokenize"
    tag = "tokenizer"
    task = "tokenize"
    id_prefix = "tok-"
    options = TokenizeOptions
    request_type = TokenizeRequest
    answer_type = TokenList
    unsupported = UNSUPPORTED["/tokenize"]

    def plan(self, request: TokenizeRequest, context: RequestContext, card: ModelCard) -> Plan:
        if request.prompt is None and request.messages is None:
            message = "Missing required field: send prompt or messages."
            raise InvalidRequest(message, param="prompt", code="missing_field")
        if request.prompt is not None and request.messages is not None:
            raise invalid("messages", "send prompt or messages, not both")
        if request.messages is not None and request.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template adds these tokens; leave it out")
        images = ()
        if request.prompt is not None:
            num_chars, most = len(request.prompt), self.limits.max_text_chars
            check_chars(num_chars, most, "prompt", "context_length_exceeded")
            of = Generate(
                (),
                SamplingParams(),
                prompt=TextPart(request.prompt),
                add_special_tokens=request.add_special_tokens is not False,
            )
        else:
            assert request.messages is not None
            chat = copy_fields(request, ChatCompletionRequest)
            plan = translate(chat, context, card, self.limits)
            [of], images = plan.tasks, plan.images
            assert isinstance(of, Generate)
        with_strings = bool(request.return_token_strs)
        return Plan(
            [Tokenize(of, with_strings=with_strings)],
            TokenizeOptions(card.max_model_len, with_strings),
            images,
        )

    def answer(self, options: TokenizeOptions, head: AnswerHead) -> Answer:
        def to_list(events: Sequence[ChoiceEvent], _: Totals) -> TokenList:
            made = find_tokenized(events)
            strings = made.strings if options.with_strings else None
            frames = [VideoFrames(*counts) for counts in made.frames] or msgspec.UNSET
            return TokenList(
                made.num_tokens, options.max_model_len, made.token_ids, strings, frames
            )

        return WholeAnswer(to_list)


class Detokenization(Surface):
    """Decode token ids to text."""

    name = "detokenize"
    path = "/detokenize"
    tag = "tokenizer"
    task = "tokenize"
    id_prefix = "detok-"
    request_type = DetokenizeRequest
    answer_type = DetokenizedPrompt
    commas = "max_input_commas"

    def plan(self, request: DetokenizeRequest, context: RequestContext, card: ModelCard) -> Plan:
        check_most("tokens", len(request.tokens), self.limits.max_input_tokens)
        return Plan([Tokenize(token_ids=tuple(request.tokens))], NoOptions())

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(lambda events, _: DetokenizedPrompt(find_tokenized(events).text))
