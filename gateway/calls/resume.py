"""Answers that outlive their connection: a client resumes them by id, on any gateway.

A request is resumable if its client asks for it (`x-vlm-resumable`) or names it (`Idempotency-Key`): it continues
when the client disconnects. A client that returns receives the events of the call's log, which Redis retains for a
minute after the end, and then new events from its gateway's mailbox. Frames have ids, so that none is sent twice. Only
the tenant that sent the request can read its answer.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from gateway.calls.dispatcher import Dispatcher
from gateway.calls.open_call import Gone, OpenCall
from gateway.calls.surface import AnswerHead, Plan, Reply, Request, Surface
from gateway.http.errors import InvalidRequest, NotFound, from_failed, invalid, unavailable
from gateway.http.exchange import RequestContext
from shared.protocol import Failed, ImageRef, decode_log
from shared.queue.api import DuplicateRequest, GatewayQueue, QueueUnavailable, RequestState
from shared.queue.resume import Leases, ResumableCalls

RESUMABLE_HEADER = b"x-vlm-resumable"
KEY_HEADER = b"idempotency-key"
LAST_ID_HEADER = b"last-event-id"
STREAM_PATH = "/v1/streams/"

#: How long to wait until a request that another gateway is accepting appears in Redis.
BEGINS_WITHIN_S = 10.0
#: Maximum time to load the images of a request and to queue it. Afterwards, another gateway may try.
_ATTEMPT_S = 60.0
_LEASE_S = 10.0  #: after this time, other gateways may try if the gateway of the request has died
#: How long a record outlives the deadline of its request.
RECORD_GRACE_S = 60.0
#: How often a record may disappear between two accesses before the client gets an error.
_MAX_REMEMBERS = 5

_FORGOTTEN = RequestState("forgotten", 0, 0, 0.0)

_KEY = re.compile(rb"[\x21-\x7e]{1,256}")
_EVENT_ID = re.compile(rb"[0-9]{1,10}")
_ANSWER_ID = re.compile(r"(?:[a-z]{1,16}[-_])?([0-9a-f]{32})")
logger = logging.getLogger(__name__)


class StreamRecord(msgspec.Struct, frozen=True):
    """The data that another gateway needs to continue the answer."""

    surface: str
    model: str
    tenant: str
    #: Hash of the request: another request with the same idempotency key is refused.
    fingerprint: str
    created: int
    shows_timings: bool
    #: The surface's `Plan.options`.
    options: msgspec.Raw
    queue: str  #: model whose queue has the calls
    package: str = ""  #: package of a deployed model
    images: tuple[ImageRef, ...] = ()  #: images of the request, if its answer may be stored
    shard: str = ""  #: suffix of the call's id
    is_deleted: bool = False  #: the stored answer was deleted, and readers must not store it again


_decoder = msgspec.json.Decoder(StreamRecord)


def is_resumable(context: RequestContext, plan: Plan) -> bool:
    """Whether the request continues without its client. Sets its id from an Idempotency-Key. Raises: InvalidRequest."""
    key = context.headers.get(KEY_HEADER)
    wants_resume = context.headers.get(RESUMABLE_HEADER, b"").lower() in (b"true", b"1")
    if key is None and not (wants_resume and plan.is_streamed):
        return False
    if len(plan.tasks) != 1:
        message = "A resumable request has one answer: send one prompt with n = 1, or audio of one segment."
        raise InvalidRequest(message, param="n", code="invalid_value")
    if key is not None:
        if not _KEY.fullmatch(key):
            raise invalid("Idempotency-Key", "send 1 to 256 visible ASCII characters")
        context.id = hmac.new(context.tenant.encode(), key, hashlib.sha256).hexdigest()[:32]
    return True


def _last_event_id(context: RequestContext) -> int:
    """The last event that the client has; -1 for none. Raises: InvalidRequest."""
    value = context.headers.get(LAST_ID_HEADER, b"")
    if not value:
        return -1
    if not _EVENT_ID.fullmatch(value):
        raise invalid("Last-Event-ID", "send a number of 1 to 10 digits")
    return int(value)


def _unknown() -> NotFound:
    message = "The stream does not exist, or ended more than a minute ago: send the request again."
    return NotFound(message, code="stream_not_found")


def _to_call_id(request_id: str, shard: str) -> str:
    """The id of a resumable request's only call."""
    return f"{request_id}-0{shard}"


def _to_request_id(call_id: str) -> str:
    return call_id.partition("-")[0]


