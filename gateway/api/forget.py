"""Deletes the stored data of a tenant: answers and images, sessions, batches, files, vector stores."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.batches.records import Batches
from gateway.calls.lifecycle import Lifecycle
from gateway.http.endpoint import owner_of
from gateway.http.errors import unavailable
from gateway.search import SearchClient
from shared.search import DropFile, DropStore, FileRecord, ListFiles, ListStores, Page, StoreRecord
from shared.sessions.store import SessionStore

_PAGE = 100
_ENDS_WITHIN_S = 20.0  #: until cancelled batches have ended
_POLL_S = 0.2


class Forgotten(msgspec.Struct):
    """Numbers of deleted objects."""

    answers: int = 0  #: of `/v1/responses`, and uploaded images
    sessions: int = 0
    batches: int = 0  #: with their files
    vector_stores: int = 0
    files: int = 0  #: for vector stores
    object: str = "key.forgotten"

    def add(self, other: "Forgotten") -> None:
        for name in ("answers", "sessions", "batches", "vector_stores", "files"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class TenantData:
    """The stores that have data of tenants."""

    _lifecycle: Lifecycle
    _sessions: SessionStore
    _batches: Batches | None
    _look_for_batches: Callable[[], None]
    _search: SearchClient

    async def forget(self, tenant: str) -> Forgotten:
        """Delete all data of a tenant. Idempotent. Raises: ApiError, QueueUnavailable, StoreError."""
        found = Forgotten(await self._lifecycle.kept.delete_all(tenant))
        found.sessions = await self._forget_sessions(owner_of(tenant, "session"))
        owner = owner_of(tenant)
        if self._batches is not None:
            found.batches = await self._forget_batches(self._batches, owner)
        if self._search.is_on:
            page = Page(limit=_PAGE)
            while stores := [
                each
                for each in await self._search.ask(
                    ListStores(tenant=owner, page=page), list[StoreRecord]
                )
                if not each.is_read_only  # collections are shared by all tenants
            ]:
                for store in stores:
                    await self._search.ask(DropStore(tenant=owner, store=store.id), bool)
                found.vector_stores += len(stores)
            while files := await self._search.ask(
                ListFiles(tenant=owner, page=page), list[FileRecord]
            ):
                for file in files:
                    await self._search.ask(DropFile(tenant=owner, file=file.id), bool)
                found.files += len(files)
        return found

    async def end_sessions(self, tenant: str) -> None:
        """Close a tenant's sessions and cancel their tasks. Idempotent. Raises: QueueUnavailable."""
        queue = self._lifecycle.dispatcher.queue
        owner, after, has_more = owner_of(tenant, "session"), "", True
        while has_more and (page := await self._sessions.page(owner, after, _PAGE, 0)) is not None:
            found, has_more = page
            for session in [each.session for each in found]:
                await self._sessions.close_session(session)
                for task, _ in await self._sessions.tasks(session.id):
                    await queue.cancel(task.model, [task.request_id])
                after = session.id

    async def _forget_batches(self, batches: Batches, owner: str) -> int:
        """Raises: Overloaded if a batch does not end in time."""
        until = time.monotonic() + _ENDS_WITHIN_S
        while await asyncio.to_thread(batches.cancel_all, owner):
            if time.monotonic() > until:
                raise unavailable()
            self._look_for_batches()
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(batches.forget, owner)

    async def _forget_sessions(self, owner: str) -> int:
        queue, num_forgotten = self._lifecycle.dispatcher.queue, 0
        while (page := await self._sessions.page(owner, "", _PAGE, 0)) is not None and page[0]:
            for state in page[0]:
                session = state.session
                for task, _ in await self._sessions.tasks(session.id):
                    await queue.cancel(task.model, [task.request_id])
                    known = await queue.state(task.model, task.request_id)
                    if known is not None and known.attempt:
                        await queue.result(task.model, task.request_id, known.attempt, is_last=True)
                    await queue.forget(task.model, task.request_id, failed_only=False)
                if session.common is not None:
                    self._lifecycle.blobs.release(session.id, [session.common])
                await self._sessions.forget(session)
            num_forgotten += len(page[0])
        return num_forgotten
