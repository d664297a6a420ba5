"""Sessions of applications: the records of sessions, of their tasks, and of their open tasks.

The results of tasks are in the queue's logs of their calls. A session expires if it is not used for its `ttl_s`.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.packages.deployments import Resources
from shared.protocol import BlobRef, Priority, encode
from shared.queue.api import QueueUnavailable
from shared.queue.keys import RedisStore, to_ms
from shared.redis.client import load_script, redis_errors_as, with_ttl

_SCRIPTS = Path(__file__).parent / "scripts"
OPEN_SESSION = load_script(_SCRIPTS / "open_session.lua")
CLOSE_SESSION = load_script(_SCRIPTS / "close_session.lua")
LIST_SESSIONS = load_script(_SCRIPTS / "list_sessions.lua")
ADD_TASK = load_script(_SCRIPTS / "add_task.lua")
SETTLE_TASKS = load_script(_SCRIPTS / "settle_tasks.lua")

Ended = Literal["succeed", "failed", "cancelled"]
ENDED: tuple[Ended, ...] = ("succeed", "failed", "cancelled")
_INDEX_TTL_S = 7 * 24 * 3600.0
_TO_COME = "+"  #: prefix of the id of a session that is reserved, but not created yet
_COMES_WITHIN_S = 60.0
_MAX_SETTLED = 500  #: tasks per script; Redis serves other clients between two scripts


class Session(msgspec.Struct, frozen=True):
    """A session as requested. Units: seconds; `created_at` since the epoch."""

    id: str
    owner: str  #: hash of the API key
    application: str
    created_at: float
    idle_s: float  #: time without a new task until it expires; results are kept as long
    timeout_s: float  #: time limit of each task, including its wait
    priority: Priority = Priority.INTERACTIVE
    common: BlobRef | None = None
    #: Instances of the application, added up over its open sessions; 0: as deployed.
    min_instances: int = 0
    max_instances: int = 0
    resources: Resources | None = None  #: minimum per instance

    @property
    def ttl_s(self) -> float:
        return self.idle_s + self.timeout_s


class SessionState(msgspec.Struct, frozen=True):
    """The state of a session. `ended`: number of ended tasks by outcome."""

    session: Session
    state: Literal["open", "closed"]
    ended: dict[str, int]
    num_open: int = 0  #: tasks without a recorded end
    open_tasks: list["TaskRecord"] = []  #: all open tasks, or none if there are more than the limit


class TaskRecord(msgspec.Struct, frozen=True):
    """A task of a session, and its call. Units: seconds since the epoch."""

    id: str
    request_id: str
    model: str  #: the model whose queue has the call
    package: str
    fingerprint: str  #: hash of its input
    created_at: float
    deadline_at: float
    input: str = ""  #: the first characters, to be shown


class TaskRefused(Exception):
    """The session does not accept the task. `reason`: closed, full or gone."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_sessions = msgspec.json.Decoder(Session)
_tasks = msgspec.json.Decoder(TaskRecord)


