"""Builds the OpenAPI document from endpoints and the types of their requests and answers."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.routing import compile_path

from gateway.http.body import JSON
from gateway.http.endpoint import Caller, Endpoint, Resource, operation
from gateway.http.error_codes import ERROR_CODES
from shared.settings.limits import LimitSettings
from shared.version import package_version

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = "An OpenAI-compatible gateway to a fleet of workers for vision-language models."
_ERRORS = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or unknown.",
    "403": "The key lacks the required role, or a page of another origin sent the request.",
    "404": "The model, or the object named in the path, does not exist.",
    "408": "The body did not arrive in time.",
    "409": "The state of the object does not allow the request; `code` has the reason.",
    "413": "The body is too large, or a limit of the key is reached.",
    "415": "The media type or charset of the body is not supported, or the body is compressed.",
    "422": "An idempotency key was used for another request.",
    "429": "A rate limit is exceeded, or too many wrong keys were sent; see `retry-after`.",
    "500": "The server failed.",
    "503": "Overloaded or unavailable; see `retry-after`.",
    "504": "The deadline has passed.",
}
_OF_BODIES = frozenset({"408", "413", "415", "422"})
_TOKENS = ("integer", "maximum", "max_output_tokens")
_LOGPROBS = ("integer", "maximum", "max_top_logprobs")
_STOPS = ("array", "maxItems", "max_stop_strings")
#: The operator's limits, by field name: the JSON type to limit, the JSON Schema keyword and the setting.
_LIMITS: dict[str, tuple[str, str, str]] = {
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
    "max_output_tokens": _TOKENS,
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "n": ("integer", "maximum", "max_choices"),
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "logit_bias": ("object", "maxProperties", "max_logit_bias"),
    "messages": ("array", "maxItems", "max_messages"),
    "documents": ("array", "maxItems", "max_documents"),
}


class OpenApi(Resource):
    def __init__(self, endpoints: Iterable[Endpoint], limits: LimitSettings) -> None:
        self._endpoints = [*endpoints]
        self._limits = limits
        self._document = b""

    @operation("GET", "/openapi.json", is_documented=False)
    async def openapi(self, caller: Caller) -> Response:
        """Show this document."""
        self._document = self._document or msgspec.json.encode(
            create_openapi(self._endpoints, self._limits)
        )
        return Response(self._document, media_type="application/json")


def create_openapi(endpoints: Iterable[Endpoint], limits: LimitSettings) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for endpoint in endpoints:
        if endpoint.is_documented:
            _, path, _ = compile_path(endpoint.path)  # the path without its converters
            paths.setdefault(path, {})[endpoint.method.lower()] = describe(endpoint, path, limits)
            schemas |= schemas_of(endpoint, limits)
    meanings = (f"`{name}` ({status}): {text}" for name, (status, text) in ERROR_CODES.items())
    schemas["ErrorFields"]["properties"]["code"]["description"] = "\n".join(meanings)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vlm-fleet", "description": _DESCRIPTION, "version": package_version()},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def describe(endpoint: Endpoint, path: str, limits: LimitSettings) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    if endpoint.answer_type is not None:
        answers["application/json"] = {"schema": _reference(endpoint.answer_type)}
    if endpoint.chunk_type is not None:
        answers["text/event-stream"] = {"schema": _reference(endpoint.chunk_type)}
    if endpoint.answers_text:
        answers[endpoint.answers_text] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "responses": {str(endpoint.status): {"description": "The answer", "content": answers}},
    }
    if parameters := _parameters(endpoint, path):
        described["parameters"] = parameters
    has_body = endpoint.request_type is not None or endpoint.media_type != JSON.decode()
    if has_body:
        described["requestBody"] = _request_body(endpoint, limits)
    if endpoint.access == "public":
        return described
    error = {"application/json": {"schema": _reference(endpoint.error_type)}}
    for status, text in _ERRORS.items():
        if has_body or status not in _OF_BODIES:
            name = endpoint.statuses.get(status, status)
            described["responses"][name] = {"description": text, "content": error}
    return described


def _request_body(endpoint: Endpoint, limits: LimitSettings) -> dict[str, Any]:
    is_json = endpoint.media_type == JSON.decode()
    text = f"At most {limits.max_body_bytes} bytes."
    if is_json:
        text = (
            f"JSON in UTF-8 of at most {limits.max_body_bytes} bytes and {limits.max_commas} commas; "
            "if an object has a key twice, the last value is used. Unknown fields are ignored; "
            "the answer's header `x-vlm-ignored` lists them."
        )
    if endpoint.unsupported:
        text += f" Not supported: {', '.join(endpoint.unsupported)}."
    schema: dict[str, Any] = {"type": "string", "format": "binary"}
    if endpoint.request_type is not None:
        schema = _reference(endpoint.request_type)
    content = {endpoint.media_type: {"schema": schema}}
    if endpoint.form_type:
        content[endpoint.form_type] = {"schema": schema}
    return {"description": text, "required": True, "content": content}


def _parameters(endpoint: Endpoint, path: str) -> list[dict[str, Any]]:
    text = {"type": "string"}
    names = [piece[1:].partition("}")[0] for piece in path.split("/") if piece.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if endpoint.query_type is not None:
        schema = msgspec.json.schema(endpoint.query_type)
        [properties] = [each["properties"] for each in schema["$defs"].values()]
        found += [{"name": n, "in": "query", "schema": kind} for n, kind in properties.items()]
    found += [
        {"name": name, "in": "header", "description": described, "schema": text}
        for name, described in endpoint.headers.items()
    ]
    return found


def schemas_of(endpoint: Endpoint, limits: LimitSettings) -> dict[str, Any]:
    """The schemas that an endpoint refers to, by name, with the operator's limits."""
    types: list[type[Struct]] = [endpoint.error_type]
    types += filter(None, (endpoint.request_type, endpoint.answer_type, endpoint.chunk_type))
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:  # unknown fields are ignored
            del schema["additionalProperties"]
    if endpoint.request_type is not None:
        properties = schemas[endpoint.request_type.__name__].get("properties", {})
        for name in properties.keys() & _LIMITS.keys():
            _write_limit(properties[name], *_LIMITS[name], limits)
        endpoint.describe_fields(properties)
    return schemas


def _write_limit(
    schema: dict[str, Any], kind: str, keyword: str, limit: str, limits: LimitSettings
) -> None:
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind:
            branch.setdefault(keyword, getattr(limits, limit))
        text = branch.get("items", branch)
        if limit == _STOPS[2] and text.get("type") == "string":
            text.update(minLength=1, maxLength=limits.max_stop_chars)


def _reference(type_: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=type_.__name__)}
