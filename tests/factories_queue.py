"""Requests, events, and the gateway's and workers' ends of a queue, with defaults."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from redis import Redis as SyncRedis
from redis.asyncio import Redis

from gateway.calls.key_limits import open_tokens
from shared.protocol import (
    Call,
    CallEvent,
    ChatMessage,
    Finished,
    FinishReason,
    Generate,
    ImagePart,
    ImageRef,
    SamplingParams,
    TextPart,
    Tokens,
    Usage,
    decode_call,
    decode_events,
    decode_log,
    seal,
)
from shared.queue.api import Claim, Limits, Publication, Reservation, Submission
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.keys import GROUP, RedisKeys
from shared.queue.resume import ResumableCalls
from shared.queue.worker import RedisWorkerQueue
from tests.waiting import wait_for
from worker.active_requests import read_claim, to_publication

MODEL = "tiny"
WRITTEN_WITHIN_S = 30.0
GATEWAY = "gateway-1"
_ids = count(1)


def make_request(text: str = "hello", **changes: Any) -> Call:
    """Returns a short text request to `MODEL`."""
    images = changes.pop("images", ())
    parts = (*(ImagePart(i) for i in range(len(images))), TextPart(text))
    messages = changes.pop("messages", (ChatMessage("user", parts),))
    sampling = changes.pop("sampling", SamplingParams(max_tokens=8, temperature=0.0))
    fields: dict[str, Any] = {
        "id": f"request-{next(_ids)}",
        "reply_to": GATEWAY,
        "model": MODEL,
        "task": Generate(messages, sampling, images),
    }
    return Call(**{**fields, **changes})


def make_image(sha256: str, num_bytes: int = 3) -> ImageRef:
    return ImageRef(sha256, num_bytes, "image/png", 1, 1)


def call_of(claim: Claim) -> Call:
    return decode_call(claim.payload)


def tokens_of(claim: Claim) -> tuple[int, ...]:
    """Returns the output tokens that earlier attempts have published."""
    _, told = read_claim(claim)
    return tuple(token_id for event in told for token_id in event.token_ids)


async def events_of(queue: RedisGatewayQueue, request_id: str) -> tuple[CallEvent, ...]:
    return decode_log(await queue.events(MODEL, request_id))


def make_delta(claim: Claim, index: int, *token_ids: int) -> Tokens:
    text = "".join(f" {token}" for token in token_ids)
    return Tokens(claim.id, claim.attempt, index, token_ids, text)


def make_finished(claim: Claim, num_output_tokens: int = 0) -> Finished:
    usage = Usage(num_prompt_tokens=1, num_output_tokens=num_output_tokens)
    return Finished(claim.id, claim.attempt, FinishReason.STOP, usage)


def publication(claim: Claim, number: int, index: int, *events: CallEvent) -> Publication:
    return to_publication(claim, number, index, events)


def reserve(*choices: Call, num_tokens: int = 1, **limits: int) -> Reservation:
    """Returns the reservation of a request, with `num_tokens` for each of its choices."""
    return Reservation(
        model=choices[0].model,
        tenant=choices[0].tenant,
        request_ids=tuple(choice.id for choice in choices),
        num_tokens=num_tokens,
        num_answer_tokens=num_tokens,
        num_open_tokens=open_tokens(choices[0].task, num_tokens),
        limits=Limits(**limits),
    )


async def enqueue(
    queue: RedisGatewayQueue,
    *choices: Call,
    timeout_s: float = 60.0,
    num_tokens: int = 1,
    max_waiting: int = 100,
    max_tokens: int = 1_000_000,
    **limits: int,
) -> None:
    """Queues a request, by default without reaching a limit."""
    reservation = reserve(*choices, num_tokens=num_tokens, max_tokens=max_tokens, **limits)
    envelopes = [seal(choice) for choice in choices]
    await queue.submit(Submission(envelopes, timeout_s, max_waiting, reservation))


class Clock:
    """Replaces the module `time`; stands still until `pass_time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class Ends:
    """The gateway's and the workers' ends of the queues under one prefix."""

    def __init__(self, redis: Redis, redis_blocking: Redis, prefix: str) -> None:
        self.redis, self.redis_blocking, self.prefix = redis, redis_blocking, prefix
        self.keys = RedisKeys(prefix)
        self.queue = RedisGatewayQueue(redis, prefix)
        self.records = ResumableCalls(redis, prefix)
        self.mailbox = RedisMailbox(redis_blocking, prefix, GATEWAY)
        self._closers: list[Callable[[], Awaitable[None]]] = [
            self.queue.close,
            self.records.close,
            self.mailbox.close,
        ]
        self._events = self.mailbox.events()

    async def enqueue(self, request: Call | None = None, **options: Any) -> Call:
        request = request or make_request()
        await enqueue(self.queue, request, **options)
        return request

    def worker(self, worker_id: str, **changes: Any) -> RedisWorkerQueue:
        options: dict[str, Any] = {
            "model": MODEL,
            "lease_s": 10.0,
            "max_attempts": 3,
            "batch_age_s": 60.0,
            **changes,
        }
        claims = RedisWorkerQueue(
            self.redis, self.redis_blocking, keys_prefix=self.prefix, worker_id=worker_id, **options
        )
        self._closers.append(claims.close)
        return claims

    async def reserved(self) -> set[str]:
        """Returns the reservations of open calls. The next submit removes those of ended calls."""
        found = await self.redis.zrangebyscore(self.keys.reservations(MODEL), 1, "+inf")
        return {reservation.decode() for reservation in found}

    async def num_open(self) -> int:
        return (await self.queue.stats(MODEL)).num_open

    async def claim(self, worker: RedisWorkerQueue) -> Claim:
        await worker.create_group()
        [claim] = await worker.read(1, 1.0)
        return claim

    async def let_lease_run_out(self, claim: Claim) -> None:
        """Makes the lease an hour old."""
        await self.redis.xclaim(
            *(self.keys.queue(MODEL), GROUP, "nobody", 0, [claim.entry_id]),
            idle=3_600_000,
            justid=True,
        )

    async def take_over(self, worker: RedisWorkerQueue, claim: Claim) -> Claim:
        """Lets the lease expire; returns the next worker's claim."""
        await self.let_lease_run_out(claim)
        [later] = await worker.reclaim(1)
        return later

    async def next_events(self) -> tuple[CallEvent, ...]:
        _, data = await anext(self._events)
        return decode_events(data)

    async def close(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]
        for close in self._closers:
            await close()


@asynccontextmanager
async def open_ends(redis: Redis, redis_blocking: Redis, prefix: str) -> AsyncIterator[Ends]:
    """Opens both ends, with the gateway's mailbox."""
    ends = Ends(redis, redis_blocking, prefix)
    await ends.mailbox.open([MODEL])
    try:
        yield ends
    finally:
        await ends.close()


def wait_until_written(client: SyncRedis) -> None:
    """Waits before a `kill -9` until Redis has passed acknowledged writes to the system. No client writes afterwards.

    While the disk is busy, Redis delays writes for up to 2 s; these are lost, see "Not covered" in
    `docs/reliability.md`.
    """
    client.client_pause(int(1000 * WRITTEN_WITHIN_S), all=False)
    wait_for(lambda: not client.info("persistence")["aof_buffer_length"], WRITTEN_WITHIN_S)
