"""Admits requests, and decodes their bodies to structs, with errors that name the field.

The fast path is one bounded read and one strict decode. If the decode fails, the slow path removes unknown fields and
decodes again. Its errors name the field, such as `messages.[0].content.[1].image_url`.

An unknown field that would change the answer is refused, unless its value is null or a no-op. By default, all other
unknown fields are removed, and listed in `x-vlm-ignored` and the log.
"""

import asyncio
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, inspect
from starlette.types import Message, Receive

from gateway.http.errors import ClientGone, InvalidRequest, Overloaded, missing, wrong_media_type
from gateway.http.exchange import Exchange, RequestContext, clean_name
from shared.protocol import is_deeper
from shared.settings.limits import LimitSettings

#: Unsupported field (or `object.field`) -> its no-op values, which are accepted. null is always accepted.
Unsupported = Mapping[str, tuple[Any, ...]]

_MAX_NO_OP_BYTES = 256  #: larger values of unsupported fields are refused without decoding them
_MAX_LOGGED_NAMES = 100
_LOG_INTERVAL_S = 60.0
_SANE_NAME = re.compile(r"\w{1,64}(\[\])?", re.ASCII)  #: `name[]` is a list in a query string
_WHOLE_FLOAT = re.compile(rb"(-?\d{1,19})\.0+")
_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])
_NULL = b"null"
_ARRAYS = (inspect.ListType, inspect.VarTupleType)
_INNER = (inspect.StructType, inspect.ListType)  #: types of array items that are cleaned
_NULLABLE = (inspect.NoneType, inspect.RawType, inspect.AnyType)
_MAX_CLEANED = 50_000  #: maximum fields of a body that is cleaned, because cleaning is slow

logger = logging.getLogger(__name__)


class _Shape:
    """Properties of a type for `Cleaner`. They are computed once, because a body may have many values of the type."""

    def __init__(self, type_: inspect.Type) -> None:
        kinds = list(members_of(type_))
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
        self.structs = [(each, {f.encode_name: f for f in each.fields}) for each in structs]
        self.by_tag = {msgspec.json.encode(each[0].tag): each for each in self.structs}
        self.tag_field = structs[0].tag_field or "" if structs else ""
        items = [kind.item_type for kind in kinds if isinstance(kind, _ARRAYS)][:1]
        self.items = [i for i in items if any(isinstance(k, _INNER) for k in members_of(i))]
        self.takes_null = any(isinstance(kind, _NULLABLE) for kind in kinds)
        self.is_int = any(isinstance(kind, inspect.IntType) for kind in kinds)
        self.is_int &= not any(isinstance(kind, inspect.FloatType) for kind in kinds)


@dataclass(slots=True)
class Cleaner:
    """Removes unknown and null fields from one body. `_shapes`: cached shapes by `id` of the type."""

    _context: RequestContext
    _unsupported: Unsupported
    _hints: Mapping[str, str]
    _shapes: dict[int, _Shape]
    _num_members: int = 0

    def clean(self, body: bytes, type_: inspect.Type) -> Raw:
        """Remove unknown fields and redundant nulls, and replace 1.0 by 1 in integer fields. Raises: InvalidRequest."""
        cleaned = self._clean(Raw(body.strip()), self._shape(type_), "", "")
        if self._context.ignored:
            _log(self._context.ignored)
        return cleaned

    def _shape(self, type_: inspect.Type) -> _Shape:
        if (shape := self._shapes.get(id(type_))) is None:
            shape = self._shapes[id(type_)] = _Shape(type_)
        return shape

    def _clean(self, value: Raw, shape: _Shape, path: str, place: str) -> Raw:
        """`path`: the names of the fields; `place`: names and indexes, for errors."""
        start = bytes(memoryview(value)[:1])
        if start == b"{" and shape.structs:
            return self._clean_object(value, shape, path, place)
        if start != b"[" or not shape.items:
            return value
        items, inner = _items.decode(value), self._shape(shape.items[0])
        cleaned = [
            self._clean(item, inner, path, f"{place}.[{index}]") for index, item in enumerate(items)
        ]
        is_same = all(old is new for old, new in zip(items, cleaned, strict=True))
        return value if is_same else Raw(msgspec.json.encode(cleaned))

    def _clean_object(self, value: Raw, shape: _Shape, path: str, place: str) -> Raw:
        members = _members.decode(value)
        self._num_members += len(members)
        if self._num_members > _MAX_CLEANED:
            raise _too_large(f"{_MAX_CLEANED} fields in a body with unknown or null fields")
        found = shape.structs[0]
        if len(shape.structs) > 1:
            found = shape.by_tag.get(bytes(members.get(shape.tag_field, b"")))
        if found is None:
            return value
        struct, fields = found
        cleaned: dict[str, Raw] = {}
        for name, member in members.items():
            field = fields.get(name)
            if field is not None:
                inner = self._shape(field.type)
                is_null = bytes(memoryview(member)[:5]) == _NULL
                if field.required or inner.takes_null or not is_null:  # null means the default
                    cleaned[name] = _whole(member) if inner.is_int else member
            elif name == struct.tag_field or not struct.forbid_unknown_fields:
                cleaned[name] = member
            else:
                self._drop(name, member, struct.cls, path, place)
        for name, member in cleaned.items():
            if name in fields:
                inner = self._shape(fields[name].type)
                if inner.structs or inner.items:
                    way = f"{path}.{name}" if path else name
                    cleaned[name] = self._clean(member, inner, way, join(place, name))
        is_same = len(cleaned) == len(members) and all(
            cleaned[name] is member for name, member in members.items()
        )
        return value if is_same else Raw(msgspec.json.encode(cleaned))

    def _drop(self, name: str, value: Raw, owner: type, path: str, place: str) -> None:
        """Ignore an unknown field, or refuse it. Raises: InvalidRequest if it is refused."""
        known = f"{path}.{name}" if path else name
        if known in self._unsupported:
            if not _is_no_op(value, self._unsupported[known]):
                hint = self._hints.get(known, "")
                raise unsupported(join(place, name), hint)
        elif self._context.refuses_unknown_fields:
            if not getattr(owner, "is_lenient", False):
                raise unsupported(join(place, name))
        elif bytes(memoryview(value)[:5]) != _NULL:
            self._context.ignore(known)


