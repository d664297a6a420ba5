"""What lies in a model's queue, as a worker sees it: entries that wait, that it holds, and that
nobody holds any more.

Called by `RequestClaims`.
"""

from collections.abc import Sequence, Set
from typing import Any

from redis.exceptions import ResponseError

from shared.queue.keys import GROUP, QUEUE_TTL_S, RedisKeys, to_ms
from shared.queue.scripts import AGE, REAP, TAKE, named
from shared.redis.link import Command, RedisLink, RedisSender

Entry = tuple[bytes, list[bytes]]

#: Consumers that hold nothing and were not seen so long are forgotten.
FORGET_AFTER_S = 3600.0


class QueueEntries:
    """One worker's view of one queue. `num_batch_left` is how long the backlog was when it was last looked at."""

    def __init__(
        self, sender: RedisSender, reader: RedisLink, keys: RedisKeys, model: str, worker_id: str
    ) -> None:
        self._sender = sender
        self._reader = reader
        self._worker_id = worker_id
        self._queue = keys.queue(model)
        self._batch_keys = (keys.queue(model), keys.backlog(model))
        self._requests = keys.requests(model)
        self.num_batch_left = 0

    async def wait(
        self, count: int, block_s: float, and_then: Command
    ) -> tuple[Sequence[Entry], Any]:
        """Up to `count` entries that nobody has read, and what Redis says to `and_then`; waits for the first entry.

        The command stands behind the read, so that Redis does both at once when an entry comes. If it fails, that
        is its answer. Raises: RedisError.
        """
        read = ("XREADGROUP", "GROUP", GROUP, self._worker_id, "COUNT", count)
        where = ("BLOCK", to_ms(block_s), "STREAMS", self._queue, ">")
        reply, answer = await self._reader.exchange([(*read, *where), and_then])
        if isinstance(reply, ResponseError):
            await self._handle_missing_queue(reply)
            return [], None
        if isinstance(reply, Exception):
            raise reply
        return (reply[0][1] if reply else []), answer

    async def take(self, count: int) -> Sequence[Entry]:
        """Up to `count` entries, of batch work where nothing else waits; does not wait. Raises: RedisError."""
        arguments = named(requests=self._requests, group=GROUP, worker=self._worker_id, count=count)
        try:
            entries, self.num_batch_left = await self._sender.run(TAKE, self._batch_keys, arguments)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return entries

    async def age(self, age_s: float) -> None:
        """Let the oldest batch request into the queue, if it has waited that long. Raises: RedisError."""
        self.num_batch_left = await self._sender.run(
            AGE, self._batch_keys, named(requests=self._requests, age_ms=to_ms(age_s))
        )

    async def look_at_backlog(self) -> None:
        """Whether there is batch work. Raises: RedisError."""
        self.num_batch_left = await self._sender.execute("XLEN", self._batch_keys[1])

    async def idle(self, count: int, lease_s: float, held: Set[bytes]) -> Sequence[bytes]:
        """Up to `count` entries whose lease has run out, without those that this worker is busy with."""
        # Not XAUTOCLAIM: it gives up after looking at 10 x COUNT entries, which may all be alive.
        most = count + len(held)
        command = ("XPENDING", self._queue, GROUP, "IDLE", to_ms(lease_s), "-", "+", most)
        try:
            idle = await self._sender.execute(*command)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        me = self._worker_id.encode()
        others = [i[0] for i in idle if i[1] != me or i[0] not in held]
        return others[:count]

    async def seize(self, entry_ids: Sequence[bytes], lease_s: float) -> Sequence[Entry]:
        """Make entries ours whose lease has run out. Raises: RedisError.

        Of several workers that saw the same entry one gets it: taking it resets its idle time.
        """
        command = ("XCLAIM", self._queue, GROUP, self._worker_id, to_ms(lease_s))
        return [entry for entry in await self._sender.execute(*command, *entry_ids) if entry]

    async def unknown(self, idle_s: float, held: Set[bytes]) -> Sequence[bytes]:
        """What Redis counts as ours and is not held. Raises: RedisError."""
        command = ("XPENDING", self._queue, GROUP, "IDLE", round(idle_s * 1000), "-", "+", 1000)
        try:
            pending = await self._sender.execute(*command, self._worker_id)
        except ResponseError as error:
            await self._handle_missing_queue(error)
            return []
        return [entry[0] for entry in pending if entry[0] not in held]

    async def find(self, entry_id: bytes) -> Entry | None:
        """An entry by its id, if it is in the queue. Raises: RedisError."""
        found = await self._sender.execute("XRANGE", self._queue, entry_id, entry_id)
        return found[0] if found else None

    async def remove(self, entry_ids: Sequence[bytes]) -> None:
        """Take entries out of the queue that are no request's. Raises: RedisError."""
        await self._sender.execute("XACK", self._queue, GROUP, *entry_ids)
        await self._sender.execute("XDEL", self._queue, *entry_ids)

    async def create_group(self) -> None:
        """Make the queue and its group, unless they exist. Raises: RedisError."""
        try:
            await self._sender.execute("XGROUP", "CREATE", self._queue, GROUP, "0", "MKSTREAM")
            await self._sender.execute("PEXPIRE", self._queue, to_ms(QUEUE_TTL_S))
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def reap(self, leaving: str = "") -> None:
        """Forget consumers that hold nothing: old ones, and the one named. Raises: RedisError."""
        await self._sender.run(
            REAP, (self._queue,), named(group=GROUP, worker=leaving, idle_ms=to_ms(FORGET_AFTER_S))
        )

    async def _handle_missing_queue(self, error: ResponseError) -> None:
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            raise error
        await self.create_group()
