"""`POST /v1/chat/completions`: conversations about text and images, as OpenAI defines them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.api.chat.answer import ChatAnswer
from gateway.api.chat.schemas import (
    IGNORED_FIELDS,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from gateway.api.chat.translate import ChatOptions, translate
from gateway.api.fields import UNSUPPORTED, check_stream_options
from gateway.api.openapi import branch
from gateway.api.sampling import check_prompt_logprobs
from gateway.api.structured import StructuredFields
from gateway.calls.surface import Answer, AnswerHead, Plan, Surface
from gateway.http.exchange import RequestContext
from gateway.images.header import FORMAT_NAMES
from shared.protocol import ModelCard
from shared.settings.limits import LimitSettings


class ChatCompletions(Surface):
    """Answer a conversation about text and images."""

    name = "chat"
    path = "/v1/chat/completions"
    tag = "chat"
    task = "generate"
    id_prefix = "chatcmpl-"
    batchable = True
    options = ChatOptions
    request_type = ChatCompletionRequest
    answer_type = ChatCompletion
    chunk_type = ChatCompletionChunk
    traced = (
        "stream", "max_tokens", "n", "temperature", "top_p", "top_k", "seed", "frequency_penalty",
        "presence_penalty",
    )  # fmt: skip
    unsupported = UNSUPPORTED["/v1/chat/completions"]
    hints: ClassVar = {
        "role": "Supported roles are system, developer, user, assistant, tool and function.",
        "type": "Supported content parts are text, image_url, file (of text or of an image) and "
        "thinking: send a video as images of its frames, and audio as text.",
        "response_format.type": "Supported formats are text, json_object and json_schema.",
        "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
        "detail": "Supported values are auto, low, high and original.",
        "functions": "Send tools instead.",
        "function_call": "Send tools and tool_choice instead.",
    }

    def read(self, body: bytes, context: RequestContext) -> ChatCompletionRequest:
        request: ChatCompletionRequest = super().read(body, context)
        check_stream_options(request.stream_options, request.stream)
        check_prompt_logprobs(request, request.stream)
        return request

    def plan(
        self, request: ChatCompletionRequest, context: RequestContext, card: ModelCard
    ) -> Plan:
        return translate(request, context, card, self.limits)

    def answer(self, options: ChatOptions, head: AnswerHead) -> Answer:
        return ChatAnswer(options, head)

    def describe(self, request: ChatCompletionRequest) -> Mapping[str, Any]:
        max_tokens = request.max_completion_tokens or request.max_tokens
        return {**super().describe(request), "max_tokens": max_tokens}

    def write_limits(self, properties: dict[str, Any]) -> None:
        _write_limits(properties, self.limits)


def _write_limits(properties: dict[str, Any], limits: LimitSettings) -> None:
    properties["messages"]["maxItems"] = limits.max_messages
    for name, maximum in {
        "n": limits.max_choices,
        "max_tokens": limits.max_output_tokens,
        "max_completion_tokens": limits.max_output_tokens,
        "top_logprobs": limits.max_top_logprobs,
        "prompt_logprobs": limits.max_top_logprobs,
    }.items():
        branch(properties[name], "integer")["maximum"] = maximum
    text, texts = branch(properties["stop"], "string"), branch(properties["stop"], "array")
    for stop in (text, texts["items"]):
        stop.update(minLength=1, maxLength=limits.max_stop_chars)
    texts["maxItems"] = limits.max_stop_strings
    branch(properties["logit_bias"], "object")["maxProperties"] = limits.max_logit_bias
    properties["messages"]["description"] = (
        f"At most {limits.max_text_chars} characters of text and {limits.max_images} images "
        f"together. An image: {FORMAT_NAMES} of at most {limits.max_image_bytes} bytes, "
        f"{limits.max_image_pixels} pixels, {limits.max_image_side} on a side, and an aspect ratio "
        f"of at most {limits.max_image_aspect:g}:1."
    )
    for name in StructuredFields.__annotations__:
        properties[name]["description"] = (
            "What the answer must be; a request has one of these. A schema: at most "
            f"{limits.max_schema_bytes} bytes, {limits.max_schema_depth} levels and "
            f"{limits.max_schema_values} values; a pattern: {limits.max_pattern_chars} characters; "
            f"choices: {limits.max_choice_texts}; a grammar: {limits.max_grammar_bytes} bytes."
        )
    for name in IGNORED_FIELDS:
        if name in properties:
            properties[name]["description"] = "Accepted; changes nothing."
