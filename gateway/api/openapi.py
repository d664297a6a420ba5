"""The OpenAPI document of the chat route, made from the very structs that decode it.

FastAPI knows nothing of them, as the route is a plain ASGI application; limits that an operator may change are
written in from the settings.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.api.chat.schemas import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ModelList,
    ModelObject,
)
from gateway.http.auth import PUBLIC_PATHS
from gateway.http.errors import ErrorBody
from shared.settings.limits import LimitSettings

CHAT_PATH = "/v1/chat/completions"
_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request cannot be served as it is; `param` names the field.",
    "401": "No API key, or an unknown one.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON in UTF-8.",
    "422": "An idempotency key was used for another request.",
    "429": "Too much at a time for this key, or too many wrong keys; `retry-after` says when.",
    "500": "The server failed.",
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
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _write_errors(path, operation["responses"])
    document["components"]["schemas"].pop("HTTPValidationError", None)
    document["components"]["schemas"].pop("ValidationError", None)
    document["paths"][CHAT_PATH] = {"post": _chat_operation(limits)}
    return document


def _write_errors(path: str, responses: dict[str, Any]) -> None:
    """What the door says to requests of FastAPI's routes, and not what FastAPI would say of bodies."""
    responses.pop("422", None)
    if path in PUBLIC_PATHS:
        return
    for status in ("401", "404", "429") if "{" in path else ("401", "429"):
        responses[status] = _error(_ERRORS[status])


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _schema("ErrorBody")}}}


def _chat_operation(limits: LimitSettings) -> dict[str, Any]:
    answers = {
        "application/json": {"schema": _schema("ChatCompletion")},
        "text/event-stream": {"schema": _schema("ChatCompletionChunk")},
    }
    errors = {status: _error(text) for status, text in _ERRORS.items()}
    request = {"application/json": {"schema": _schema("ChatCompletionRequest")}}
    body = (
        f"JSON in UTF-8 of at most {limits.max_body_bytes} bytes and {limits.max_commas} commas; of a key that "
        "comes twice in one object the last counts."
    )
    return {
        "operationId": "create_chat_completion",
        "summary": "Answer a conversation about text and images",
        "tags": ["chat"],
        "requestBody": {"description": body, "required": True, "content": request},
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
    properties["messages"]["description"] = (
        f"At most {limits.max_text_chars} characters of text and {limits.max_images} images together; a image: "
        f"PNG, JPEG or WebP of at most {limits.max_image_bytes} bytes, {limits.max_image_pixels} pixels, "
        f"{limits.max_image_side} on a side, sides that differ by at most {limits.max_image_aspect:g} times."
    )
    for name in IGNORED_FIELDS:
        if name in properties:
            properties[name]["description"] = "Accepted; changes nothing."
    for name, neutral in NEUTRAL_VALUES.items():
        properties[name] = {
            "enum": [None, *map(msgspec.json.decode, neutral)],
            "default": None,
            "description": "Unsupported.",
        }


def _branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The alternative of a union that has this JSON type."""
    return next(branch for branch in schema["anyOf"] if branch.get("type") == kind)
