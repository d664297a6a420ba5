"""A gateway's mailbox: one stream per model, to which workers post events, and one reader for all streams.

`on_gap` is called if events may be missing: the stream was trimmed, Redis lost the mailbox, or an entry cannot be
read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.queue.api import QueueUnavailable
from shared.queue.keys import MAILBOX_TTL_S, RedisKeys, to_ms
from shared.redis.client import BLOCK_S, RedisLink, RedisSender, redis_errors_as, with_ttl

logger = logging.getLogger(__name__)

MAX_ENTRIES_PER_READ = 512
LONGEST_PAUSE_S = 1.0


class RedisMailbox:
    """The mailboxes of one gateway: a `Mailbox`. `on_gap(model)` is called when events of a model may be missing.

    `on_failure` is called when Redis does not answer. A mailbox of a model that is not needed (`is_needed(model)`) is
    no longer read or renewed, until it is opened again.
    """

    def __init__(
        self,
        redis_blocking: Redis,
        prefix: str,
        gateway_id: str,
        on_gap: Callable[[str], None] = lambda model: None,
        is_needed: Callable[[str], bool] = lambda model: True,
        renew_every_s: float = MAILBOX_TTL_S / 6,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._keys = RedisKeys(prefix)
        self.gateway_id = gateway_id
        self._on_gap = on_gap
        self._is_needed = is_needed
        self._renew_every_s = renew_every_s
        self._on_failure = on_failure
        self._reader = RedisLink(redis_blocking)
        self._sender = RedisSender(redis_blocking)
        self._last_ids: dict[str, bytes] = {}  # by key: the last entry that was read
        self._models: dict[str, str] = {}  # by key
        self._opened = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def models(self) -> set[str]:
        """The models whose mailboxes are open."""
        return set(self._models.values())

    @redis_errors_as(QueueUnavailable)
    async def open(self, models: Iterable[str]) -> None:
        """Create the mailboxes of these models, unless they are open."""
        for model in models:
            key = self._keys.mailbox(model, self.gateway_id)
            if key in self._last_ids:
                continue
            last_id = await self._create(key)
            if key not in self._last_ids:
                self._last_ids[key] = last_id
                self._models[key] = model
                self._reader.close()  # the next read includes this mailbox
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_mailboxes(), name="renew mailboxes")
        if self._last_ids:
            self._opened.set()

    async def _create(self, key: str) -> bytes:
        """Post an entry without events, so that the stream exists. Returns its id."""
        command = with_ttl(key, to_ms(MAILBOX_TTL_S), "XADD", key, "*", "opened", "1")
        return await self._sender.execute(*command)

    async def events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the model and the encoded events of each entry, without end.

        Continues after an outage, and reports a gap: Redis may have lost its last writes.
        """
        pause_s, was_lost = 0.0, False
        while True:
            await self._opened.wait()
            keys = list(self._last_ids)
            try:
                await self._reader.connect()
                if was_lost:
                    await self._restore()
                    was_lost = False
                keys = list(self._last_ids)  # also mailboxes that were opened meanwhile
                if not keys:
                    continue
                reply = await self._read(keys)
                pause_s = 0.0
            except RedisError as error:
                if list(self._last_ids) == keys:  # else: interrupted by `open`
                    was_lost = True
                    self._on_failure()
                    logger.warning("cannot read the mailbox: %s", error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, pause_s * 2 or 0.05)
                continue
            for key, entries in reply or ():
                name = key.decode()
                for entry_id, fields in entries:
                    if name not in self._last_ids:
                        break  # no call needs it now
                    self._last_ids[name] = entry_id
                    if fields[0] == b"events":
                        yield self._models[name], fields[1]
            await asyncio.sleep(0)  # receivers run before the next read is sent

    async def _read(self, keys: list[str]) -> list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]:
        ids = [self._last_ids[key] for key in keys]
        command = ("XREAD", "COUNT", MAX_ENTRIES_PER_READ, "BLOCK", to_ms(BLOCK_S), "STREAMS")
        reply = await self._reader.execute(*command, *keys, *ids)
        for key, entries in reply or ():
            # Streams are trimmed from their oldest end. As long as the entry read last is still there,
            # none after it is gone; only a reader that is far behind has to check.
            if len(entries) == MAX_ENTRIES_PER_READ and (name := key.decode()) in self._last_ids:
                model, last_id = self._models[name], self._last_ids[name]
                if not await self._reader.execute("XRANGE", name, last_id, last_id):
                    self._report_gap(model)
        return reply

    async def _restore(self) -> None:
        """Create the mailboxes that Redis lost, and report a gap for each model. Raises: RedisError."""
        for key, model in list(self._models.items()):
            if not await self._sender.execute("EXISTS", key):
                last_id = await self._create(key)
                if key in self._models:  # it may have been left meanwhile
                    self._last_ids[key] = last_id
            self._on_gap(model)

    def _report_gap(self, model: str) -> None:
        logger.warning("events of model %s may be missing", model)
        self._on_gap(model)

    async def _renew_mailboxes(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            for key, model in list(self._models.items()):
                if not self._is_needed(model):
                    self._leave(key)
                    continue
                try:
                    await self._renew(key)
                except RedisError as error:
                    logger.warning("cannot renew the mailbox: %s", error)

    def _leave(self, key: str) -> None:
        del self._last_ids[key], self._models[key]
        if not self._last_ids:
            self._opened.clear()

    async def _renew(self, key: str) -> None:
        """Renew the stream and drop read entries. Create it again if Redis lost it."""
        if await self._sender.execute("PEXPIRE", key, to_ms(MAILBOX_TTL_S)):
            await self._sender.execute("XTRIM", key, "MINID", "~", self._last_ids[key])
            return
        self._last_ids[key] = await self._create(key)
        self._reader.close()
        self._report_gap(self._models[key])

    async def close(self) -> None:
        """Stop renewing, delete the mailboxes and disconnect."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        if self._last_ids:
            with suppress(RedisError):
                await self._sender.execute("DEL", *self._last_ids)
        await self._sender.close()
        self._reader.close()
