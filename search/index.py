"""The interface of vector indexes, the table of indexes by URL scheme, and the translation of filters to SQL.

An index is one file of this package and a line in `INDEXES`. `tests/search/test_index.py` runs a state machine over
all of them: acknowledged writes survive a `kill -9`, and searches and filters return what an exact scan with
`search.index.matches` returns.
"""

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt, not_
from pkgutil import resolve_name  # noqa: TID251 - names the modules of its own table
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shared.search import Attributes, Filter, Hit, Item, Value
from shared.settings import SettingsError

if TYPE_CHECKING:
    import numpy as np

    from search.catalog import Database

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": eq,
    "gt": gt,
    "gte": ge,
    "lt": lt,
    "lte": le,
}
_SIGNS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
#: Number of ids in a window of `OrderedIds`, and number of windows that it caches.
WINDOW = 65_536
_MAX_WINDOWS = 4


def _translate(
    where: Filter,
    compare: Callable[[str, str, Any], Any],
    every: Callable[[list[Any]], Any],
    some: Callable[[list[Any]], Any],
    negate: Callable[[Any], Any],
) -> Any:
    """Translate a filter with the given functions. `compare` gets a type of comparison, a key and a value."""
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


#: Arguments of `_translate` that build SQL.
_SQL: dict[str, Callable[[Any], str]] = {
    "every": lambda parts: "(" + " AND ".join(parts) + ")",
    "some": lambda parts: "(" + " OR ".join(parts or ["false"]) + ")",
    "negate": lambda part: f"(NOT {part})",
}


# Lance


def to_sql(where: Filter) -> str:
    """The filter as SQL of Lance over the column `filterable`, which `to_json` encodes."""

    def compare(sign: str, key: str, value: Any) -> str:
        getter = {"s": "string", "n": "float", "b": "bool"}[_kind(value)]
        found = f"json_get_{getter}(filterable, '{_name(key, value)}')"
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
    """Encode attributes for the JSON column `filterable`. `_name` makes the keys, and numbers are floats."""
    write: dict[str, Callable[[Any], Any]] = {"s": write_text, "n": float, "b": bool}
    columns = {_name(key, value): write[_kind(value)](value) for key, value in attributes.items()}
    return json.dumps(columns, allow_nan=False)


# PostgreSQL


def hexadecimal(text: str) -> str:
    return text.encode().hex()


