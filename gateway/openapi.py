"""The OpenAPI document of the chat route, made from the very structs that decode it.

FastAPI knows nothing of them, as the route is a plain ASGI application; limits that an operator may change are
written in from the settings.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.errors import ErrorBody
from gateway.schemas import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ModelList,
    ModelObject,
)
from shared.limits import LimitSettings

CHAT_PATH = "/v1/chat/completions"
_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request cannot be served as it is; `param` names the field.",
    "401": "No API key, or an unknown one.",
    "404": "The model does not exist.",
    "413": "The body is too large.",
    "415": "The body is not JSON in UTF-8.",
    "503": "Not now; `retry-after` says when.",
    "504": "The deadline has passed.",
}


def create_openapi(app: FastAPI, limits: LimitSettings) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    types = [
        ChatCompletionRequest, ChatCompletion, ChatCompletionChunk, ErrorBody, ModelList, ModelObject,
    ]  # fmt: skip
    _, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    _write_limits(components["ChatCompletionRequest"]["properties"], limits)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    document["paths"][CHAT_PATH] = {"post": _chat_operation()}
    return document


def _chat_operation() -> dict[str, Any]:
    answers = {
        "application/json": {"schema": _schema("ChatCompletion")},
        "text/event-stream": {"schema": _schema("ChatCompletionChunk")},
    }
    errors = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": _schema("ErrorBody")}},
        }
        for status, text in _ERRORS.items()
    }
    request = {"application/json": {"schema": _schema("ChatCompletionRequest")}}
    return {
        "operationId": "create_chat_completion",
        "summary": "Answer a conversation about text and pictures",
        "tags": ["chat"],
        "requestBody": {"required": True, "content": request},
        "responses": {"200": {"description": "The answer", "content": answers}, **errors},
    }


def _schema(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}


def _write_limits(properties: dict[str, Any], limits: LimitSettings) -> None:
    properties["messages"]["maxItems"] = limits.max_messages
    for name, maximum in {
        "n": limits.max_choices,
        "max_tokens": limits.max_output_tokens,
        "max_completion_tokens": limits.max_output_tokens,
        "top_logprobs": limits.max_top_logprobs,
    }.items():
        _branch(properties[name], "integer")["maximum"] = maximum
    text, texts = _branch(properties["stop"], "string"), _branch(properties["stop"], "array")
    for stop in (text, texts["items"]):
        stop.update(minLength=1, maxLength=limits.max_stop_chars)
    texts["maxItems"] = limits.max_stop_strings
    _branch(properties["logit_bias"], "object")["maxProperties"] = limits.max_logit_bias
    for name in IGNORED_FIELDS:
        if name in properties:
            properties[name]["description"] = "Accepted; changes nothing."
    for name, neutral in NEUTRAL_VALUES.items():
        properties[name] = {
            "enum": [None, *neutral],
            "default": None,
            "description": "Unsupported.",
        }


def _branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The alternative of a union that has this JSON type."""
    return next(branch for branch in schema["anyOf"] if branch.get("type") == kind)