@redis_errors_as(QueueUnavailable)
class SessionStore(RedisStore):
    """The sessions of all owners. All methods raise QueueUnavailable."""

    async def reserve(self, session: Session, max_sessions: int) -> bool:
        """Reserve one of the owner's `max_sessions` sessions, not counting expired ones. Returns False if all are used.

        Adds the reservation before it counts, so that concurrent calls cannot exceed `max_sessions`.
        """
        index = self._keys.sessions(session.owner)
        await self._note(session, _TO_COME + session.id)
        if await self._ask("ZCARD", index) > max_sessions:
            await self._forget_gone(index, session.created_at)
            if await self._ask("ZCARD", index) > max_sessions:
                await self._ask("ZREM", index, _TO_COME + session.id)
                return False
        return True

    async def _note(self, session: Session, name: str) -> None:
        index = self._keys.sessions(session.owner)
        command = ("ZADD", index, int(1000 * session.created_at), name)
        await self._ask(*with_ttl(index, to_ms(_INDEX_TTL_S), *command))

    async def _forget_gone(self, index: str, now: float) -> None:
        """Remove expired sessions, and old reservations, from the index."""
        late = await self._ask("ZRANGEBYSCORE", index, "-inf", int(1000 * (now - _COMES_WITHIN_S)))
        names = [
            name
            for name in await self._ask("ZRANGE", index, 0, -1)
            if name in late or not name.startswith(_TO_COME.encode())
        ]
        keys = [self._keys.session(name.decode()) for name in names]
        found = await asyncio.gather(*(self._ask("EXISTS", key) for key in keys))
        if gone := [name for name, is_there in zip(names, found, strict=True) if not is_there]:
            await self._ask("ZREM", index, *gone)

    async def create(self, session: Session) -> None:
        keys = (self._keys.session(session.id),)
        await self._run(OPEN_SESSION, keys, encode(session), ttl_ms=to_ms(session.ttl_s))
        await self._note(session, session.id)
        await self.keep_limits(session)
        await self._confirm(("EXISTS", *keys))
        limits, now = self._keys.session_limits(session.application), int(session.created_at)
        await self._ask("ZREMRANGEBYSCORE", limits, "-inf", now)
        await self._ask("ZREM", self._keys.sessions(session.owner), _TO_COME + session.id)

    async def keep_limits(self, session: Session) -> None:
        key = self._keys.session_limits(session.application)
        until = int(time.time() + session.ttl_s)  # noqa: TID251
        command = ("ZADD", key, until, _limits(session))
        await self._ask(*with_ttl(key, to_ms(_INDEX_TTL_S), *command))

    async def find(self, session_id: str, max_open: int = 0) -> SessionState | None:
        """The state of a session; None if it does not exist. `max_open`: as in `page`."""
        [found] = await self._states([session_id], max_open)
        return found

    async def _states(self, session_ids: Sequence[str], max_open: int) -> list[SessionState | None]:
        if not session_ids:
            return []
        pairs = ((self._keys.session(each), self._keys.session_open(each)) for each in session_ids)
        keys = tuple(key for pair in pairs for key in pair)
        found = await self._run(LIST_SESSIONS, keys, max_open=max_open)
        return [_to_state(fields) if fields[0] else None for fields in found]

    async def page(
        self, owner: str, after: str, limit: int, max_open: int
    ) -> tuple[list[SessionState], bool] | None:
        """A page of an owner's sessions, the latest first, and whether there are more. None: `after` does not exist.

        `max_open`: maximum number of open tasks to read, over all sessions of the page.
        """
        index = self._keys.sessions(owner)
        while True:
            rank = await self._ask("ZREVRANK", index, after) if after else -1
            if rank is None:
                return None
            names: list[bytes] = []
            while len(names) <= limit and (
                later := await self._ask("ZREVRANGE", index, rank + 1, rank + 1 + limit)
            ):
                names += [name for name in later if not name.startswith(_TO_COME.encode())]
                rank += len(later)
            shown = list(dict.fromkeys(names))[:limit]  # a new session shifts ranks between reads
            found = await self._states([name.decode() for name in shown], max_open)
            gone = [name for name, state in zip(shown, found, strict=True) if state is None]
            if not gone:
                return [state for state in found if state is not None], len(names) > limit
            await self._ask("ZREM", index, *gone)

    async def close_session(self, session: Session) -> None:
        await self._run(CLOSE_SESSION, (self._keys.session(session.id),))
        await self._ask("ZREM", self._keys.session_limits(session.application), _limits(session))
        await self._confirm()

    async def forget(self, session: Session) -> None:
        await self.close_session(session)
        for key in self._task_keys(session.id):
            await self._ask("DEL", key)
        await self._ask("ZREM", self._keys.sessions(session.owner), session.id)

    async def add(
        self, session: Session, task: TaskRecord, max_tasks: int
    ) -> tuple[TaskRecord, str]:
        """Record a task before it is queued. Returns the task and `new`, or the known task with this id and its state.

        Raises: TaskRefused.
        """
        keys, ttl_ms = self._task_keys(session.id), to_ms(session.ttl_s)
        verdict, known = await self._run(
            ADD_TASK,
            keys,
            encode(task),
            id=task.id,
            at=task.created_at,
            max_tasks=max_tasks,
            ttl_ms=ttl_ms,
        )
        if verdict == b"known":
            return _read(known)
        if verdict != b"added":
            raise TaskRefused(verdict.decode())
        return task, "new"

    async def confirm(self, session_id: str, task: TaskRecord) -> None:
        """Wait until a replica has a task, if there is a replica."""
        await self._confirm(("HEXISTS", self._keys.session_tasks(session_id), task.id))

    async def settle(self, session_id: str, states: Mapping[str, str]) -> None:
        """Record the outcomes of tasks by id; `forgotten`: the task was not queued."""
        pairs, keys = list(states.items()), self._task_keys(session_id)
        for first in range(0, len(pairs), _MAX_SETTLED):
            await self._run(SETTLE_TASKS, keys, states=dict(pairs[first : first + _MAX_SETTLED]))

    async def task(self, session_id: str, task_id: str) -> tuple[TaskRecord, str] | None:
        """A task and its state: `open`, or its outcome."""
        found = await self._ask("HGET", self._keys.session_tasks(session_id), task_id)
        return None if found is None else _read(found)

    async def tasks(self, session_id: str) -> list[TaskRecord]:
        """All tasks of a session, unordered."""
        found = await self._ask("HVALS", self._keys.session_tasks(session_id))
        return [_read(each)[0] for each in found]

    async def task_page(
        self, session_id: str, after: str, limit: int
    ) -> tuple[list[tuple[TaskRecord, str]], bool] | None:
        """A page of tasks, the oldest first, and whether there are more. None: `after` does not exist."""
        order = self._keys.session_order(session_id)
        rank = await self._ask("ZRANK", order, after) if after else -1
        if rank is None:
            return None
        ids = await self._ask("ZRANGE", order, rank + 1, rank + 1 + limit)
        key = self._keys.session_tasks(session_id)
        found = await self._ask("HMGET", key, *ids[:limit]) if ids else []
        return [_read(each) for each in found if each is not None], len(ids) > limit

    def _task_keys(self, session_id: str) -> list[str]:
        keys = self._keys
        kinds = (keys.session, keys.session_tasks, keys.session_open, keys.session_order)
        return [key(session_id) for key in kinds]


def _limits(session: Session) -> str:
    return f"{session.id} {session.min_instances} {session.max_instances}"


def _to_state(fields: Sequence[Any]) -> SessionState:
    record, state, *counts, num_open, tasks = fields
    return SessionState(
        _sessions.decode(record), "open" if state == b"open" else "closed",
        dict(zip(ENDED, map(int, counts), strict=True)), num_open, [_tasks.decode(task) for task in tasks],
    )  # fmt: skip


def _read(value: bytes) -> tuple[TaskRecord, str]:
    state, _, record = value.partition(b" ")
    return _tasks.decode(record), state.decode()