def _whole(value: Raw) -> Raw:
    """Replace 1.0 by 1, for an integer field."""
    match = _WHOLE_FLOAT.fullmatch(bytes(memoryview(value)[:64]))
    return Raw(match[1]) if match else value


def _is_no_op(value: Raw, no_ops: tuple[Any, ...]) -> bool:
    if len(memoryview(value)) > _MAX_NO_OP_BYTES:
        return False
    try:
        given = msgspec.json.decode(value)
    except msgspec.DecodeError:  # such as a number that is out of range
        return False
    return given is None or any(
        given == no_op and isinstance(given, bool) == isinstance(no_op, bool) for no_op in no_ops
    )


_log_state: dict[str, Any] = {"names": {}, "logged_at": -_LOG_INTERVAL_S}


def _log(names: list[str]) -> None:
    """Log ignored names, at most one line per minute. A line has all names since the previous line."""
    known: dict[str, None] = _log_state["names"]
    for name in names:
        if len(known) < _MAX_LOGGED_NAMES:
            known[clean_name(name)] = None
    now = time.monotonic()
    if now - _log_state["logged_at"] >= _LOG_INTERVAL_S:
        logger.info("ignored unknown fields of requests: %s", ", ".join(known))
        _log_state.update(names={}, logged_at=now)


def unsupported(param: str, hint: str = "") -> InvalidRequest:
    message = f"Unsupported parameter: {param}. {hint or 'Remove it.'}"
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def join(path: str, name: str) -> str:
    if not _SANE_NAME.fullmatch(name):
        name = "?"
    return f"{path}.{name}" if path else name


def members_of(type_: inspect.Type) -> Iterator[inspect.Type]:
    """The type itself, or the members of a union, without metadata."""
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        for member in type_.types:
            yield from members_of(member)
    else:
        yield type_


# Admission: open requests, memory for bodies, and draining.

_WINDOW_S = 10.0
_MAX_RETRY_AFTER_S = 30


class Admission:
    """Counts open requests. A context manager around each request: `with admission:`."""

    def __init__(self, max_open: int, max_body_bytes: int) -> None:
        self.max_open = max_open
        self.max_body_bytes = max_body_bytes
        self.num_body_bytes = 0  #: bodies of requests that are not queued yet
        self.num_open = 0
        self.is_draining = False
        self._ended_at: deque[float] = deque(maxlen=1000)

    def __enter__(self) -> None:
        """Admit a request. Raises: Overloaded."""
        if self.is_draining:
            message = "The server is shutting down; retry."
            raise Overloaded("draining", message, code="server_overloaded", retry_after_s=1)
        if self.num_open >= self.max_open:
            raise self.overloaded("open_requests")
        self.num_open += 1

    def __exit__(self, *_: object) -> None:
        self.num_open -= 1
        self._ended_at.append(time.monotonic())

    def overloaded(self, reason: str) -> Overloaded:
        """The error for a request beyond a limit."""
        message, wait_s = "The server is overloaded; retry later.", self.retry_after_s()
        return Overloaded(reason, message, code="server_overloaded", retry_after_s=wait_s)

    def retry_after_s(self) -> int:
        """Estimated seconds until the open requests have ended, at the recent rate, with jitter."""
        since = time.monotonic() - _WINDOW_S
        num_ended = sum(ended_at > since for ended_at in self._ended_at)
        wait_s = self.num_open * _WINDOW_S / num_ended if num_ended else 1.0
        jittered_s = wait_s * random.uniform(0.75, 1.25)
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(jittered_s)))


