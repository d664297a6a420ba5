"""The served models, as registered by workers; refreshed in the background.

A model stays listed for two minutes after its last worker has stopped, while its requests wait in the queue. For a
day afterwards, requests to the model get 503. A deployment stays listed as long as it exists.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace
from redis.exceptions import RedisError

from gateway.http.errors import (
    ApiError,
    Forbidden,
    NotFound,
    Overloaded,
    record_unreadable,
    store_unavailable,
)
from shared.packages.deployment_state import DeploymentState
from shared.packages.deployments import RouteRecord, in_full, read_routes
from shared.packages.rollout import App
from shared.packages.store import PackageStore, StoreError
from shared.protocol import (
    PROTOCOL_VERSION,
    AdapterCard,
    Call,
    Generate,
    ModelCard,
    Priority,
    explain_versions,
)
from shared.queue.api import Affinity, QueueUnavailable
from shared.queue.registry import Registry, WorkerRecord
from shared.redis.client import OutageLog
from shared.settings.tree import ModelDefaults

READ_PAUSE_S = 5.0  #: minimum interval between two reads of the routes
_FIRST_READ_S = 2.0

logger = logging.getLogger(__name__)


class RouteTable:
    """Routes by name. A separate task reads the store periodically, because `ModelDirectory` must not wait for it."""

    def __init__(self, store: PackageStore | None) -> None:
        """Without a `store` there are no routes."""
        self._store = store
        self.is_known = store is None  #: whether the store was ever read
        self.records: Mapping[str, RouteRecord] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")

    def put(self, record: RouteRecord) -> None:
        """Add a route that was just recorded in the store."""
        self.records = {**self.records, record.name: record}

    async def refresh(self) -> None:
        """Start reading the store if a read is due. Waits only for the first read."""
        is_due = time.monotonic() - self._read_at >= READ_PAUSE_S
        is_idle = self._reading is None or self._reading.done()
        if self._store is not None and is_due and is_idle:
            self._read_at = time.monotonic()
            self._reading = asyncio.create_task(self._read(self._store), context=Context())
        if self._reading is not None and not self.is_known:
            await asyncio.wait({self._reading}, timeout=_FIRST_READ_S)

    async def _read(self, store: PackageStore) -> None:
        try:
            found = await asyncio.to_thread(read_routes, store, self.records)
        except StoreError as error:
            logger.warning("cannot read the routes: %s", error)
            return
        newer = {
            name: each for name, each in self.records.items()
            if name not in found or each.number > found[name].number
        }  # fmt: skip
        self.records = found | newer
        self.is_known = True


_REFRESH_PAUSE_S = 1.0
_STALE_AFTER_S = 5.0
_MISS_PAUSE_S = 0.1  #: minimum interval of early refreshes for unknown names
_ROUTES_KEPT_S = 60.0  #: how long deployments that Redis has lost are kept
_GONE_AFTER_S = 120.0  #: time after which a model without worker or deployment is not listed
_MAX_NAMES = 8  # maximum names of models in an error message
#: Maximum number of adapters with their own label in metrics. Further adapters are counted under their model's.
MAX_ADAPTER_LABELS = 200
OTHER = "other"  #: label of unknown models

OnModels = Callable[[Iterable[str]], Coroutine[Any, Any, None]]
OnDeployments = Callable[[Mapping[str, App], Sequence[WorkerRecord]], None]


@dataclass(frozen=True, slots=True)
class Route:
    """The versions of a name. Each of `others` serves its ratio of the requests, and `card` serves the remainder."""

    card: ModelCard
    others: tuple[tuple[ModelCard, float], ...] = ()

    def changed(self, change: Callable[[ModelCard], ModelCard]) -> "Route":
        """The route with each card replaced by `change(card)`."""
        others = tuple((change(card), share) for card, share in self.others)
        return Route(change(self.card), others)

    def pick(self, side: str) -> ModelCard:
        """The version for `side`, the id of a client or request. The same `side` always gets the same version."""
        digest = hashlib.blake2b(f"{self.card.name}\0{side}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest, "big") / 2**64
        for card, share in self.others:
            if point < share:
                return card
            point -= share
        return self.card


class ModelDirectory:
    """The model cards of the served models.

    `on_models`: called before requests to a new model are accepted. `deployments`: None if deployments are disabled.
    `on_deployments`: called on every refresh. `store`: the package store. `aliases`: models by alias; a served model
    of the same name takes precedence. `defaults`: defaults of sampling fields, by model name.
    """

    def __init__(
        self,
        registry: Registry,
        on_models: OnModels,
        redis_address: str,
        deployments: DeploymentState | None,
        on_deployments: OnDeployments,
        store: PackageStore | None,
        may_use: Callable[[str, str], bool] | None,
        aliases: Mapping[str, str],
        defaults: Mapping[str, ModelDefaults],
    ) -> None:
        self.may_use = may_use or (lambda tenant, name: True)
        self.registry = registry
        self.workers: list[WorkerRecord] = []
        self._on_deployments = on_deployments
        self._deployments = deployments
        self.routes: dict[str, Route] = {}  #: by name
        self._deployed: dict[str, Route] = {}  # the routes of deployments
        self._aliases = aliases
        self._defaults = {name: d.model_dump(exclude_none=True) for name, d in defaults.items()}
        self.aliases: dict[str, str] = {}  #: the aliases whose models are known
        self._routes_seen_at = float("-inf")
        self._apps: Mapping[str, App] = {}
        self.table = RouteTable(store)
        self._outage = OutageLog(redis_address)
        self.cards: dict[str, ModelCard] = {}
        self.adapters: dict[str, ModelCard] = {}  #: by `model:adapter`
        self._adapter_labels: set[str] = set()
        self._gone: frozenset[str] = frozenset()  # models without a worker for _GONE_AFTER_S
        self._other_versions: dict[str, ModelCard] = {}  # cards with another protocol version
        self.num_workers: Counter[str] = Counter()  #: by model
        #: By model: the capacity of its smallest worker, in concurrent requests.
        self.num_seats: dict[str, int] = {}
        self._on_models = on_models
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None  #: the early refresh for unknown names

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self._refreshed_at < _STALE_AFTER_S

    def served(self) -> list[ModelCard]:
        """The models, without aliases. A deployment is listed by its name, without its versions."""
        deployed = [route.card for name, route in self.routes.items() if name not in self.aliases]
        own = [
            card
            for card in self.cards.values()
            if not card.package or card.name.partition("@")[0] not in self.routes
        ]
        return [*deployed, *own]

    def usable(self, tenant: str) -> list[ModelCard]:
        """The models, adapters, deployments and aliases that a tenant may use, sorted by name."""
        deployed = {name: route.card for name, route in self.routes.items()}
        known = sorted((self.cards | self.adapters | deployed).items())
        return [card for name, card in known if self.may_use(tenant, name)]

    def resources(self, name: str) -> dict[str, Any] | None:
        """The resources of an instance of a deployment. None if the deployment is unknown."""
        app = self._apps.get(self.aliases.get(name, name))
        return in_full(app.active.needs) if app is not None and app.active is not None else None

    def target(self, name: str) -> str:
        """The model of an alias, even if it is unknown; other names are returned unchanged."""
        return self._aliases.get(name, name)

    def num_ready(self, name: str, side: str) -> int:
        """Number of ready workers for requests to `name`. `side`: as in `find`."""
        card = self._known(name, side)
        return 0 if card is None else self.num_workers[card.queue]

    def is_at_rest(self, name: str) -> bool:
        """Whether the name is a deployment that is scaled to zero. A request starts an instance."""
        app = self._apps.get(self.aliases.get(name, name))
        return app is not None and app.active is not None and app.desired == 0

    async def refresh(self) -> None:
        """Read the registry. Raises: QueueUnavailable, RedisError, OSError."""
        async with self._lock:
            known = await self.registry.models()
            workers = await self.registry.workers()  # after models: workers register before models
            known += sorted((worker.card for worker in workers), key=lambda card: card.created_at)
            deployed, versions = await self._read_routes({card.name for card in known})
            await self.table.refresh()
            routed = [each for each in self.table.records.values() if each.versions]
            versions += [v.card for each in routed for v in each.versions.values() if v.weight]
            served = {card.name for card in versions} | {worker.card.name for worker in workers}
            silent = await self.registry.silence_s({card.name for card in known} - served)
            self._gone = frozenset(n for n, silent_s in silent.items() if silent_s > _GONE_AFTER_S)
            known = [card for card in known if card.name not in self._gone]
            cards = {
                card.name: self._with_defaults(card)
                for card in (*versions, *known)
                if _is_spoken(card)
            }
            others = {card.name: card for card in known if not _is_spoken(card)}
            for worker in workers:
                if (card := cards.get(worker.card.name)) is not None:
                    cards[card.name] = _common_card(card, worker.card)
            if new := cards.keys() - self.cards.keys():
                # In a new context, as its tasks outlive the current request.
                await asyncio.create_task(self._on_models(sorted(new)), context=Context())
            self.cards = cards
            self._deployed = deployed
            routes = deployed | dict(_weighted(routed, cards))
            self.routes = {name: r.changed(self._with_defaults) for name, r in routes.items()}
            self.workers = workers
            self._on_deployments(self._apps, workers)
            live = [w.card for w in workers if w.card.adapters and _is_spoken(w.card)]
            self.adapters = {
                card.name: self._with_defaults(card) for card in _adapters(cards, live)
            }
            self._add_aliases()
            self._other_versions = others
            ready = [w for w in workers if w.state == "ready" and _is_spoken(w.card)]
            self.num_workers = Counter(w.card.name for w in ready)
            ready.sort(key=lambda worker: worker.max_num_seqs, reverse=True)
            self.num_seats = {w.card.name: w.max_num_seqs for w in ready}
            self._refreshed_at = time.monotonic()

    def _add_aliases(self) -> None:
        self.aliases = {}
        for name, target in self._aliases.items():
            card = self.cards.get(target) or self.adapters.get(target)
            route = Route(card) if card is not None else self.routes.get(target)
            if route is not None and self._known(name, "") is None:
                self.aliases[name] = target
                route = route.changed(partial(_renamed, name))
                self.routes[name] = route.changed(self._with_defaults)

    def _with_defaults(self, card: ModelCard) -> ModelCard:
        """The card with the operator's sampling defaults."""
        values = self._defaults.get(card.name)
        return replace(card, sampling=replace(card.sampling, **values)) if values else card

    async def _read_routes(
        self, known: Collection[str]
    ) -> tuple[dict[str, Route], list[ModelCard]]:
        """Deployments that can serve, and the cards of their versions, which may have no worker.

        A deployment that cannot be read keeps its last state. `known`: the registered models.
        """
        if self._deployments is None:
            return {}, []
        apps = self._apps = await self._deployments.without_lost()
        unreadable = self._deployments.unreadable
        if apps or unreadable:
            self._routes_seen_at = time.monotonic()
        elif time.monotonic() - self._routes_seen_at < _ROUTES_KEPT_S:
            return self._deployed, []  # Redis has lost them; nodes restore them from the store
        routes = {name: route for name, app in apps.items() if (route := _to_route(app))}
        for name in unreadable & self._deployed.keys():  # without versions that nodes have removed
            route = self._deployed[name]
            if route.card.parent in known:
                others = tuple(each for each in route.others if each[0].parent in known)
                routes[name] = Route(route.card, others)
        revisions = [revision for app in apps.values() for revision in app.revisions]
        return routes, [each.card for each in revisions if each.card is not None]

    async def keep_fresh(self) -> None:
        while True:
            try:
                await self.refresh()
            except (QueueUnavailable, RedisError, OSError) as error:
                self._outage.failed(error)
            except Exception:
                logger.exception("cannot refresh the models")
            else:
                self._outage.succeeded()
            await asyncio.sleep(_REFRESH_PAUSE_S)

    async def find(
        self, name: str, side: str = "", task: str = "", tenant: str = "", param: str = "model"
    ) -> ModelCard:
        """A model's card. `side`: id of the client or request, for `Route.pick`. `task`, `param`: for the error.

        Raises: NotFound; Forbidden if the tenant may not use the model; Overloaded if its workers have another protocol
        version; QueueUnavailable, RedisError, OSError.
        """
        self.check_use(tenant, name, param)
        card = self._known(name, side)
        if card is None:  # the model may have registered since the last refresh
            looked_at = self._refreshed_at
            await asyncio.sleep(looked_at + _MISS_PAUSE_S - time.monotonic())
            if self._refreshed_at == looked_at:  # refresh once for all concurrent callers
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self.refresh(), context=Context())
                await asyncio.shield(self._looking)
            card = self._known(name, side)
        if card is None:
            error = self.missing(name, task, tenant)
            error.param = error.param and param
            raise error
        return card

    def check_use(self, tenant: str, name: str, param: str = "model") -> None:
        """Raises: Forbidden if the tenant may not use the model."""
        if not self.may_use(tenant, name):
            message = "This API key may not use this model: GET /v1/models lists allowed models."
            raise Forbidden(message, param=param, code="model_not_allowed")

    def _known(self, name: str, side: str) -> ModelCard | None:
        card = self.cards.get(name) or self.adapters.get(name)
        if card is None and (route := self.routes.get(name)) is not None:
            card = route.pick(side)
        return card

    def missing(self, name: str, task: str = "", tenant: str = "") -> ApiError:
        """The error for a model without a usable worker or deployment. It lists models that the tenant may use."""
        name = self.target(name)
        if self._deployments is not None and name in self._deployments.unreadable:
            return record_unreadable()
        if self._gone.intersection((name, name.rpartition(":")[0])):
            message = "No worker serves the model now: start one, or send another model."
            return Overloaded("no_worker", message, code="no_worker", retry_after_s=10)
        other = self._other_versions.get(name)
        if other is None:
            return self._not_found(task, tenant) if self.table.is_known else store_unavailable()
        versions = explain_versions(PROTOCOL_VERSION, other.version)
        message = f"No worker of this model speaks this gateway's protocol: {versions}."
        return Overloaded("version", message, code="unsupported_version", retry_after_s=10)

    def _not_found(self, task: str, tenant: str) -> NotFound:
        known = self.cards | {name: route.card for name, route in self.routes.items()}
        offering = [
            name
            for name, card in known.items()
            if (not task or task in card.tasks) and self.may_use(tenant, name)
        ]
        live = sorted(offering, key=lambda name: (self.num_workers[name] == 0, name))
        names = ", ".join(live[:_MAX_NAMES])
        more = " and others, which GET /v1/models lists" if len(live) > _MAX_NAMES else ""
        any_ = f"any that offers the task {task}" if task else "any"
        served = f"send one of: {names}{more}" if names else f"no worker serves {any_} yet"
        what = "application" if task == "run" else "model"
        message = f"The {what} does not exist; {served}."
        return NotFound(message, param="model", code="model_not_found")

    def label(self, name: str) -> str:
        """A model's label in metrics: its name if it is known, else `other`. An alias has its model's label."""
        name = self.aliases.get(name, name)
        if name in self.cards or name in self.routes:
            return name
        adapter = self.adapters.get(name)
        if adapter is None:
            return OTHER
        if len(self._adapter_labels) < MAX_ADAPTER_LABELS:
            self._adapter_labels.add(name)
        return name if name in self._adapter_labels else adapter.parent


