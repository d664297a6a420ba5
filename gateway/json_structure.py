"""The structure of a JSON body, looked at before it is decoded: its depth, its parts, and keys that come twice.

Parsers differ in which of two equal keys they believe, so that a filter before this gateway may have seen another
request than the fleet does; such bodies are refused. Strings, pictures among them, are skipped at the speed of
`bytes.find`. The body need not be JSON: what is not is for the decoder to refuse.
"""

import re
from contextlib import suppress

import msgspec

from gateway.errors import InvalidRequest
from shared.limits import LimitSettings

_OPENING = frozenset(b"{[")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_BACKSLASH = ord("\\")
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SANE_KEY = re.compile(rb"\w{1,64}", re.ASCII)

#: What stands between strings is mostly short, and of few kinds: `_read` of those seen so far.
_known: dict[bytes, tuple[bool, bytes, int]] = {}
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 32


def check_structure(body: bytes, limits: LimitSettings) -> None:
    """Refuse a body too deep, of too many parts, or with a key twice in one object. Raises: InvalidRequest."""
    find, known = body.find, _known.get
    outer: list[set[bytes]] = []  # the keys of what is open around the place, outermost first
    keys: set[bytes] = set()
    num_items = -1  # behind the last string there is none
    start = end = -1  # the quotes of the string before the place
    while end >= start:
        quote = find(b'"', end + 1)
        between = body[end + 1 : quote] if quote >= 0 else body[end + 1 :]
        is_key, brackets, num_opened = known(between) or _read(between)
        num_items += 1 + num_opened
        if num_items > limits.max_json_items:
            raise _invalid(f"more than {limits.max_json_items} strings, objects and arrays")
        if is_key:
            key = body[start + 1 : end]
            if key in keys or _BACKSLASH in key:
                key = _check_key(key, keys)
            keys.add(key)
        if brackets:
            keys = _follow(brackets, keys, outer, limits.max_json_depth)
        if quote < 0:
            return
        start, end = quote, find(b'"', quote + 1)
        if end > 0 and body[end - 1] == _BACKSLASH:
            end = _end_of_string(body, start)


def _read(between: bytes) -> tuple[bool, bytes, int]:
    """Of a text between strings: whether the string before it is a key, the brackets, and how many open."""
    brackets = between.translate(None, _NOT_BRACKETS)
    num_opened = brackets.count(b"{") + brackets.count(b"[")
    seen = between.lstrip().startswith(b":"), brackets, num_opened
    if len(between) <= _MAX_KNOWN_BYTES and len(_known) < _MAX_KNOWN:
        _known[between] = seen
    return seen


def _end_of_string(body: bytes, start: int) -> int:
    """Where the string that begins at a quote ends, escaped quotes inside; -1 if nowhere."""
    match = _REST_OF_STRING.match(body, start + 1)
    return match.end() - 1 if match else -1


def _check_key(key: bytes, keys: set[bytes]) -> bytes:
    """The key without escapes: two spellings of one key are one key. Raises: InvalidRequest."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # the body's decoder will say so
        key = msgspec.json.decode(b'"%b"' % key, type=str).encode()
    if key in keys:
        name = (
            key.decode() if _SANE_KEY.fullmatch(key) else "?"
        )  # a client's own text is not echoed
        raise _invalid("a key twice in one object", name)
    return key


def _follow(
    brackets: bytes, keys: set[bytes], outer: list[set[bytes]], max_depth: int
) -> set[bytes]:
    """Go in and out of objects and arrays; the keys of the one then open. Raises: InvalidRequest."""
    for bracket in brackets:
        if bracket in _OPENING:
            outer.append(keys)
            keys = set()
            if len(outer) > max_depth:
                raise _invalid(f"more than {max_depth} levels of objects and arrays")
        elif not outer:
            break  # no JSON
        else:
            keys = outer.pop()
    return keys


def _invalid(problem: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"The body holds {problem}.", param=param, code="invalid_json")