class HeldBody:
    """Memory that one request's body uses. It is released at the end of `with held:`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes. While no other request has a body, this one is not refused. Raises: Overloaded."""
        admission = self._admission
        self._num_bytes += num_bytes
        admission.num_body_bytes += num_bytes
        if self._num_bytes < admission.num_body_bytes > admission.max_body_bytes:
            raise admission.overloaded("body_bytes")

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.num_body_bytes -= self._num_bytes


T = TypeVar("T", bound=msgspec.Struct)


class _NamesModel(msgspec.Struct):
    """The field of a refused body that metrics need."""

    model: str


_AT = re.compile(r"(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_NO_NEWLINE = r"$(?!\\n)"  #: end of a pattern, as msgspec shows it
_INDEX = re.compile(r"\.\[\d+\]")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
JSON = b"application/json"
_FEW_BYTES, _FEW_COMMAS = 4096, 64  #: minimum bytes and maximum commas for which `find` is used
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,]', re.DOTALL)
_SEARCHED = 1 << 20  #: leading bytes that are searched for the field that nests too deeply
_TYPED_LEVELS = 8  #: maximum nesting of typed fields around a field with free JSON
_LISTS = (*_ARRAYS, inspect.SetType)
_CONTAINERS = (inspect.StructType, *_LISTS)
_ANY_KEY = "[...]"  #: msgspec's placeholder for keys of the client, which are not echoed


async def read_body(
    exchange: Exchange,
    held: HeldBody,
    limits: LimitSettings,
    *,
    timeout_s: float,
    max_commas: int,
    media_type: bytes,
) -> bytes:
    """Read the body. `max_commas` limits JSON. Raises: InvalidRequest (too large, too slow), Overloaded, ClientGone."""
    _check_headers(exchange.context, limits.max_body_bytes, media_type)
    paced = PacedBody(exchange.receive, timeout_s, exchange.has_message)
    most = max_commas if media_type == JSON else limits.max_body_bytes
    pieces: list[bytes] = []
    num_commas, num_counted, has_more = 0, 0, True
    while has_more:
        piece, has_more = await paced.piece(held, limits.max_body_bytes)
        pieces.append(piece)
        if paced.num_bytes > most:
            num_commas += sum(map(_count_commas, pieces[num_counted:]))
            num_counted = len(pieces)
            if num_commas > most:
                raise _too_large(f"{most} commas, in its texts and between its values")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _count_commas(data: bytes) -> int:
    """Count the commas. In long base64, which has none, `find` is 20 times as fast as `count`."""
    number, at = 0, -1
    while len(data) - at > _FEW_BYTES and number < _FEW_COMMAS:
        if (at := data.find(b",", at + 1)) < 0:
            return number
        number += 1
    return number + data.count(b",", at + 1)


async def read_pieces(
    receive: Receive,
    context: RequestContext,
    held: HeldBody,
    max_bytes: int,
    timeout_s: float,
    media_type: bytes,
) -> AsyncIterator[bytes]:
    """Read the body in pieces. Raises: InvalidRequest (too large, too slow), Overloaded, ClientGone."""
    _check_headers(context, max_bytes, media_type)
    paced = PacedBody(receive, timeout_s)
    has_more = True
    while has_more:
        piece, has_more = await paced.piece(held, max_bytes)
        yield piece


class BodyTooSlow(InvalidRequest):
    """No bytes arrived for `timeout_s`, or fewer than the minimum rate requires."""

    def __init__(self, timeout_s: float) -> None:
        self.problem = f"less than {LimitSettings.min_body_rate >> 10} KiB per second arrived for {timeout_s:g} s"
        super().__init__(f"The body was sent too slowly: {self.problem}.", code="timeout")