def _adapters(cards: Mapping[str, ModelCard], live: Iterable[ModelCard]) -> Iterator[ModelCard]:
    """Adapters of each model's live workers or, if they have none, of its card. Newer adapters replace older ones."""
    found: dict[str, dict[str, AdapterCard]] = {}
    for card in live:
        held = found.setdefault(card.name, {})
        for adapter in card.adapters:
            other = held.get(adapter.name)
            if adapter.digest and (other is None or other.created_at <= adapter.created_at):
                held[adapter.name] = adapter
    for card in cards.values():
        known = found.get(card.name) or {each.name: each for each in card.adapters if each.digest}
        for name, adapter in sorted(known.items()):
            yield replace(
                card,
                name=f"{card.name}:{name}",
                created_at=adapter.created_at,
                adapters=(),
                parent=card.name,
                adapter=adapter.digest,
            )


def _to_route(app: App) -> Route | None:
    """The route of a deployment. None if no version has ever been ready."""
    active, candidate = app.active, app.candidate
    if active is None or active.card is None:
        return None
    card = _renamed(app.name, active.card)
    if candidate is None or not candidate.is_canary or candidate.card is None:
        return Route(card)
    if not app.of(candidate.digest, "ready"):  # its instances are restarting
        return Route(card)
    return Route(card, ((_renamed(app.name, candidate.card), candidate.spec.canary),))


