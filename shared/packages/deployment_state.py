"""The state of deployments and nodes in Redis; it can be restored from the package store."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shared.packages.rollout import App, LogLine, NodeRecord
from shared.protocol import encode
from shared.queue.keys import RedisStore, to_ms
from shared.redis.client import load_script, named, with_ttl

_SCRIPTS = Path(__file__).parent / "scripts"
PUT_APP = load_script(_SCRIPTS / "put_app.lua")
CLAIM_SLOT = load_script(_SCRIPTS / "claim_slot.lua")
#: Time until a slot claim expires, unless the node reports the slot.
CLAIM_S = 10.0
#: Time to live of the records after a node last renewed them.
APPS_TTL_S = 24 * 3600.0

#: Time to live of a request to drain a node. The node must read the request before it expires.
DRAIN_TTL_S = 60.0

#: Maximum length of a deployment's log.
MAX_LOG_LINES = 1000
LOG_TTL_S = 24 * 3600.0

_apps = msgspec.json.Decoder(App)
_nodes = msgspec.json.Decoder(NodeRecord)
_lines = msgspec.json.Decoder(LogLine)


def _to_app(value: bytes) -> App:
    version, _, record = value.partition(b" ")
    return replace(_apps.decode(record), version=int(version))


class DeploymentState(RedisStore):
    """Records of deployments, slot claims and nodes. All methods raise RedisError."""

    #: Names of deployments whose records the last call of `apps` could not decode.
    unreadable: frozenset[str] = frozenset()

    async def apps(self) -> dict[str, App]:
        """All deployments by name. Records that this release cannot decode are left out."""
        found = await self._ask("HGETALL", self._keys.apps)
        apps: dict[str, App | None] = {}
        for key, record in zip(found[::2], found[1::2], strict=True):
            name = key.decode(errors="replace")
            apps[name] = self._decode(f"deployment {name!r}", record, _to_app)
        self.unreadable = frozenset(name for name, app in apps.items() if app is None)
        return {name: app for name, app in apps.items() if app is not None}

    async def without_lost(self) -> dict[str, App]:
        """All deployments, without the instances of lost nodes: only another node removes those from the records."""
        apps = await self.apps()
        nodes = await self.nodes() if apps else {}
        for name, app in apps.items():
            if lost := {slot.node for slot in app.slots if slot.node} - nodes.keys():
                slots = tuple(slot for slot in app.slots if slot.node not in lost)
                message = app.message or f"lost nodes: {', '.join(sorted(lost))}"
                apps[name] = replace(app, slots=slots, message=message)
        return apps

    async def put(self, before: App | None, after: App) -> App | None:
        """Replace a record by compare-and-set. Returns the new record, or None if `before` is outdated."""
        version = before.version if before is not None else 0
        after = replace(after, version=version + 1)
        record = b"%d " % after.version + encode(after)
        return after if await self._put(after.name, version, record) else None

    async def remove(self, app: App) -> bool:
        """Delete a deployment. Returns False if its record has changed since it was read."""
        return await self._put(app.name, app.version, b"")

    async def _put(self, name: str, version: int, record: bytes) -> bool:
        arguments = named(record, name=name, version=version, ttl_ms=to_ms(APPS_TTL_S))
        return bool(await self._sender.run(PUT_APP, [self._keys.apps], arguments))

    async def claim(self, name: str, slots: Sequence[int], node: str) -> int | None:
        """Claim the first free slot of `slots`. Returns its id, or None if no slot is free."""
        arguments = named(
            ids=[str(slot) for slot in slots], node=node,
            lease_ms=to_ms(CLAIM_S), ttl_ms=to_ms(2 * CLAIM_S),
        )  # fmt: skip
        place = await self._sender.run(CLAIM_SLOT, [self._keys.claims(name)], arguments)
        return slots[int(place) - 1] if place else None

    async def keep(self) -> None:
        """Renew the records' time to live."""
        await self._sender.execute("PEXPIRE", self._keys.apps, to_ms(APPS_TTL_S))

    async def announce(self, node: NodeRecord, ttl_s: float) -> None:
        """Write a node's record; it expires after `ttl_s`."""
        await self._sender.execute(
            "SET", self._keys.node(node.id), encode(node), "PX", to_ms(ttl_s)
        )
        nodes = self._keys.nodes
        command = with_ttl(nodes, to_ms(APPS_TTL_S), "SADD", nodes, node.id)
        await self._sender.execute(*command)

    async def withdraw(self, node_id: str) -> None:
        keys = (self._keys.node(node_id), self._keys.node_drain(node_id))
        await self._withdraw(self._keys.nodes, node_id, *keys)

    async def drain(self, node_id: str) -> None:
        """Request that a node drains its instances and exits."""
        await self._ask("SET", self._keys.node_drain(node_id), 1, "PX", to_ms(DRAIN_TTL_S))

    async def is_told_to_drain(self, node_id: str) -> bool:
        return bool(await self._ask("EXISTS", self._keys.node_drain(node_id)))

    async def session_limits(self, name: str, now: float) -> tuple[int, int]:
        """The sums of `min_instances` and `max_instances` over the open sessions of an application.

        A maximum of 0 means unlimited: at least one session has no maximum.
        """
        key = self._keys.session_limits(name)
        found = await self._sender.execute("ZRANGEBYSCORE", key, int(now), "+inf")
        pairs = [tuple(map(int, member.split()[1:])) for member in found]
        most = sum(pair[1] for pair in pairs) if all(pair[1] for pair in pairs) else 0
        return sum(pair[0] for pair in pairs), most

    async def add_log(self, name: str, lines: Sequence[LogLine]) -> None:
        """Append log lines of a deployment's instances; the latest `MAX_LOG_LINES` are kept."""
        key = self._keys.app_log(name)
        command = with_ttl(key, to_ms(LOG_TTL_S), "RPUSH", key, *map(encode, lines))
        await self._sender.execute(*command)
        await self._sender.execute("LTRIM", key, -MAX_LOG_LINES, -1)

    async def log(self, name: str, limit: int) -> list[LogLine]:
        """The latest log lines of a deployment's instances, oldest first."""
        key = self._keys.app_log(name)
        found = await self._ask("LRANGE", key, -limit, -1)
        return [_lines.decode(line) for line in found]

    async def nodes(self) -> dict[str, NodeRecord]:
        nodes = await self._members(self._keys.nodes, self._keys.node, _nodes.decode)
        return {node.id: node for node in nodes}

    async def now(self) -> float:
        """Redis's clock, in epoch seconds."""
        seconds, microseconds = await self._ask("TIME")
        return int(seconds) + int(microseconds) / 1e6