class PacedBody:
    """Receives a body and enforces a minimum rate. Only time spent waiting for the client counts."""

    def __init__(
        self, receive: Receive, timeout_s: float, has_message: Callable[[], bool] | None = None
    ) -> None:
        """`has_message`: whether `receive` returns without waiting; None: unknown."""
        self._receive = receive
        self._timeout_s = timeout_s
        self._has_message = has_message
        self.num_bytes = 0  #: received so far
        self._waited_s = 0.0
        self._waits_since: float | None = None
        self._window = (0, 0.0)  # bytes and waiting time at the start of the window

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the client."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    async def receive(self) -> Message:
        """The next message. Raises: BodyTooSlow."""
        if self._has_message is not None and self._has_message():
            message = await self._receive()
            self.num_bytes += len(message.get("body", b""))
            return message
        silent_until = self._waited_s + self._timeout_s
        while True:
            num_bytes, began = self._window
            self._waits_since = time.monotonic()
            try:
                async with asyncio.timeout(
                    min(silent_until, began + self._timeout_s) - self._waited_s
                ):
                    message = await self._receive()
                self.num_bytes += len(message.get("body", b""))
                return message
            except TimeoutError:
                pass
            finally:
                self._waited_s, self._waits_since = self.waited_s, None
            least = LimitSettings.min_body_rate * (self._waited_s - began)
            if self._waited_s >= silent_until or self.num_bytes - num_bytes < least:
                raise BodyTooSlow(self._timeout_s)
            self._window = (self.num_bytes, self._waited_s)

    async def piece(self, held: HeldBody, max_bytes: int) -> tuple[bytes, bool]:
        """The next piece, and whether there are more. Raises: InvalidRequest, Overloaded, ClientGone."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        if self.num_bytes > max_bytes:
            raise _too_large(f"{max_bytes} bytes")
        held.add(len(piece))
        return piece, message.get("more_body", False)


def _check_headers(context: RequestContext, max_bytes: int, expected: bytes) -> None:
    headers = context.headers
    given = headers.get(b"content-type", b"")
    if given != expected:
        _check_media_type(given, expected)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise wrong_media_type("Send the body without Content-Encoding.")
    length = headers.get(b"content-length")
    if length is None:
        return
    if b"transfer-encoding" in headers or not length.isdigit():
        message = "The length of the body is ambiguous: send one Content-Length, or chunks."
        raise InvalidRequest(message, code="invalid_http")
    if int(length[:20]) > max_bytes:
        raise _too_large(f"{max_bytes} bytes")


def _check_media_type(given: bytes, expected: bytes) -> None:
    media_type, _, charset = given.lower().partition(b";")
    is_named = media_type.strip() == expected
    if not is_named and expected != JSON:  # JSON is exempt: `curl -d` sends the type of a form
        raise wrong_media_type(f"Send the body with `Content-Type: {expected.decode()}`.")
    is_utf8 = charset.replace(b'"', b"").strip() in (b"", b"charset=utf-8", b"charset=utf8")
    if is_named and expected == JSON and not is_utf8:
        raise wrong_media_type("The charset is not UTF-8: send the body as UTF-8.")


def _too_large(limit: str) -> InvalidRequest:
    return InvalidRequest(f"The body is too large: send at most {limit}.", code="request_too_large")


class JsonBody(Generic[T]):
    """Decodes bodies of one type. `hints`: what to send instead, by the field's path without indexes, or its name."""

    def __init__(
        self,
        type_: type[T],
        hints: Mapping[str, str] = {},
        unsupported: Mapping[str, tuple[Any, ...]] = {},
    ) -> None:
        """`unsupported`: unknown fields that are refused instead of ignored."""
        self._type = type_
        self._decoder = msgspec.json.Decoder(type_)
        self._hints = hints
        self._unsupported = unsupported
        self._shapes: dict[int, _Shape] = {}

    def decode(self, body: bytes, context: RequestContext | None = None) -> T:
        """Decode a body. Without `context`, unknown fields are refused. Raises: InvalidRequest, which names a field."""
        try:
            if not body.isascii():
                body.decode()  # check the UTF-8 of fields that the decoder skips
            try:
                decoded = self._decoder.decode(body)
            except msgspec.ValidationError:
                if context is None:
                    raise
                cleaner = Cleaner(context, self._unsupported, self._hints, self._shapes)
                decoded = self._decoder.decode(cleaner.clean(body, self._info))
        except msgspec.ValidationError as error:
            raise locate(str(error), self._hints, self._info) from None
        except RecursionError:
            raise self._too_deep(body) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = "The body is not valid JSON in UTF-8."
            raise InvalidRequest(message, code="invalid_json") from None
        most = LimitSettings.max_json_depth
        if is_deeper(body, most):
            error = self._too_deep(body)
            # Beyond the searched bytes, the levels of typed fields are unknown: allow _TYPED_LEVELS more.
            if error.param or (len(body) > _SEARCHED and is_deeper(body, most + _TYPED_LEVELS)):
                raise error
        return decoded

    def _too_deep(self, body: bytes) -> InvalidRequest:
        """The error for a value that nests too deeply. Names the field, unless it is beyond the searched bytes."""
        most = LimitSettings.max_json_depth
        path: list[str | int] = []  # key or index of each open container
        key = "?"
        for token in _TOKENS.finditer(body, 0, _SEARCHED):
            first = token[0][:1]
            if first in b"[{":
                path.append(0 if first == b"[" else key)
                if len(path) > most and len(path) - len(field := self._field(path)) > most:
                    param = ".".join(field)
                    text = f"{param} nests too deeply: send at most {most} levels."
                    return InvalidRequest(text, param=param, code="invalid_json")
            elif first == b'"':
                key = token[0][1:-1].decode(errors="replace")
            elif path and first in b"]}":
                path.pop()
            elif path and first == b":":
                path[-1] = key
            elif path and isinstance(index := path[-1], int):
                path[-1] = index + 1
        text = f"The body nests too deeply: send at most {most} levels."
        return InvalidRequest(text, code="invalid_json")

    def _field(self, path: list[str | int]) -> list[str]:
        """The part of a path that this type describes, without the levels inside a field of free JSON."""
        names: list[str] = []
        types = list(members_of(self._info))
        for part in path[:_TYPED_LEVELS]:  # types may be recursive
            if not any(isinstance(type_, _CONTAINERS) for type_ in types):
                break
            name = part if isinstance(part, str) else f"[{part}]"
            names.append(name if isinstance(part, int) else join("", name))
            types = [*_inside(types, name)]
        return names

    @cached_property
    def _info(self) -> inspect.Type:
        return inspect.type_info(self._type)


