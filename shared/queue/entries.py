"""The entries of one queue in Redis, as one worker reads and removes them."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from shared.queue.keys import GROUP, QUEUE_TTL_S, WAKEUPS_TTL_S, RedisKeys, to_ms
from shared.queue.scripts import REAP, TAKE
from shared.redis.client import Command, Part, RedisLink, RedisSender, named, with_ttl

Entry = tuple[bytes, list[bytes]]

#: Consumers without pending entries that were not seen for this long are deleted.
FORGET_AFTER_S = 3600.0
#: Maximum number of entries in one reply that are pending for a worker but that the worker does not hold.
MAX_UNKNOWN = 1000


class QueueEntries:
    """One worker's view of one queue. `num_backlog`: length of the backlog as last read."""

    def __init__(
        self, sender: RedisSender, reader: RedisLink, keys: RedisKeys, model: str, worker_id: str
    ) -> None:
        self._sender = sender
        self._reader = reader
        self._worker_id = worker_id
        self._queue = keys.queue(model)
        self._wakeups = keys.wakeups(model, worker_id)
        self._seen: list[bytes] = []  # wakeups that are not acknowledged yet
        self._last_wakeup = b"0"  # the last entry that `pop_lost` has read
        self._batch_keys = (keys.queue(model), keys.backlog(model))
        self._requests = keys.requests(model)
        self._read = ("XREADGROUP", "GROUP", GROUP, worker_id, "COUNT")
        self.num_backlog = 0

    async def wait(
        self, count: int, block_s: float, and_then: Command
    ) -> tuple[Sequence[Entry], Any]:
        """Read up to `count` entries of the queue, then run the command `and_then`. Both are sent in one write.

        Waits for an entry, or for a wakeup, which means that a request was reserved for this worker. Returns the
        entries and the reply of `and_then`, which can be an error. Raises: RedisError.
        """
        seen, self._seen = self._seen, []
        commands: list[Command] = [("XACK", self._wakeups, GROUP, *seen)] if seen else []
        streams = ("STREAMS", self._queue, self._wakeups, ">", ">")
        read = (*self._read, count, "BLOCK", to_ms(block_s), *streams)
        *_, reply, answer = await self._reader.exchange([*commands, read, and_then])
        if isinstance(reply, ResponseError):
            await self._handle_missing_queue(reply)
            await self._create(self._wakeups, WAKEUPS_TTL_S)
            has_claimed = isinstance(answer, list) and answer
            return ([], answer) if has_claimed else await self.wait(count, block_s, and_then)
        if isinstance(reply, Exception):
            raise reply
        found = {stream.decode(): entries for stream, entries in reply or ()}
        self._seen = [entry_id for entry_id, _ in found.get(self._wakeups, ())]
        return found.get(self._queue, ()), answer

    async def take(self, count: int, age_s: float | None = None) -> Sequence[Entry]:
        """Read up to `count` entries without waiting: batch calls if no other calls wait. Raises: RedisError.

        `age_s`: the oldest batch call joins the queue after waiting that long.
        """
        arguments = named(
            requests=self._requests,
            group=GROUP,
            worker=self._worker_id,
            count=count,
            age_ms=None if age_s is None else to_ms(age_s),
        )
        try:
            entries, self.num_backlog = await self._sender.run(TAKE, self._batch_keys, arguments)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return entries

    async def refresh_num_backlog(self) -> None:
        self.num_backlog = await self._sender.execute_soon("XLEN", self._batch_keys[1])

    async def keep_wakeups(self) -> None:
        """Renew the stream of wakeups, or create it. Raises: RedisError."""
        if not await self._sender.execute("PEXPIRE", self._wakeups, to_ms(WAKEUPS_TTL_S)):
            await self._create(self._wakeups, WAKEUPS_TTL_S)

    async def end_reservations(self) -> None:
        """Delete the stream of wakeups, so that no request is reserved for this worker. Raises: RedisError."""
        await self._sender.execute("DEL", self._wakeups)

    async def idle(self, count: int, lease_s: float, held: Collection[bytes]) -> Sequence[bytes]:
        """Up to `count` entries whose lease has expired, without the entries `held` by this worker."""
        # Not XAUTOCLAIM: it stops after 10 x COUNT entries, whose leases may all be valid.
        most = count + len(held)
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(lease_s), "-", "+", most)
        idle = await self._ask(*command)
        me = self._worker_id.encode()
        others = [i[0] for i in idle if i[1] != me or i[0] not in held]
        return others[:count]

    async def seize(self, entry_ids: Sequence[bytes], lease_s: float) -> Sequence[Entry]:
        """Take over entries whose lease has expired. Raises: RedisError.

        Only one of several workers gets an entry, because XCLAIM resets its idle time.
        """
        command = ("XCLAIM", self._queue, GROUP, self._worker_id, to_ms(lease_s))
        return [entry for entry in await self._sender.execute(*command, *entry_ids) if entry]

    async def renew(self, entry_ids: Sequence[bytes], age_ms: int) -> set[bytes]:
        """Renew the leases of this worker's entries that are at least `age_ms` old. Raises: RedisError.

        Returns the renewed entries. An entry that another worker has just claimed is younger, and is not renewed.
        """
        if not entry_ids:
            return set()
        command = ("XCLAIM", self._queue, GROUP, self._worker_id, age_ms)
        return set(await self._ask(*command, *entry_ids, "JUSTID"))

    async def pop_lost(self) -> set[bytes] | None:
        """Entries that this worker lost since the last call, from its stream of wakeups. Raises: RedisError.

        None: the stream may have a gap, because Redis has trimmed, deleted or lost it. The next call returns the
        entries that are lost after this call.
        """
        found = await self._sender.execute_soon("XRANGE", self._wakeups, self._last_wakeup, "+")
        if found and found[0][0] == self._last_wakeup:
            self._last_wakeup = found[-1][0]
            return {fields[1] for _, fields in found[1:] if fields[0] == b"lost"}
        self._last_wakeup = b"0"
        with suppress(ResponseError):  # memory is full
            mark = await self._sender.execute("XADD", self._wakeups, "NOMKSTREAM", "*", "mark", "")
            self._last_wakeup = mark or b"0"  # None: there is no stream
        return None

    async def unknown(self, idle_s: float, held: Collection[bytes]) -> Sequence[bytes]:
        """Entries that are pending for this worker in Redis, but not `held`. Raises: RedisError."""
        most = len(held) + MAX_UNKNOWN
        command = ("XPENDING", self._queue, GROUP, "IDLE", round(idle_s * 1000), "-", "+", most)
        pending = await self._ask(*command, self._worker_id)
        return [entry[0] for entry in pending if entry[0] not in held]

    async def find(self, entry_id: bytes) -> Entry | None:
        found = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
        return found[0] if found else None

    async def remove(self, entry_ids: Sequence[bytes]) -> None:
        """Delete entries that have no request. Raises: RedisError."""
        await self._sender.execute("XACK", self._queue, GROUP, *entry_ids)
        await self._sender.execute("XDEL", self._queue, *entry_ids)

    async def create_group(self) -> None:
        """Create the queue and its group, unless they exist. Raises: RedisError."""
        await self._create(self._queue, QUEUE_TTL_S)

    async def _create(self, stream: str, ttl_s: float) -> None:
        command = ("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
        try:
            await self._sender.execute(*with_ttl(stream, to_ms(ttl_s), *command))
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def reap(self, leaving: str = "") -> None:
        """Delete consumers without entries: idle consumers, and `leaving`. Raises: RedisError."""
        await self._sender.run(
            REAP, (self._queue,), named(group=GROUP, worker=leaving, idle_ms=to_ms(FORGET_AFTER_S))
        )

    async def _ask(self, *command: Part) -> Sequence[Any]:
        """Run a command on the group. If Redis has lost the queue, create it, and return an empty reply."""
        try:
            return await self._sender.execute(*command)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return ()

    async def _handle_missing_queue(self, error: ResponseError) -> None:
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            raise error
        await self.create_group()