def to_postgres(where: Filter, values: list[Any]) -> str:
    """SQL over the column `filterable`, which `to_json` encodes with `hexadecimal`; appends to `values`."""

    def compare(sign: str, key: str, value: Any) -> str:
        kind = _kind(value)
        type_ = {"s": 'text COLLATE "C"', "n": "float8", "b": "boolean"}[kind]
        write = {"s": hexadecimal, "n": float, "b": bool}[kind]
        values.extend((_name(key, value), write(value)))
        return f"coalesce((filterable ->> ?)::{type_} {_SIGNS[sign]} ?, false)"

    return _translate(where, compare, **_SQL)


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`num_bytes`: size on disk, or size of the items if that is unknown."""

    num_items: int
    num_bytes: int


class VectorIndex(Protocol):
    """The items of one store. Reads are thread-safe; one thread at a time writes. Durable writes survive `kill -9`."""

    def upsert(self, items: Sequence[Item]) -> None:
        """Insert items, or replace those of the same id: all or none, durable on return. Ids are distinct."""
        ...

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        """Delete by ids or by filter, durable on return. Returns the number of deleted items."""
        ...

    def search(self, vectors: "np.ndarray", k: int, where: Filter | None = None) -> list[list[Hit]]:
        """The nearest items of each vector by cosine, best first; equal scores in the order of ids.

        If several items tie for the k-th place, any of them is returned.

        Shapes: [queries, dimensions], float32 of length 1.
        """
        ...

    def get(self, ids: Sequence[str]) -> list[Item]:
        """The existing items of these ids, with vectors, in any order."""
        ...

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        """The next items in the order of ids."""
        ...

    def stats(self) -> IndexStats: ...

    def compact(self) -> None:
        """Optimize for later searches; may take minutes."""
        ...

    def close(self) -> None:
        """Wait for `compact`, and close files and connections."""
        ...


class IndexKind(Protocol):
    """Opens the indexes of stores, by the id of the store."""

    def open(self, name: str, dimensions: int) -> VectorIndex:
        """The index of a store; it is created if it does not exist."""
        ...

    @property
    def database(self) -> "Database | None":
        """The database that holds vectors and records; None if the vectors are in files."""
        ...

    def drop(self, name: str) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class OrderedIds:
    """Pages in the order of ids, for an index that cannot read items in that order.

    Reads and caches windows of `WINDOW` sorted ids; a walk over n items reads n * n / `WINDOW` ids. Writers call
    `add` and `remove` to update the cached windows.
    """

    _read_ids: Callable[[str, int], list[str]]  #: sorted ids after an id; arguments: id, limit
    _read_items: Callable[[Sequence[str]], list[Item]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _windows: "list[_Window]" = field(default_factory=list)

    def page(self, after: str, limit: int, with_vectors: bool) -> list[Item]:
        found: list[Item] = []
        while len(found) < limit and (wanted := self._next(after, limit - len(found))):
            items = {item.id: item for item in self._read_items(wanted)}
            found += [items[key] for key in wanted if key in items]  # others were deleted meanwhile
            after = wanted[-1]
        if with_vectors:
            return found
        return [msgspec.structs.replace(item, vector=b"") for item in found]

    def _next(self, after: str, limit: int) -> list[str]:
        while True:
            with self._lock:
                window = next((each for each in self._windows if each.covers(after)), None)
            window = window or self._load(after)
            with self._lock:
                at = bisect_right(window.ids, after)
                found = window.ids[at : at + limit]
            if found or window.end is None:
                return found
            after = window.end

    def _load(self, after: str) -> "_Window":
        window = _Window(after)
        with self._lock:
            self._windows = [*self._windows[1 - _MAX_WINDOWS :], window]
        ids = self._read_ids(after, WINDOW)  # if it fails, the window is never used
        with self._lock:
            window.end = ids[-1] if len(ids) == WINDOW else None
            window.is_loaded = True
            added, window.ids = window.ids, ids
            window.add(added)
        return window

    def add(self, ids: Iterable[str]) -> None:
        with self._lock:
            for window in self._windows:
                window.add(ids)

    def remove(self, ids: Iterable[str]) -> None:
        with self._lock:
            for window in self._windows:
                window.remove(ids)

    def forget(self) -> None:
        with self._lock:
            self._windows = []


@dataclass(eq=False)
class _Window:
    """The ids after `start`, up to `end` (None: no limit). Until it is loaded, the window has only added ids."""

    start: str
    end: str | None = None
    ids: list[str] = field(default_factory=list)
    is_loaded: bool = False

    def covers(self, after: str) -> bool:
        return self.is_loaded and self.start <= after and (self.end is None or after < self.end)

    def add(self, ids: Iterable[str]) -> None:
        for key in ids:
            if key > self.start and (self.end is None or key <= self.end):
                at = bisect_left(self.ids, key)
                if self.ids[at : at + 1] != [key]:
                    self.ids.insert(at, key)

    def remove(self, ids: Iterable[str]) -> None:
        for key in ids:
            at = bisect_left(self.ids, key)
            if self.ids[at : at + 1] == [key]:
                del self.ids[at]


#: Functions that open the indexes of a URL, by its scheme.
INDEXES = {"lance": "search.lance:open_lance", "postgresql": "search.postgres:open_postgres"}
INSTALL = "pip install '.[search]'"


def open_indexes(url: str) -> IndexKind:
    """The indexes behind a URL: `lance:///DIRECTORY`, `postgresql://HOST/NAME`. Raises: SettingsError."""
    scheme = url.partition(":")[0]
    if scheme not in INDEXES:
        known = "://, ".join(INDEXES)
        raise SettingsError(f"VLM_SEARCH__INDEX: unknown scheme {scheme!r}; use {known}://")
    try:
        return resolve_name(INDEXES[scheme])(url)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"VLM_SEARCH__INDEX: {scheme} needs the package {error.name!r}: {INSTALL}"
        ) from None
