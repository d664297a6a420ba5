"""Prepares JSON schemas for llguidance, which is looser than the standard in some keywords.

Every answer that llguidance then accepts conforms to the schema; some conforming answers are not accepted.
"""

import json
import re
from typing import Any

from engines.base import BadGrammar, GrammarTooComplex

#: llguidance's options, which replace the client's. At most one space, because small models can write white space
#: forever. No unicode escapes: a member's name with an escape would count as another name.
_OPTIONS = {"whitespace_pattern": " ?", "json_allowed_escapes": 'nrbtf"\\'}

#: Keywords whose values are no schemas, and keywords whose values are schemas by name.
_VALUES = frozenset(("const", "enum", "default", "examples"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
#: Keywords that limit the length of a string.
_TEXT_BOUNDS = frozenset(("enum", "const", "pattern", "format", "maxLength"))
#: Keywords that define the members of an object.
_MEMBERS = frozenset(
    ("properties", "required", "minProperties", "patternProperties", "additionalProperties")
)

_BY_NUMBER = re.compile(r"\\u00(?:[01]|7f)")

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
#: Formats that llguidance checks loosely: February 29 in any year, leap seconds in any minute. Source: RFC 3339.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
#: JavaScript's character classes that differ in Rust.
_CLASSES = {r"\s": r"[\s\x{FEFF}]", r"\S": r"[^\s\x{FEFF}]"}


class Refusal(Exception):
    """The reason to refuse a grammar or schema, without text of the client."""

    num_bytes = 1024

    def __init__(self, problem: str, *, is_complex: bool = False, is_kept: bool = True) -> None:
        """`is_kept`: the refusal is cached."""
        super().__init__(problem)
        self.is_complex = is_complex
        self.is_kept = is_kept

    def to_error(self, param: str) -> BadGrammar | GrammarTooComplex:
        """The error that names the field."""
        kind = GrammarTooComplex if self.is_complex else BadGrammar
        return kind(f"Invalid value for {param}: {self}.", param)


def prepare(
    schema: dict[str, Any], *, is_lenient: bool = False, max_text_chars: int | None = None
) -> dict[str, Any]:
    """A copy of the schema for llguidance. Objects get no members outside `properties`, unless the schema has
    `additionalProperties` or combines schemas of objects. Raises: Refusal.

    `is_lenient`: ignore unsupported keywords. `max_text_chars`: limit of unbounded strings.
    """
    try:
        made = _Preparation(is_lenient, max_text_chars, not _is_combined(schema)).prepare(schema)
    except RecursionError:
        raise Refusal("the schema has too many levels; send fewer") from None
    return made | {"x-guidance": _OPTIONS | {"lenient": is_lenient}}


class _Preparation:
    def __init__(self, is_lenient: bool, max_text_chars: int | None, is_closed: bool) -> None:
        self._is_lenient = is_lenient
        self._max_text_chars = max_text_chars
        self._is_closed = is_closed

    def prepare(self, schema: Any) -> Any:
        """Prepare a schema or any value, since references may point anywhere."""
        if isinstance(schema, list):
            return [self.prepare(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        made = {key: self._prepare_value(key, value) for key, value in schema.items()}
        if self._max_text_chars is not None:
            _bound_text(made, self._max_text_chars)
        if self._is_closed:
            _close(made)
        if not self._is_lenient:
            _check_members(made)
        exact = _FORMATS.get(form) if isinstance(form := made.get("format"), str) else None
        if exact is not None:
            del made["format"]
            others = made.get("allOf")
            made["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": exact}]
        return made

    def _prepare_value(self, key: str, value: Any) -> Any:
        if key in _VALUES:
            # with the options above, llguidance cannot write control characters
            is_checked = key in ("const", "enum") and not self._is_lenient
            if is_checked and _BY_NUMBER.search(json.dumps(value)):
                raise Refusal("control characters in const and enum are not supported")
            return value
        if key == "pattern" and isinstance(value, str):
            return _to_rust(value)
        if key in _NAMED and isinstance(value, dict):
            rename = _to_rust if key == "patternProperties" else str
            return {rename(name): self.prepare(each) for name, each in value.items()}
        return self.prepare(value)


def _to_rust(pattern: str) -> str:
    return re.sub(
        r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), pattern, flags=re.DOTALL
    )


def _check_members(schema: dict[str, Any]) -> None:
    """Refuse counts of members, because llguidance counts a repeated member twice. Raises: Refusal."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise Refusal(
            "minProperties is supported up to one more than the number of names in required"
        )


def _bound_text(schema: dict[str, Any], max_chars: int) -> None:
    if schema.get("type") == "string" and _TEXT_BOUNDS.isdisjoint(schema):
        least = schema.get("minLength")
        schema["maxLength"] = max(max_chars, least if isinstance(least, int) else 0)


def _is_combined(schema: Any) -> bool:
    """Whether one object may have to conform to several schemas, each with members of its own."""
    if isinstance(schema, list):
        return any(map(_is_combined, schema))
    if not isinstance(schema, dict):
        return False
    combines = {"allOf", "oneOf"} & schema.keys()
    alternates = {"anyOf", "$ref"} & schema.keys() and not _MEMBERS.isdisjoint(schema)
    return bool(combines or alternates) or any(map(_is_combined, schema.values()))


def _close(schema: dict[str, Any]) -> None:
    """Forbid members that the schema does not name, because models would invent some."""
    named, required = schema.get("properties"), schema.get("required", [])
    if (
        named
        and isinstance(named, dict)
        and {"additionalProperties", "patternProperties", "minProperties"}.isdisjoint(schema)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    ):
        schema["additionalProperties"] = False
