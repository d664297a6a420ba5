"""The OpenAPI document: FastAPI's of the plain routes, and each surface's own part."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.api.fields import UNSUPPORTED
from gateway.api.models import ModelList, ModelObject
from gateway.calls.resume import STREAM_PATH
from gateway.calls.surface import Surface
from gateway.http.auth import PUBLIC_PATHS
from gateway.http.error_codes import ERROR_CODES
from gateway.http.errors import ErrorBody
from shared.settings.limits import LimitSettings

_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request cannot be served as it is; `param` names the field.",
    "401": "No API key, or an unknown one.",
    "403": "A page of another origin, which the operator does not name.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The charset is not UTF-8, or the body compressed.",
    "422": "An idempotency key was used for another request.",
    "429": "Too much at a time for this key, or too many wrong keys; `retry-after` says when.",
    "500": "The server failed.",
    "503": "Not now; `retry-after` says when.",
    "504": "The deadline has passed.",
}


def create_openapi(
    app: FastAPI, surfaces: Sequence[Surface], types: Sequence[type] = ()
) -> dict[str, Any]:
    """The whole document. `types`: structs that routes refer to."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(_schemas(ErrorBody, ModelList, ModelObject, *types))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _write_errors(path, operation["responses"])
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    for surface in surfaces:
        operation, components = surface.openapi()
        if refused := UNSUPPORTED.get(surface.path):
            operation["requestBody"]["description"] += f" Not supported: {', '.join(refused)}."
        document["paths"][surface.path] = {"post": operation}
        schemas.update(components)
    schemas["ErrorFields"]["properties"]["code"]["examples"] = list(ERROR_CODES)
    document["paths"][STREAM_PATH + "{id}"] = {"get": _describe_streams()}
    return document


def describe_operation(
    *,
    operation_id: str,
    summary: str,
    tag: str,
    request: type,
    answer: type,
    limits: LimitSettings,
    chunk: type | None = None,
    error: type = ErrorBody,
    statuses: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A surface's operation and schemas, from the structs of its wire.

    `chunk`: of a stream's events. `statuses`: what the API calls a status of the others.
    """
    renamed = statuses or {}
    answers = {"application/json": {"schema": _reference(answer)}}
    if chunk is not None:
        answers["text/event-stream"] = {"schema": _reference(chunk)}
    body = (
        f"JSON in UTF-8 of at most {limits.max_body_bytes} bytes and {limits.max_commas} commas; "
        "of a key that comes twice in one object the last counts. Unknown fields are ignored; the "
        "answer's `x-vlm-ignored` lists them."
    )
    operation = {
        "operationId": operation_id,
        "summary": summary,
        "tags": [tag],
        "requestBody": {
            "description": body,
            "required": True,
            "content": {"application/json": {"schema": _reference(request)}},
        },
        "responses": {
            "200": {"description": "The answer", "content": answers},
            **{
                renamed.get(status, status): _error(text, error) for status, text in _ERRORS.items()
            },
        },
    }
    types = [request, answer, error] if chunk is None else [request, answer, error, chunk]
    return operation, _schemas(*types)


def _describe_streams() -> dict[str, Any]:
    """The operation that goes on with a resumable stream, of whichever surface."""
    known = {status: _ERRORS[status] for status in ("400", "401", "429", "500", "503", "504")}
    errors = {**known, "404": "The stream does not exist, or ended more than a minute ago."}
    text = {"type": "string"}
    return {
        "operationId": "resume_stream",
        "summary": "Resume a stream",
        "tags": ["streams"],
        "parameters": [
            {"name": "id", "in": "path", "required": True, "schema": text},
            {
                "name": "last-event-id",
                "in": "header",
                "description": "Of the last event that was read; without it, all events come.",
                "schema": text,
            },
        ],
        "responses": {
            "200": {
                "description": "The rest of the stream, in the words of the API that began it",
                "content": {"text/event-stream": {"schema": text}},
            },
            **{status: _error(told, ErrorBody) for status, told in sorted(errors.items())},
        },
    }


def branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The alternative of a union that has this JSON type."""
    return next(branch for branch in schema["anyOf"] if branch.get("type") == kind)


def _schemas(*types: type) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    for schema in schemas.values():
        if schema.get("additionalProperties") is False:  # unknown fields are ignored
            del schema["additionalProperties"]
    return schemas


def _write_errors(path: str, responses: dict[str, Any]) -> None:
    """Errors of the middleware on FastAPI's routes, and not what FastAPI says of bodies."""
    responses.pop("422", None)
    if path in PUBLIC_PATHS:
        return
    for status in ("401", "404", "429") if "{" in path else ("401", "429"):
        responses[status] = _error(_ERRORS[status], ErrorBody)


def _error(text: str, type_: type) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _reference(type_)}}}


def _reference(type_: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=type_.__name__)}
