"""`VectorIndex`: what every index of vectors keeps, and the indexes by name.

An index is one file beside this one and a line in `INDEXES`. `tests/search/test_index.py` runs one
state machine over all of them: what `upsert` and `delete` have acknowledged is there after a
`kill -9`, a search finds the nearest by cosine, and a filter what `search.filters.matches` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name  # noqa: TID251 - names the modules of its own table
from typing import TYPE_CHECKING, Protocol

from shared.search import Filter, Hit, Item
from shared.settings import SettingsError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class IndexStats:
    """How much there is. `num_bytes`: of disk, as far as it is known."""

    num_items: int
    num_bytes: int


class VectorIndex(Protocol):
    """The items of one store. Thread-safe for readers; one thread at a time writes."""

    def upsert(self, items: Sequence[Item]) -> None:
        """Insert items, or replace those of the same id: all or none, durable on return.

        Ids of one call are distinct.
        """
        ...

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        """Delete by ids or by filter, durable on return. Returns how many there were."""
        ...

    def search(self, vectors: "np.ndarray", k: int, where: Filter | None = None) -> list[list[Hit]]:
        """The nearest items of each vector by cosine, best first, those of one score by id.

        Shapes: [queries, dimensions], float32 of length 1.
        """
        ...

    def get(self, ids: Sequence[str]) -> list[Item]:
        """Those that are there, with their vectors, in no order."""
        ...

    def page(self, after: str, limit: int, with_vectors: bool = False) -> list[Item]:
        """The next items in the order of ids."""
        ...

    def stats(self) -> IndexStats:
        """How much there is; cheap."""
        ...

    def compact(self) -> None:
        """Do what makes later searches quick, such as building a graph; may take minutes."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class IndexKind(Protocol):
    """Where the stores of a search process are kept: one index each, by the store's id."""

    def open(self, name: str, dimensions: int) -> VectorIndex:
        """The index of a store, made where there is none."""
        ...

    def drop(self, name: str) -> None:
        """Delete the index of a store, if there is one."""
        ...

    def close(self) -> None: ...


class SearchUnavailable(SettingsError):
    """An index that cannot be used until the operator mends what the message names."""


#: The writable indexes by the scheme of `VLM_SEARCH__INDEX`: what makes one, given the whole URL.
INDEXES = {
    "lance": "search.lance:open_lance",
    "qdrant": "search.qdrant:open_qdrant",
    "qdrants": "search.qdrant:open_qdrant",
}
INSTALL = "pip install 'vlm-fleet[search]'"


def open_indexes(url: str) -> IndexKind:
    """The indexes behind a URL: `lance:///DIRECTORY`, `qdrant://HOST:6333`. Raises: SearchUnavailable."""
    scheme = url.partition(":")[0]
    if scheme not in INDEXES:
        known = ", ".join(f"{name}://" for name in INDEXES)
        raise SearchUnavailable(f"VLM_SEARCH__INDEX: there is no index {scheme!r}; write {known}")
    try:
        return resolve_name(INDEXES[scheme])(url)
    except ModuleNotFoundError as error:
        raise SearchUnavailable(
            f"vector stores of the kind {scheme} need the package {error.name!r}: {INSTALL}"
        ) from None


def require(package: str, use: str) -> None:
    """Raises: SearchUnavailable where a package of the extra is missing."""
    try:
        resolve_name(package)
    except ModuleNotFoundError as error:
        raise SearchUnavailable(f"{use} needs the package {error.name!r}: {INSTALL}") from None