@dataclass
class Resume:
    """Resumable requests: records in Redis, and readers of their logs."""

    queue: GatewayQueue
    records: ResumableCalls
    leases: Leases
    dispatcher: Dispatcher
    request_timeout_s: float
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    @property
    def keep_s(self) -> float:
        return self.request_timeout_s + RECORD_GRACE_S

    async def open(
        self,
        surface: Surface,
        request: Request,
        plan: Plan,
        head: AnswerHead,
        queue: str,
        context: RequestContext,
        shard: str,
        submit: Callable[[str], Awaitable[OpenCall]],
    ) -> Reply:
        """Queue a resumable request, or follow it if it was sent before. Returns when a replica of Redis has it.

        `shard`: shard of a new request. Raises: InvalidRequest if the key belongs to another request, Overloaded,
        QueueUnavailable, and errors of `submit`.
        """
        last_id, fingerprint = _last_event_id(context), ""
        if KEY_HEADER in context.headers:
            fingerprint = hashlib.sha256(msgspec.json.encode(request)).hexdigest()
        record = StreamRecord(
            surface=surface.name,
            model=head.model,
            package=head.package,
            tenant=context.tenant,
            fingerprint=fingerprint,
            created=head.created,
            shows_timings=plan.shows_timings,
            options=msgspec.Raw(msgspec.json.encode(plan.options)),
            queue=queue,
            shard=shard,
        )
        async with self._only_attempt(context.id) if fingerprint else nullcontext():
            known = await self._remember(context.id, record)
            call = None
            call_id = _to_call_id(context.id, (known or record).shard)
            if known is not None:
                head = msgspec.structs.replace(head, created=known.created)
                if await self._has_answer(known.queue, call_id):
                    call = await self._follow(call_id, known.queue)
                    if known.model != head.model and not context.fallback_from:
                        context.fallback_from = head.model
                    head = msgspec.structs.replace(head, package=known.package, model=known.model)
            if call is None:
                if known is not None:  # the new call may use a fallback model
                    names = {"queue": queue, "model": head.model, "package": head.package}
                    await self.note(context.id, **names)
                call = await self._submit(call_id, queue, submit, known is None)
            call.tenant = context.tenant
            try:
                await self.records.confirm(context.id)
                await self.queue.confirm(call.model, [call_id])
            except BaseException:
                if known is None and KEY_HEADER not in context.headers:
                    call.is_resumable = False  # no client can resume it: `close` cancels it
                call.close()
                raise
        answer = surface.answer(plan.options, head)
        return Reply(surface, call, answer, plan.is_streamed, plan.shows_timings, head, last_id)

    @asynccontextmanager
    async def _only_attempt(self, request_id: str) -> AsyncIterator[None]:
        """Hold the lease of a request, so that one gateway at a time chooses its queue. Raises: QueueUnavailable."""
        lease = (request_id, self.dispatcher.mailbox.gateway_id)
        until = time.monotonic() + _ATTEMPT_S
        async with self._locks.setdefault(request_id, asyncio.Lock()):
            renewal = None
            try:  # a lease is also dropped if the reply to `hold` was lost
                while not await self.leases.hold(*lease, _LEASE_S) and time.monotonic() < until:
                    await asyncio.sleep(0.05)
                renewal = asyncio.create_task(self.leases.renew(*lease, _LEASE_S))
                yield
            finally:
                if renewal is not None:
                    renewal.cancel()
                with suppress(QueueUnavailable):
                    await self.leases.drop(*lease)

    async def reopen(
        self, answer_id: str, context: RequestContext, surfaces: Mapping[str, Surface]
    ) -> Reply:
        """Continue a stream after the event in `Last-Event-ID`. Raises: InvalidRequest, NotFound, QueueUnavailable."""
        found = _ANSWER_ID.fullmatch(answer_id)
        if found is None:
            raise _unknown()
        request_id, last_id = found[1], _last_event_id(context)
        record = await self._recall(request_id)
        if record is None or not hmac.compare_digest(record.tenant, context.tenant):
            raise _unknown()
        surface = surfaces.get(record.surface)
        if surface is None:
            raise _unknown()
        try:
            options = msgspec.json.decode(record.options, type=surface.options)
        except msgspec.MsgspecError as error:  # written by a gateway of another version
            logger.warning("cannot read the options of a %s: %s", surface.name, error)
            raise _unknown() from None
        call = await self._follow(_to_call_id(request_id, record.shard), record.queue)
        call.tenant = context.tenant
        head = AnswerHead(
            surface.id_prefix + request_id, record.created, record.model, record.package
        )
        answer = surface.answer(options, head)
        return Reply(surface, call, answer, True, record.shows_timings, head, last_id)

    async def images(self, request_id: str) -> tuple[ImageRef, ...] | None:
        """The images of a request whose answer may be stored. None: it was deleted. Raises: QueueUnavailable."""
        record = await self._recall(request_id)
        if record is None:
            return ()
        return None if record.is_deleted else record.images

    async def note(self, request_id: str, **changes: object) -> None:
        """Change the record of a request for clients that resume it. Raises: QueueUnavailable."""
        record = await self._recall(request_id)
        if record is not None:
            record = msgspec.structs.replace(record, **changes)
            await self.records.replace(request_id, msgspec.json.encode(record), self.keep_s)

    async def _has_answer(self, model: str, choice_id: str) -> bool:
        """Whether a call exists. A call that failed with a retryable error is deleted. Raises: QueueUnavailable."""
        state = await self.queue.state(model, choice_id)
        if state is None or state.state != "failed":
            return state is not None
        try:
            events = decode_log(await self.queue.events(model, choice_id))
        except msgspec.MsgspecError:  # the log is not readable: its readers get an error
            return True
        last = events[-1] if events else None
        if not isinstance(last, Failed) or not from_failed(last).should_retry:
            return True
        await self.queue.forget(model, choice_id, failed_only=True)
        return False

    def when_ended(self, call: OpenCall, callback: Callable[[], object]) -> None:
        """Run `callback` when a resumable request has ended, even without its client, if this gateway still runs."""

        def on_close(call: OpenCall) -> None:
            if call.unsettled_ids:
                self.dispatcher.spawn(self._call_at_end(call, callback))
            else:
                callback()

        call.when_closed(on_close)

    async def _call_at_end(self, left: OpenCall, callback: Callable[[], object]) -> None:
        [choice] = left.choices
        with suppress(QueueUnavailable, Gone):
            call = await self._follow(choice.request_id, left.model)
            try:
                while not call.choices[0].is_finished:
                    await call.receive()
            finally:
                call.close()
            callback()

    async def _submit(
        self, call_id: str, model: str, submit: Callable[[str], Awaitable[OpenCall]], is_new: bool
    ) -> OpenCall:
        try:
            return await submit(call_id)
        except DuplicateRequest:  # an earlier attempt queued it
            return await self._follow(call_id, model)
        except QueueUnavailable:  # the call may be queued: a retry will find it
            raise
        except BaseException:
            if is_new:
                with suppress(QueueUnavailable):  # it was not accepted; its record would expire
                    await self.records.forget(_to_request_id(call_id))
            raise

    async def _recall(self, request_id: str) -> StreamRecord | None:
        """The record of a request. None: it does not exist, or a gateway of another version wrote it."""
        data = await self.records.recall(request_id)
        try:
            return None if data is None else _decoder.decode(data)
        except msgspec.MsgspecError:
            return None

    async def _remember(self, request_id: str, wanted: StreamRecord) -> StreamRecord | None:
        """Store a record, or return the existing one. Raises: Overloaded; InvalidRequest for another request."""
        data = msgspec.json.encode(wanted)
        for _ in range(_MAX_REMEMBERS):
            if await self.records.remember(request_id, data, self.keep_s):
                return None
            record = await self._recall(request_id)
            if record is None:  # an attempt that was refused has just deleted it
                continue
            found = (record.tenant, record.surface, record.fingerprint)
            if found != (wanted.tenant, wanted.surface, wanted.fingerprint):
                text = "This Idempotency-Key belongs to another request: send a new key."
                raise InvalidRequest(text, code="idempotency_key_reused", param="Idempotency-Key")
            return record
        raise unavailable()

    async def _follow(self, call_id: str, model: str) -> OpenCall:
        """Read the events of a request from its log. Closing the call does not cancel it. Raises: QueueUnavailable."""
        call = await self.dispatcher.follow(
            model,
            call_id,
            listen=self._listen,
            timeout_s=self.request_timeout_s,
            begins_within_s=BEGINS_WITHIN_S,
        )
        call.when_closed(self._forget_lost)
        return call

    async def _listen(self, model: str, call_id: str) -> RequestState | None:
        gateway_id = self.dispatcher.mailbox.gateway_id
        state = await self.queue.listen(model, call_id, gateway_id)
        if state is None and await self.records.recall(_to_request_id(call_id)) is None:
            return _FORGOTTEN  # the request was refused: no events follow
        return state

    def _forget_lost(self, call: OpenCall) -> None:
        """Delete the record of a request that Redis does not know."""
        [choice] = call.choices
        # Before `begins_by`, the record may belong to a later attempt.
        has_waited = time.monotonic() >= call.begins_by
        if choice.is_finished and choice.attempt == 0 and has_waited:
            self.dispatcher.spawn(self._forget_unknown(call.model, choice.request_id))

    async def _forget_unknown(self, model: str, call_id: str) -> None:
        with suppress(QueueUnavailable):
            if await self.queue.state(model, call_id) is None:
                await self.records.forget(_to_request_id(call_id))
