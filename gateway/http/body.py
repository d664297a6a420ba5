"""From the bytes of a request to a checked struct, or to an error that names the field.

The good path is one bounded read and one strict decode. Where that fails, the slow path finds the
place: `messages.[0].content.[1].image_url`.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Generic, TypeVar

import msgspec
from msgspec import inspect
from starlette.types import Receive

from gateway.http.admission import HeldBody
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError, InvalidRequest
from gateway.http.exchange import ClientGone
from shared.settings.limits import LimitSettings

T = TypeVar("T", bound=msgspec.Struct)


class _NamesModel(msgspec.Struct):
    """All that is read of a body that was refused."""

    model: str


_name_decoder = msgspec.json.Decoder(_NamesModel)

_AT = re.compile(r"(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_SANE_NAME = re.compile(r"\w{1,64}(\[\])?", re.ASCII)  #: with brackets: a query's list
JSON = b"application/json"
_ANY_KEY = "[...]"  #: msgspec's word for the client's own keys, which are not echoed


async def read_body(
    receive: Receive,
    context: RequestContext,
    held: HeldBody,
    limits: LimitSettings,
    *,
    timeout_s: float,
    max_commas: int = 0,
    media_type: bytes = JSON,
) -> bytes:
    """The request's body. `max_commas`: where not those of the limits; of JSON alone.

    Raises: InvalidRequest (too large, too slow), Overloaded, ClientGone.
    """
    _check_headers(context, limits.max_body_bytes, media_type)
    most = max_commas or limits.max_commas if media_type == JSON else limits.max_body_bytes
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_all(receive, held, limits, most)
    except TimeoutError:
        raise InvalidRequest(
            f"The body did not arrive within {timeout_s:g} s.", status=408, code="timeout"
        ) from None


async def _read_all(
    receive: Receive, held: HeldBody, limits: LimitSettings, max_commas: int
) -> bytes:
    body = bytearray()
    num_commas, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) + len(piece) > limits.max_body_bytes:
            raise _too_large(f"{limits.max_body_bytes} bytes")
        num_commas += piece.count(b",")
        if num_commas > max_commas:
            raise _too_large(f"{max_commas} commas, in its texts and between its values")
        held.add(len(piece))
        if not body and not has_more:
            return piece
        body += piece
    return bytes(body)


def _check_headers(context: RequestContext, max_bytes: int, expected: bytes) -> None:
    headers = context.headers
    media_type, _, charset = headers.get(b"content-type", b"").lower().partition(b";")
    is_named = media_type.strip() == expected
    if not is_named and expected != JSON:  # JSON needs no name: `curl -d` calls it a form
        raise InvalidRequest(
            f"Send the body with `Content-Type: {expected.decode()}`.",
            status=415,
            code="unsupported_media_type",
        )
    if (
        charset
        and is_named
        and expected == JSON
        and charset.replace(b'"', b"").strip() not in (b"charset=utf-8", b"charset=utf8")
    ):
        raise InvalidRequest(
            "The charset is not UTF-8: send the body as UTF-8.",
            status=415,
            code="unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequest(
            "Send the body without Content-Encoding.", status=415, code="unsupported_media_type"
        )
    length = headers.get(b"content-length")
    if length is None:
        return
    if b"transfer-encoding" in headers or not length.isdigit():
        raise InvalidRequest(
            "The body has no clear length: send one Content-Length, or chunks.", code="invalid_http"
        )
    if int(length[:20]) > max_bytes:
        raise _too_large(f"{max_bytes} bytes")


def _too_large(limit: str) -> ApiError:
    return InvalidRequest(
        f"The request body is too large: send at most {limit}.",
        status=413,
        code="request_too_large",
    )


class JsonBody(Generic[T]):
    """Reads bodies of one type.

    `hints`: what to say of a value outside a closed set, by the field's path or its last name; without
    one, the set itself.
    """

    def __init__(self, type_: type[T], hints: Mapping[str, str] | None = None) -> None:
        self._type = type_
        self._decoder = msgspec.json.Decoder(type_)
        self._hints = hints or {}

    def decode(self, body: bytes) -> T:
        """Read one. Raises: InvalidRequest that names the field."""
        try:
            if not body.isascii():
                body.decode()  # the decoder does not look into the fields that it skips
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise locate(str(error), self._hints, self._info) from None
        except RecursionError:
            raise InvalidRequest(
                "The body nests objects and arrays too deeply: send at most 100 levels.",
                code="invalid_json",
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = "The body is not valid JSON in UTF-8."
            raise InvalidRequest(message, code="invalid_json") from None

    @cached_property
    def _info(self) -> inspect.Type:
        return inspect.type_info(self._type)


def find_model_name(body: bytes) -> str:
    """The model that a refused body names; empty if it is no JSON or names none."""
    try:
        return _name_decoder.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def locate(problem: str, hints: Mapping[str, str], info: inspect.Type | None = None) -> ApiError:
    """The error that names the field of a message of msgspec's, and repeats no value.

    `info`: the type of the body.
    """
    match = _AT.fullmatch(problem)
    assert match is not None  # every part of the pattern is optional
    reason = match["reason"]
    path = (match["path"] or "").partition(_ANY_KEY)[0]
    path = path.replace("[", ".[") if ".[" not in path else path
    if unknown := _UNKNOWN.fullmatch(reason):
        return unsupported(_join(path, unknown["name"]))
    if missing := _MISSING.fullmatch(reason):
        param = _join(path, missing["name"])
        return InvalidRequest(
            f"Missing required field: {param}.", param=param, code="missing_field"
        )
    message = _explain(reason, path, hints, info)
    return InvalidRequest(message, param=path or None, code="invalid_value")


def unsupported(param: str) -> ApiError:
    """The error for a field that would change the answer, or that nobody knows."""
    return InvalidRequest(
        f"Unsupported parameter: {param}. Remove it.", param=param, code="unsupported_parameter"
    )


def _join(path: str, name: str) -> str:
    if not _SANE_NAME.fullmatch(name):
        name = "?"  # a client's own text is not echoed
    return f"{path}.{name}" if path else name


def _explain(reason: str, path: str, hints: Mapping[str, str], info: inspect.Type | None) -> str:
    subject = f"Invalid value for {path}" if path else "Invalid body"
    if reason.startswith("Invalid"):  # msgspec would quote the value
        hint = hints.get(path) or hints.get(path.rpartition(".")[2], "")
        if not hint and info is not None and (values := _values_at(info, path)):
            hint = f"Send {' or '.join(filter(None, (', '.join(values[:-1]), values[-1])))}."
        return f"{subject}. {hint}".rstrip()
    return f"{subject}: {reason[0].lower()}{reason[1:]}."


def _values_at(info: inspect.Type, path: str) -> list[str]:
    """The closed set of texts at that path of a body; empty: there is none."""
    types = [*_members(info)]
    for name in filter(None, path.split(".")):
        types = [
            member
            for type_ in types
            for inner in _inside(type_, name)
            for member in _members(inner)
        ]
    sets = (type_.values for type_ in types if isinstance(type_, inspect.LiteralType))
    enums = (
        [item.value for item in type_.cls] for type_ in types if isinstance(type_, inspect.EnumType)
    )
    return [value for values in (*sets, *enums) for value in values if isinstance(value, str)]


def _members(type_: inspect.Type) -> Iterator[inspect.Type]:
    """Itself, or those of a union; without what only describes it."""
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    yield from type_.types if isinstance(type_, inspect.UnionType) else (type_,)


def _inside(type_: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if isinstance(type_, inspect.StructType):
        yield from (field.type for field in type_.fields if field.encode_name == name)
    elif name.startswith("[") and isinstance(
        type_, inspect.ListType | inspect.VarTupleType | inspect.SetType
    ):
        yield type_.item_type