def find_model_name(body: bytes) -> str:
    """The model in a refused body. Empty if the body is not JSON or has no model."""
    try:
        return msgspec.json.decode(body, type=_NamesModel).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def locate(
    problem: str, hints: Mapping[str, str], info: inspect.Type | None = None
) -> InvalidRequest:
    """The error for a msgspec error in a body of the type `info`. It names the field, and does not quote the value."""
    match = _AT.fullmatch(problem)
    assert match is not None  # every part of the pattern is optional
    reason = match["reason"]
    path = (match["path"] or "").partition(_ANY_KEY)[0]
    path = path.replace("[", ".[") if ".[" not in path else path
    if unknown := _UNKNOWN.fullmatch(reason):
        return unsupported(join(path, unknown["name"]))
    if lacking := _MISSING.fullmatch(reason):
        return missing(join(path, lacking["name"]))
    message = _explain(reason, path, hints, info)
    return InvalidRequest(message, param=path or None, code="invalid_value")


def _explain(reason: str, path: str, hints: Mapping[str, str], info: inspect.Type | None) -> str:
    subject = f"Invalid value for {path}" if path else "Invalid body"
    hint = hints.get(_INDEX.sub("", path)) or hints.get(path.rpartition(".")[2], "")
    is_pattern = bool(hint) and "matching regex" in reason
    if reason.startswith("Invalid") or is_pattern:  # msgspec would quote the value
        if not hint and info is not None and (values := _values_at(info, path)):
            hint = f"Send {' or '.join(filter(None, (', '.join(values[:-1]), values[-1])))}."
        return f"{subject}. {hint}".rstrip()
    return f"{subject}: {reason[0].lower()}{reason[1:]}.".replace(_NO_NEWLINE, "$")


def _values_at(info: inspect.Type, path: str) -> list[str]:
    """The closed set of strings at a path of a body. Empty if there is none."""
    types = [*members_of(info)]
    for name in filter(None, path.split(".")):
        types = [*_inside(types, name)]
    sets = (type_.values for type_ in types if isinstance(type_, inspect.LiteralType))
    enums = (
        [item.value for item in type_.cls] for type_ in types if isinstance(type_, inspect.EnumType)
    )
    values = [value for values in (*sets, *enums) for value in values]
    return [value for value in values if isinstance(value, str) and value]


def _inside(types: Iterable[inspect.Type], name: str) -> Iterator[inspect.Type]:
    """The types of a field, or of the items of a list. The type of a tag is a literal of its value."""
    for type_ in types:
        if isinstance(type_, inspect.StructType):
            if name == type_.tag_field:
                yield inspect.LiteralType((type_.tag,))
            for field in type_.fields:
                if field.encode_name == name:
                    yield from members_of(field.type)
        elif name.startswith("[") and isinstance(type_, _LISTS):
            yield from members_of(type_.item_type)