def _weighted(
    records: Iterable[RouteRecord], cards: Mapping[str, ModelCard]
) -> Iterator[tuple[str, Route]]:
    """Routes by weight. Versions keep the record's order, so that a change of weights moves few clients."""
    for record in records:
        found = [
            (_renamed(record.name, cards[each.card.name]), each.weight)
            for each in record.versions.values()
            if each.weight and each.card.name in cards
        ]
        total = sum(weight for _, weight in found)
        if found:
            others = tuple((card, weight / total) for card, weight in found[1:])
            yield record.name, Route(found[0][0], others)


def _renamed(name: str, card: ModelCard) -> ModelCard:
    """A card under the name of a deployment or an alias. Its calls use the same queue and adapter."""
    return replace(card, name=name, parent=card.queue)


def _common_card(card: ModelCard, other: ModelCard) -> ModelCard:
    """A card for the workers of both cards: with the smaller pixel limit, and only media that both accept."""
    for name in ("supports_video", "supports_audio"):
        if getattr(card, name) and not getattr(other, name):
            card = replace(card, **{name: False})
    limit = other.max_image_pixels
    if limit == 0 or 0 < card.max_image_pixels <= limit:
        return card
    return replace(card, max_image_pixels=limit, image_tokens=other.image_tokens)


def _is_spoken(card: ModelCard) -> bool:
    return card.version == PROTOCOL_VERSION


#: Number of leading characters that form the affinity key. Shorter prompts have none: recomputing them is cheap.
PREFIX_CHARS = 4000


def find_affinity(models: ModelDirectory, grace_s: float, call: Call) -> Affinity | None:
    """The affinity of a call. None: batch call, no generation, short prompt without images, one worker, or no grace."""
    if grace_s <= 0 or call.priority is Priority.BATCH:
        return None
    num_workers = models.num_workers[call.model]
    if num_workers < 2 or not isinstance(call.task, Generate):
        return None
    shared = call.task.images[0].sha256 if call.task.images else _prefix(call.task)
    if not shared:
        return None
    name = "\0".join((call.tenant, call.adapter, shared)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(name, digest_size=16).hexdigest()
    return Affinity(digest, num_workers, models.num_seats[call.model])


def _prefix(task: Generate) -> str:
    """The leading text, or an empty string if the text is short."""
    pieces, num_missing = [], PREFIX_CHARS
    for text in task.texts():
        pieces.append(text[:num_missing])
        num_missing -= len(pieces[-1])
        if num_missing == 0:
            return "".join(pieces)
    return ""
