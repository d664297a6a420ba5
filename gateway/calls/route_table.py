"""The routes of the package store, as this gateway knows them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import Context

from shared.packages.routes import RouteRecord, read_routes
from shared.packages.store import StoreError, open_store

READ_PAUSE_S = 5.0
#: Time limit of waiting for the first reading.
_FIRST_READ_S = 2.0

logger = logging.getLogger(__name__)


class RouteTable:
    """Routes by name. The store is read at intervals, beside the registry, which does not wait for it."""

    def __init__(self, store_url: str) -> None:
        """`store_url` empty: there are no routes."""
        self._url = store_url
        self.is_known = not store_url  #: whether the store was ever read
        self.records: Mapping[str, RouteRecord] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")

    def put(self, record: RouteRecord) -> None:
        """A route that was just recorded."""
        self.records = {**self.records, record.name: record}

    async def refresh(self) -> None:
        """Begin to read the store if it is time. Waits for the first reading alone."""
        is_due = time.monotonic() - self._read_at >= READ_PAUSE_S
        if self._url and is_due and (self._reading is None or self._reading.done()):
            self._read_at = time.monotonic()
            self._reading = asyncio.create_task(self._read(), context=Context())
        if self._reading is not None and not self.is_known:
            await asyncio.wait({self._reading}, timeout=_FIRST_READ_S)

    async def _read(self) -> None:
        try:
            store = await asyncio.to_thread(open_store, self._url)
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
