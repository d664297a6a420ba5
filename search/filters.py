"""Filters on attributes, three times: as Python (the oracle), as SQL of Lance, as Qdrant's filters.

What does not compare does not match: an attribute that is missing or of another type is not equal,
not greater, not less; so `ne` and `nin` find it.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared.search import Attributes, Filter, Value

if TYPE_CHECKING:
    from qdrant_client.models import Filter as QdrantFilter

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}
_SIGNS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def matches(where: Filter, attributes: Attributes) -> bool:
    """Whether attributes pass a filter."""
    match where.type:
        case "and":
            return all(matches(part, attributes) for part in where.filters)
        case "or":
            return any(matches(part, attributes) for part in where.filters)
        case "ne" | "nin":
            return not matches(_positive(where), attributes)
        case "in":
            return any(_compares("eq", where.key, value, attributes) for value in _values(where))
        case _:
            return _compares(where.type, where.key, where.value, attributes)


def _compares(sign: str, key: str, value: Any, attributes: Attributes) -> bool:
    found = attributes.get(key)
    return found is not None and _kind(found) == _kind(value) and _COMPARE[sign](found, value)


def _positive(where: Filter) -> Filter:
    return Filter("eq" if where.type == "ne" else "in", where.key, where.value)


def _values(where: Filter) -> list[Value]:
    return where.value if isinstance(where.value, list) else []


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "b"
    return "s" if isinstance(value, str) else "n"


def _name(key: str, value: Value) -> str:
    """Of an attribute in the index: its type and its key in hex, so that no key needs quotes."""
    return _kind(value) + key.encode().hex()


def to_columns(attributes: Attributes) -> dict[str, Value]:
    """Attributes as Lance and Qdrant hold them beside an item, to be filtered."""
    return {_name(key, value): value for key, value in attributes.items()}


# Lance


def to_sql(where: Filter, column: str = "filterable") -> str:
    """The filter in Lance's SQL, over a JSON column of `to_columns`."""
    match where.type:
        case "and" | "or":
            parts = [to_sql(part, column) for part in where.filters]
            return "(" + f" {where.type.upper()} ".join(parts) + ")"
        case "ne" | "nin":
            return f"(NOT {to_sql(_positive(where), column)})"
        case "in":
            parts = [_sql("eq", where.key, value, column) for value in _values(where)]
            return "(" + " OR ".join(parts or ["false"]) + ")"
        case _:
            assert where.value is not None
            assert not isinstance(where.value, list)
            return _sql(where.type, where.key, where.value, column)


def _sql(sign: str, key: str, value: Value, column: str) -> str:
    getter = {"s": "string", "n": "float", "b": "bool"}[_kind(value)]
    found = f"json_get_{getter}({column}, '{_name(key, value)}')"
    return f"coalesce({found} {_SIGNS[sign]} {_literal(value)}, false)"


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return sql_text(value) if isinstance(value, str) else f"CAST('{float(value)!r}' AS DOUBLE)"


def sql_text(text: str) -> str:
    """A text as SQL's literal."""
    return "'" + text.replace("'", "''") + "'"


def to_json(attributes: Attributes) -> str:
    """What the JSON column of `to_sql` holds: numbers are floats."""
    columns = to_columns(attributes)
    return json.dumps(
        {n: float(v) if n[0] == "n" else v for n, v in columns.items()}, allow_nan=False
    )


# Qdrant


def to_qdrant(where: Filter) -> "QdrantFilter":
    """The filter in Qdrant's words, over a payload with `to_columns` under `filterable`."""
    from qdrant_client import models  # noqa: PLC0415 (an extra)

    match where.type:
        case "and":
            return models.Filter(must=[to_qdrant(part) for part in where.filters])
        case "or":
            return models.Filter(should=[to_qdrant(part) for part in where.filters])
        case "ne" | "nin":
            return models.Filter(must_not=[to_qdrant(_positive(where))])
        case "in":
            values = _values(where)
            if not values:
                return models.Filter(must=[models.HasIdCondition(has_id=[])])
            return models.Filter(should=[_condition("eq", where.key, value) for value in values])
        case _:
            assert where.value is not None
            assert not isinstance(where.value, list)
            return models.Filter(must=[_condition(where.type, where.key, where.value)])


def _condition(sign: str, key: str, value: Value) -> Any:
    from qdrant_client import models  # noqa: PLC0415 (an extra)

    path = f"filterable.{_name(key, value)}"
    if _kind(value) == "n":
        number = float(value)
        bounds = {"gte": number, "lte": number} if sign == "eq" else {sign: number}
        return models.FieldCondition(key=path, range=models.Range(**bounds))
    return models.FieldCondition(key=path, match=models.MatchValue(value=value))  # type: ignore[arg-type]
