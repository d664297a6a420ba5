"""`/v1/batches`: files of requests, which run within a day, with lower priority than interactive requests.

Source: OpenAI API reference, "Batch".
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.api.fields import Data, Listing, RequestStruct, invalid
from gateway.api.vector_stores import Metadata, PageQuery
from gateway.batches import Batches, BatchView, LineError
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import NotFound, RateLimited, unavailable
from shared.packages.store import StoreError
from shared.settings.limits import MAX_ITEM_ID_CHARS, LimitSettings

PURPOSE = "batch"
T = TypeVar("T")


class CreateBatch(RequestStruct, frozen=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchErrors(Data[LineError]):
    pass


class BatchObject(msgspec.Struct):
    """OpenAI's object. Units: epoch seconds."""

    id: str
    endpoint: str
    input_file_id: str
    status: str
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    object: str = "batch"

    @classmethod
    def of(cls, view: BatchView) -> "BatchObject":
        record, ending = view.record, view.ending
        completed, failed = view.counts
        total = 0 if view.beginning is None else view.beginning.total
        batch = cls(
            record.id,
            record.endpoint,
            record.input_file_id,
            view.status,
            record.created_at,
            record.expires_at,
            RequestCounts(total, min(completed, total), min(failed, total)),
            metadata=record.metadata,
            in_progress_at=view.beginning and view.beginning.at,
            cancelling_at=view.cancel and view.cancel.at,
            finalizing_at=view.finalizing and view.finalizing.at,
        )
        if view.finalizing is not None and view.finalizing.errors:
            batch.errors = BatchErrors(view.finalizing.errors)
        if ending is not None:
            batch.output_file_id, batch.error_file_id = ending.output_file_id, ending.error_file_id
            setattr(batch, f"{view.status}_at", ending.at)
        return batch


class BatchList(Listing[BatchObject]):
    pass


@dataclass
class BatchResource(Resource):
    """The endpoints of batches. `_look` is called when the runner has work."""

    tag = "batches"

    _batches: Batches | None
    _look: Callable[[], None]
    _limits: LimitSettings
    _endpoints: Sequence[str]  #: paths that lines may call
    _find_guest: Callable[[str], str]  #: see `KeyDirectory.guest`
    #: Guards the number of open batches.
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _all(self) -> Batches:
        if self._batches is None:
            raise not_served()
        return self._batches

    @operation("POST", "/v1/batches", hints={"completion_window": "Send 24h."})
    async def create_batch(self, caller: Caller, body: CreateBatch) -> BatchObject:
        """Create a batch."""
        batches, most = self._all, self._limits.max_open_batches
        many = f"This key has {most} open batches: wait until one has ended, or cancel it."
        too_many = RateLimited("open_batches", many, retry_after_s=30)
        if body.endpoint not in self._endpoints:
            raise invalid("endpoint", f"send one of {', '.join(self._endpoints)}")

        def check() -> None:
            file = batches.files.get(caller.tenant, body.input_file_id)
            if file is None:
                raise invalid(
                    "input_file_id", "no such file; upload it with purpose batch", "not_found"
                )
            if file.purpose != PURPOSE:
                raise invalid(
                    "input_file_id",
                    f"the file has another purpose; upload it again with the purpose {PURPOSE}",
                )
            if len(batches.open_ids(caller.tenant)) >= most:
                raise too_many

        def create() -> BatchView | None:
            tenant, file_id = caller.context.tenant, body.input_file_id
            record = batches.create(
                caller.tenant, tenant, body.endpoint, file_id, body.metadata, most,
                self._find_guest(tenant),
            )  # fmt: skip
            if record is None:
                raise too_many
            return batches.get(caller.tenant, record.id)

        await blocking(check)
        async with self._taking:  # concurrent requests must not exceed the limit together
            view = await blocking(create)
        self._look()
        return BatchObject.of(_found(view))

    @operation("GET", "/v1/batches")
    async def list_batches(self, caller: Caller, query: PageQuery) -> BatchList:
        """List batches."""
        batches = self._all

        def read() -> tuple[list[BatchView], bool]:
            ids = batches.ids(caller.tenant)[::-1]
            ids = [id_ for id_ in ids if not query.after or id_ < query.after]
            views = [batches.get(caller.tenant, id_) for id_ in ids[: query.limit]]
            return [view for view in views if view is not None], len(ids) > query.limit

        views, has_more = await blocking(read)
        return BatchList.of([BatchObject.of(view) for view in views], has_more)

    @operation("GET", "/v1/batches/{batch_id}")
    async def retrieve_batch(self, caller: Caller) -> BatchObject:
        """Retrieve a batch."""
        batches, id_ = self._all, caller.path["batch_id"]
        return BatchObject.of(_found(await blocking(lambda: batches.get(caller.tenant, id_))))

    @operation("POST", "/v1/batches/{batch_id}/cancel")
    async def cancel_batch(self, caller: Caller) -> BatchObject:
        """Cancel a batch. Finished answers are retained."""
        batches, id_ = self._all, caller.path["batch_id"]

        def cancel() -> BatchView | None:
            view = _found(batches.get(caller.tenant, id_))
            if view.ending is None:
                batches.cancel(view.record)
            return batches.get(caller.tenant, id_)

        view = await blocking(cancel)
        self._look()
        return BatchObject.of(_found(view))


async def blocking(work: Callable[[], T]) -> T:
    """Run `work`, which uses the batch store, in a thread. Raises: ApiError."""
    try:
        return await asyncio.to_thread(work)
    except StoreError:
        raise unavailable("files", "The store of files and batches is", 5) from None


def not_served() -> NotFound:
    return NotFound(
        "Batches are not served here: set VLM_GATEWAY__FILES to a directory or a bucket.",
        code="batches_not_served",
    )


def _found(view: BatchView | None) -> BatchView:
    if view is None:
        raise NotFound("There is no such batch.", param="batch_id", code="not_found")
    return view
