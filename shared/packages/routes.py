"""Routes: the weights by which gateways split the requests to a name between versions.

Each is a record `routes/NAME/NUMBER.json` of the package store. It is written once; the highest number applies.
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
    """A version and its weight. `card`: the model card of its workers, stored because no worker may be running."""

    weight: int
    card: ModelCard

    @property
    def package(self) -> str:
        """The digest of the package."""
        return self.card.package.partition("@")[2].partition("+")[0]


class RouteRecord(msgspec.Struct, frozen=True):
    """The versions of a name, by the first digits of their digests. None: the route was removed."""

    name: str
    number: int
    versions: dict[str, RoutedVersion] = {}

    @property
    def weights(self) -> dict[str, int]:
        return {version: each.weight for version, each in self.versions.items()}


def record_route(store: PackageStore, route: RouteRecord) -> None:
    """Raises: Conflict if its number exists; StoreError."""
    if not store.put_if_absent(_key(route.name, route.number), msgspec.json.encode(route)):
        raise Conflict(f"another client has just changed the route of {route.name}; try again")


def read_routes(
    store: PackageStore, known: Mapping[str, RouteRecord] = {}
) -> dict[str, RouteRecord]:
    """The latest route of each name, including removed routes. Unreadable routes are skipped. Raises: StoreError.

    `known`: routes that were read before, and are not read again.
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
    """The numbers of each name's routes, in ascending order."""
    numbers: dict[str, list[int]] = {}
    for match in filter(None, map(_KEY.fullmatch, store.list("routes"))):
        numbers.setdefault(match[1], []).append(int(match[2]))
    return numbers


def _read(store: PackageStore, name: str, number: int) -> RouteRecord:
    return decode_record(store, _key(name, number), RouteRecord)


def _key(name: str, number: int) -> str:
    return f"routes/{name}/{number:08d}.json"
