"""Unknown fields of a request body: ignored and listed, or refused by name.

A field that would change the answer is refused, unless its value is null or a no-op. All others are removed and
listed in `x-vlm-ignored` and the log.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, inspect

from gateway.http.errors import ApiError, InvalidRequest
from gateway.http.exchange import RequestContext, clean_name

#: No-op values by field; null is always a no-op. Fields in objects are named after a dot.
Unsupported = Mapping[str, tuple[Any, ...]]

_MAX_NO_OP_BYTES = 256  #: larger values are not decoded
_MAX_LOGGED_NAMES = 100
_LOG_INTERVAL_S = 60.0
_SANE_NAME = re.compile(r"\w{1,64}(\[\])?", re.ASCII)  #: with brackets: a list in a query
_WHOLE_FLOAT = re.compile(rb"(-?\d{1,19})\.0+")
_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])
_NULL = b"null"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cleaner:
    """Removes unknown and null fields from one body."""

    _context: RequestContext
    _unsupported: Unsupported
    _hints: Mapping[str, str]

    def clean(self, body: bytes, type_: inspect.Type) -> Raw:
        """The body without unknown fields, and without null where a field has a default.

        Floats such as 1.0 become integers for integer fields. Raises: InvalidRequest.
        """
        cleaned = self._clean(Raw(body.strip()), type_, "", "")
        if self._context.ignored:
            _log(self._context.ignored)
        return cleaned

    def _clean(self, value: Raw, type_: inspect.Type, path: str, place: str) -> Raw:
        """`path` has names only; `place` has indexes, for errors."""
        start = bytes(memoryview(value)[:1])
        kinds = list(members_of(type_))
        if start == b"{":
            structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
            return self._clean_object(value, structs, path, place) if structs else value
        lists = [
            kind for kind in kinds if isinstance(kind, inspect.ListType | inspect.VarTupleType)
        ]
        if start != b"[" or not lists or not any(map(_has_fields, members_of(lists[0].item_type))):
            return value
        items = _items.decode(value)
        cleaned = [
            self._clean(item, lists[0].item_type, path, f"{place}.[{index}]")
            for index, item in enumerate(items)
        ]
        is_same = all(old is new for old, new in zip(items, cleaned, strict=True))
        return value if is_same else Raw(msgspec.json.encode(cleaned))

    def _clean_object(
        self, value: Raw, structs: list[inspect.StructType], path: str, place: str
    ) -> Raw:
        members = _members.decode(value)
        struct = _find_struct(structs, members)
        if struct is None:
            return value
        fields = {field.encode_name: field for field in struct.fields}
        cleaned: dict[str, Raw] = {}
        for name, member in members.items():
            field = fields.get(name)
            if field is not None:
                if not _is_needless_null(member, field):
                    cleaned[name] = _whole(member, field.type)
            elif name == struct.tag_field or not struct.forbid_unknown_fields:
                cleaned[name] = member
            else:
                self._drop(name, member, struct.cls, path, place)
        for name, member in cleaned.items():
            if name in fields:
                inner = f"{path}.{name}" if path else name
                cleaned[name] = self._clean(member, fields[name].type, inner, join(place, name))
        is_same = len(cleaned) == len(members) and all(
            cleaned[name] is member for name, member in members.items()
        )
        return value if is_same else Raw(msgspec.json.encode(cleaned))

    def _drop(self, name: str, value: Raw, owner: type, path: str, place: str) -> None:
        """Ignore an unknown field. Raises: InvalidRequest."""
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


def _find_struct(
    structs: list[inspect.StructType], members: Mapping[str, Raw]
) -> inspect.StructType | None:
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        tag = members.get(struct.tag_field or "")
        if tag is not None and bytes(tag) == msgspec.json.encode(struct.tag):
            return struct
    return None


def _has_fields(type_: inspect.Type) -> bool:
    return isinstance(type_, inspect.StructType | inspect.ListType)


def _is_needless_null(value: Raw, field: inspect.Field) -> bool:
    """Whether null stands for the default of a field that is not nullable."""
    if field.required or bytes(memoryview(value)[:5]) != _NULL:
        return False
    takes_null = inspect.NoneType | inspect.RawType | inspect.AnyType
    return not any(isinstance(kind, takes_null) for kind in members_of(field.type))


def _whole(value: Raw, type_: inspect.Type) -> Raw:
    """1.0 as 1, for an integer field."""
    kinds = list(members_of(type_))
    if not any(isinstance(kind, inspect.IntType) for kind in kinds) or any(
        isinstance(kind, inspect.FloatType) for kind in kinds
    ):
        return value
    match = _WHOLE_FLOAT.fullmatch(bytes(memoryview(value)[:64]))
    return Raw(match[1]) if match else value


def _is_no_op(value: Raw, no_ops: tuple[Any, ...]) -> bool:
    if len(memoryview(value)) > _MAX_NO_OP_BYTES:
        return False
    try:
        given = msgspec.json.decode(value)
    except msgspec.DecodeError:  # out of range
        return False
    return given is None or any(
        given == no_op and isinstance(given, bool) == isinstance(no_op, bool) for no_op in no_ops
    )


_log_state: dict[str, Any] = {"names": {}, "logged_at": -_LOG_INTERVAL_S}


def _log(names: list[str]) -> None:
    """One line per minute, with the names since the last one."""
    known: dict[str, None] = _log_state["names"]
    for name in names:
        if len(known) < _MAX_LOGGED_NAMES:
            known[clean_name(name)] = None
    now = time.monotonic()
    if now - _log_state["logged_at"] >= _LOG_INTERVAL_S:
        logger.info("ignored unknown fields of requests: %s", ", ".join(known))
        _log_state.update(names={}, logged_at=now)


def unsupported(param: str, hint: str = "") -> ApiError:
    return InvalidRequest(
        f"Unsupported parameter: {param}. {hint or 'Remove it.'}",
        param=param,
        code="unsupported_parameter",
    )


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
