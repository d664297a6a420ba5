"""Answers that outlive their connection: taken up again by id, on any gateway, exactly where they were left.

A request is detached when its client asks for that (`x-vlm-resumable`) or names it (`Idempotency-Key`): it goes on
when the client leaves. Whoever comes back reads the request's log, which Redis keeps a minute beyond its end, and hears
what follows by the mailbox of its gateway.
Events carry ids, so that what was seen is not sent again. Only the tenant who asked may read.
"""

import asyncio
import hashlib
import hmac
import re
from contextlib import suppress

import msgspec

from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.calls.dispatcher import Dispatcher
from gateway.calls.open_call import Generation
from gateway.http.context import RequestContext
from gateway.http.errors import InvalidRequest, NotFound
from shared.queue.submit import QueueUnavailable, RequestQueue

RESUMABLE_HEADER = b"x-vlm-resumable"
KEY_HEADER = b"idempotency-key"
LAST_ID_HEADER = b"last-event-id"
STREAM_PATH = "/v1/streams/"

#: A request that another gateway is just taking in may not be in Redis yet.
BEGINS_WITHIN_S = 10.0
#: Records outlive their requests' deadlines like the requests themselves.
RECORD_GRACE_S = 60.0

_KEY = re.compile(rb"[\x21-\x7e]{1,256}")
_EVENT_ID = re.compile(rb"[0-9]{1,10}")
_ANSWER_ID = re.compile(r"(?:chatcmpl-)?([0-9a-f]{32})")


class StreamRecord(msgspec.Struct, frozen=True):
    """What another gateway must know to tell an answer in the same words."""

    model: str
    tenant: str
    fingerprint: str  #: of the request: an idempotency key stands for one request only
    created: int
    include_usage: bool
    with_logprobs: bool
    shows_timings: bool
    service_tier: str = ""  #: where the request named one


_decoder = msgspec.json.Decoder(StreamRecord)


def detach(context: RequestContext, request: ChatCompletionRequest) -> bool:
    """Whether the request shall go on without its client; its id is derived from its key, if it has one.

    Raises: InvalidRequest.
    """
    key = context.headers.get(KEY_HEADER)
    wants_resume = context.headers.get(RESUMABLE_HEADER, b"").lower() in (b"true", b"1")
    if key is None and not (wants_resume and request.stream):
        return False
    if (request.n or 1) != 1:
        raise InvalidRequest("An answer that can be taken up again is one choice.", param="n")
    if key is not None:
        if not _KEY.fullmatch(key):
            raise InvalidRequest(
                "Invalid Idempotency-Key: it is 1 to 256 visible ASCII characters.",
                param="Idempotency-Key",
            )
        context.id = hmac.new(context.tenant.encode(), key, hashlib.sha256).hexdigest()[:32]
    return True


def fingerprint(context: RequestContext, request: ChatCompletionRequest) -> str:
    """The same for equal requests; empty where no key could name another one."""
    if KEY_HEADER not in context.headers:
        return ""
    return hashlib.sha256(msgspec.json.encode(request)).hexdigest()


def last_event_id(context: RequestContext) -> int:
    """The last event that the client has; -1 for none. Raises: InvalidRequest."""
    value = context.headers.get(LAST_ID_HEADER, b"")
    if not value:
        return -1
    if not _EVENT_ID.fullmatch(value):
        raise InvalidRequest("Invalid Last-Event-ID: it is a number.", param="Last-Event-ID")
    return int(value)


def answer_id(text: str) -> str:
    """The request of an answer's `id`. Raises: NotFound."""
    found = _ANSWER_ID.fullmatch(text)
    if found is None:
        raise _unknown()
    return found[1]


def _unknown() -> NotFound:
    return NotFound("There is no such stream, or it ended too long ago.", code="stream_not_found")


def _choice(request_id: str) -> str:
    """The id of a detached request's only choice."""
    return f"{request_id}-0"


class Streams:
    """The records of detached requests, and followers of their logs."""

    def __init__(
        self, queue: RequestQueue, dispatcher: Dispatcher, request_timeout_s: float
    ) -> None:
        self.queue = queue
        self.dispatcher = dispatcher
        self.request_timeout_s = request_timeout_s
        self.keep_s = request_timeout_s + RECORD_GRACE_S
        self._forgetting: set[asyncio.Task[None]] = set()

    async def claim(self, request_id: str, record: StreamRecord) -> bool:
        """Note a new request; False if it is known, and then to be followed. Raises: QueueUnavailable."""
        return await self.queue.remember(request_id, msgspec.json.encode(record), self.keep_s)

    async def forget(self, request_id: str) -> None:
        """The request was not taken in after all; what Redis does not hear goes at the end of its time."""
        with suppress(QueueUnavailable):
            await self.queue.forget(request_id)

    async def find(self, request_id: str, tenant: str) -> StreamRecord:
        """The record of a tenant's own request. Raises: NotFound, QueueUnavailable."""
        data = await self.queue.recall(request_id)
        record = _decoder.decode(data) if data is not None else None
        if record is None or not hmac.compare_digest(record.tenant, tenant):
            raise _unknown()
        return record

    async def find_same(self, request_id: str, wanted: StreamRecord) -> StreamRecord:
        """The record of the same request, sent before. Raises: InvalidRequest if it was another."""
        record = await self.find(request_id, wanted.tenant)
        if record.fingerprint != wanted.fingerprint:
            raise InvalidRequest(
                "This Idempotency-Key was used for another request.",
                code="idempotency_key_reused",
                param="Idempotency-Key",
                status=422,
            )
        return record

    async def is_known(self, request_id: str, model: str) -> bool:
        """Whether the request is queued, runs, or ended within the last minute. Raises: QueueUnavailable."""
        return await self.queue.state(model, _choice(request_id)) is not None

    async def follow(self, request_id: str, model: str) -> Generation:
        """The events of a request from its first, as its log has them; closing it cancels nothing.

        Raises: RedisError, QueueUnavailable.
        """
        generation = await self.dispatcher.follow(
            model,
            _choice(request_id),
            timeout_s=self.request_timeout_s,
            begins_within_s=BEGINS_WITHIN_S,
        )
        generation.when_closed(self._forget_lost)
        return generation

    def _forget_lost(self, generation: Generation) -> None:
        """Let nobody wait again for a request of which Redis knows nothing."""
        [choice] = generation.choices
        if choice.is_finished and choice.attempt == 0:
            task = asyncio.create_task(self.forget(choice.request_id.removesuffix("-0")))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)
