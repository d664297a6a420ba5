"""Routes: the weights by which gateways split a name's requests between versions.

`routes/NAME/NUMBER.json` in the package store. As generations, each is written once, and the latest counts.
"""

import logging
import re
from collections.abc import Mapping

import msgspec

from shared.packages.deployments import Conflict, Unreadable, decode_record
from shared.packages.store import PackageStore
from shared.protocol import ModelCard

_KEY = re.compile(r"routes/([^/]+)/(\d{8})\.json")

logger = logging.getLogger(__name__)


class RoutedVersion(msgspec.Struct, frozen=True):
    """A version with its weight. The card is that of its workers, of which there may be none at times."""

    weight: int
    card: ModelCard

    @property
    def package(self) -> str:
        """The digest of the package."""
        return self.card.package.partition("@")[2].partition("+")[0]


class RouteRecord(msgspec.Struct, frozen=True):
    """The versions of a name by the start of their digest. None: the route is removed."""

    name: str
    number: int
    versions: dict[str, RoutedVersion] = {}

    @property
    def weights(self) -> dict[str, int]:
        return {version: each.weight for version, each in self.versions.items()}


def record_route(store: PackageStore, route: RouteRecord) -> None:
    """Raises: Conflict if its number exists; StoreError."""
    if not store.put_if_absent(_key(route.name, route.number), msgspec.json.encode(route)):
        raise Conflict(f"the route of {route.name} was changed at the same time; try again")


def read_routes(
    store: PackageStore, known: Mapping[str, RouteRecord] = {}
) -> dict[str, RouteRecord]:
    """The latest routes by name, also removed ones, without unreadable ones. Raises: StoreError.

    Those that are `known` are not read again.
    """
    found: dict[str, RouteRecord] = {}
    for name, numbers in _numbers(store).items():
        try:
            last, route = numbers[-1], known.get(name)
            found[name] = route if route and route.number == last else _read(store, name, last)
        except Unreadable as error:
            logger.error("%s", error)
    return found


def read_packages(store: PackageStore, num_kept: int) -> set[str]:
    """The packages of the last `num_kept` routes of each name. Raises: StoreError, such as Unreadable."""
    routes = (
        _read(store, name, number)
        for name, numbers in _numbers(store).items()
        for number in numbers[-num_kept:]
    )
    return {each.package for route in routes for each in route.versions.values()} - {""}


def _numbers(store: PackageStore) -> dict[str, list[int]]:
    """The numbers of the routes by name, in order."""
    numbers: dict[str, list[int]] = {}
    for match in filter(None, map(_KEY.fullmatch, store.list("routes"))):
        numbers.setdefault(match[1], []).append(int(match[2]))
    return numbers


def _read(store: PackageStore, name: str, number: int) -> RouteRecord:
    return decode_record(store, _key(name, number), RouteRecord)


def _key(name: str, number: int) -> str:
    return f"routes/{name}/{number:08d}.json"
