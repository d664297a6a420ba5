"""The configured package store, and the errors for its failures."""

import asyncio
import logging

from gateway.http.errors import NotFound, record_unreadable, store_unavailable
from shared.packages.deployments import Unreadable
from shared.packages.store import PackageStore, StoreError, open_store

logger = logging.getLogger(__name__)


class ConfiguredStore:
    """A package store that is opened on first use."""

    def __init__(self, url: str) -> None:
        """`url` empty: no store."""
        self.url = url
        self._store: PackageStore | None = None

    async def open(self) -> PackageStore:
        """Raises: NotFound, StoreError."""
        if not self.url:
            raise NotFound(
                "Deployments are off: set VLM_DEPLOY__STORE for gateways and nodes.",
                code="deployments_off",
            )
        if self._store is None:
            self._store = await asyncio.to_thread(open_store, self.url)
        return self._store


def store_error(error: Exception) -> Exception:
    """The error of a failure of the store, without its message."""
    if not isinstance(error, Unreadable | StoreError):
        return error
    logger.error("%s", error)
    if isinstance(error, Unreadable):
        return record_unreadable()
    return store_unavailable()
