"""Filters on attributes in three languages: Python (the oracle), and SQL of Lance and of PostgreSQL.

A comparison with a missing attribute, or one of another type, is false: `ne` and `nin` match it.
"""

import json
from collections.abc import Callable
from operator import eq, ge, gt, le, lt, not_
from typing import Any

from shared.search import Attributes, Filter, Value

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": eq,
    "gt": gt,
    "gte": ge,
    "lt": lt,
    "lte": le,
}
_SIGNS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def _translate(
    where: Filter,
    compare: Callable[[str, str, Any], Any],
    every: Callable[[list[Any]], Any],
    some: Callable[[list[Any]], Any],
    negate: Callable[[Any], Any],
) -> Any:
    """Translate a filter with these functions. `compare` gets a comparison, a key and a value."""
    match where.type:
        case "and" | "or":
            parts = [_translate(each, compare, every, some, negate) for each in where.filters]
            return every(parts) if where.type == "and" else some(parts)
        case "in" | "nin":
            values = where.value if isinstance(where.value, list) else []
            found = some([compare("eq", where.key, value) for value in values])
            return found if where.type == "in" else negate(found)
        case "ne":
            return negate(compare("eq", where.key, where.value))
        case _:
            return compare(where.type, where.key, where.value)


def matches(where: Filter, attributes: Attributes) -> bool:
    def compare(sign: str, key: str, value: Any) -> bool:
        found = attributes.get(key)
        return found is not None and _kind(found) == _kind(value) and _COMPARE[sign](found, value)

    return _translate(where, compare, all, any, not_)


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "b"
    return "s" if isinstance(value, str) else "n"


def _name(key: str, value: Value) -> str:
    """The name of an attribute in the index: its type, and the key in hexadecimal, which needs no quotes."""
    return _kind(value) + key.encode().hex()


#: How SQL joins conditions.
_SQL: dict[str, Callable[[Any], str]] = {
    "every": lambda parts: "(" + " AND ".join(parts) + ")",
    "some": lambda parts: "(" + " OR ".join(parts or ["false"]) + ")",
    "negate": lambda part: f"(NOT {part})",
}


# Lance


def to_sql(where: Filter, column: str = "filterable") -> str:
    """The filter as SQL of Lance, over a JSON column of `to_json`."""

    def compare(sign: str, key: str, value: Any) -> str:
        getter = {"s": "string", "n": "float", "b": "bool"}[_kind(value)]
        found = f"json_get_{getter}({column}, '{_name(key, value)}')"
        return f"coalesce({found} {_SIGNS[sign]} {_literal(value)}, false)"

    return _translate(where, compare, **_SQL)


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return sql_text(value) if isinstance(value, str) else f"CAST('{float(value)!r}' AS DOUBLE)"


def sql_text(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def to_json(attributes: Attributes, write_text: Callable[[str], str] = str) -> str:
    """The JSON column of attributes by name and type; numbers are floats."""
    write: dict[str, Callable[[Any], Any]] = {"s": write_text, "n": float, "b": bool}
    columns = {_name(key, value): write[_kind(value)](value) for key, value in attributes.items()}
    return json.dumps(columns, allow_nan=False)


# PostgreSQL


def hexadecimal(text: str) -> str:
    return text.encode().hex()


def to_postgres(where: Filter, values: list[Any], column: str = "filterable") -> str:
    """The filter as SQL over a JSONB column of `to_json` with `hexadecimal`; appends to `values`."""

    def compare(sign: str, key: str, value: Any) -> str:
        kind = _kind(value)
        type_ = {"s": 'text COLLATE "C"', "n": "float8", "b": "boolean"}[kind]
        write = {"s": hexadecimal, "n": float, "b": bool}[kind]
        values.extend((_name(key, value), write(value)))
        return f"coalesce(({column} ->> ?)::{type_} {_SIGNS[sign]} ?, false)"

    return _translate(where, compare, **_SQL)
