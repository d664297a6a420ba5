"""A gateway on a real socket, and a scripted worker on the real queue."""

import asyncio
import itertools
import json
import re
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import uvicorn.server
from redis.asyncio import Redis

from gateway.api import SURFACES
from gateway.calls import dispatcher
from gateway.calls.surface import Surface
from gateway.http.server import DrainingServer
from gateway.main import create_app
from gateway.services import Services
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import (
    CallEvent,
    Embed,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    ModelCard,
    OutputLogprob,
    Rerank,
    Run,
    Scores,
    StageTimings,
    Started,
    Tokenize,
    Tokenized,
    Tokens,
    Usage,
    Vectors,
)
from shared.queue.api import Claim
from shared.queue.registry import Registry, WorkerRecord
from shared.queue.worker import RedisWorkerQueue
from shared.redis.client import create_redis
from shared.settings.limits import LimitSettings
from shared.settings.tree import (
    DeploySettings,
    GatewaySettings,
    RedisSettings,
    SearchSettings,
    Settings,
    TraceSettings,
)
from tests.factories_settings import make_group
from worker.active_requests import read_claim, to_publication

MODEL = "tiny"
CARD = ModelCard(MODEL, created_at=1_700_000_000, max_model_len=512, vocab_size=1000)
CHAT = "/v1/chat/completions"
#: Headers of a chat request, without the value of the length.
CHAT_HEAD = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: "


HELLO = [{"role": "user", "content": "hello"}]
#: Required fields of each text API besides the model, for a response without a stream.
TEXT_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


def content_of(stream: str) -> str:
    """Returns the text of a stream of chunks."""
    return "".join(re.findall(r'"content":"([^"]+)"', stream))


def make_body(content: str | list[dict[str, Any]] = "hello", **changes: Any) -> dict[str, Any]:
    """Returns a chat request with a text or with parts."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **changes}


def chat_over_http(**changes: Any) -> bytes:
    """Returns the bytes of a chat request, for tests that write to a socket."""
    body = json.dumps(make_body(**changes)).encode()
    return b"POST %b HTTP/1.1\r\n%b%d\r\n\r\n%b" % (CHAT.encode(), CHAT_HEAD, len(body), body)


def make_settings(redis_url: str, prefix: str, **changes: dict[str, Any]) -> Settings:
    """Returns settings with short times. `changes`: by group, applied to the tests' defaults."""
    gateway = {"port": 0, "drain_s": 5.0, "silence_timeout_s": 1.0, **changes.get("gateway", {})}
    settings = Settings(
        _env_file=None,  # type: ignore[call-arg]
        redis=RedisSettings(url=redis_url, key_prefix=prefix),
    )
    groups = {
        "gateway": GatewaySettings, "limits": LimitSettings, "search": SearchSettings,
        "deploy": DeploySettings, "traces": TraceSettings,
    }  # fmt: skip
    fields = {**changes, "gateway": gateway}
    made = {name: make_group(group, **fields.get(name, {})) for name, group in groups.items()}
    return settings.model_copy(update=made)


#: The answers of `answer_any`.
TOLD, NUMBERS, TOKEN_IDS = "Hello you", [0.25, 0.5], [5, 8]


class Answer:
    """A claimed request that a script answers. Each call publishes immediately."""

    def __init__(self, worker: "ScriptedWorker", claim: Claim) -> None:
        self.worker = worker
        self.claim = claim
        self.request, told = read_claim(claim)
        self.usage = Usage(num_prompt_tokens=7, num_image_tokens=4 * len(self.request.task.images))
        self.num_tokens = sum(event.num_tokens for event in told)
        self.refused: str | None = None
        self._numbers = itertools.count(1)

    @property
    def choice(self) -> int:
        return int(self.request.id.rpartition("-")[2])

    async def start(self) -> None:
        await self.publish(self.started())

    async def say(self, *texts: str) -> None:
        """Publishes one token per text in one publication."""
        await self.publish(*self.deltas(*texts))

    async def finish(
        self, *texts: str, reason: FinishReason = FinishReason.STOP, **options: Any
    ) -> None:
        deltas = self.deltas(*texts)
        await self.publish(*deltas, self.finished(reason, **options))

    async def fail(self, code: ErrorCode, message: str = "It failed.", param: Any = None) -> None:
        await self.publish(Failed(self.request.id, self.claim.attempt, code, message, param))

    def started(self) -> Started:
        return Started(self.request.id, self.claim.attempt, self.usage)

    def deltas(self, *texts: str, logprobs: tuple[OutputLogprob, ...] = ()) -> list[Tokens]:
        start = self.num_tokens
        return [
            Tokens(self.request.id, self.claim.attempt, i, (100 + i,), text, logprobs)
            for i, text in enumerate(texts, start)
        ]

    def finished(
        self,
        reason: FinishReason = FinishReason.STOP,
        *,
        num_tokens: int | None = None,
        timings: StageTimings | None = None,
    ) -> Finished:
        return Finished(
            self.request.id,
            self.claim.attempt,
            reason,
            Usage(7, num_tokens or self.num_tokens, self.usage.num_image_tokens, 2),
            timings or StageTimings(queue_s=self.claim.waited_s),
        )

    async def publish(self, *events: CallEvent) -> None:
        """Publish events together; their terminal event counts their tokens."""
        num_tokens, number = self.num_tokens, next(self._numbers)
        self.num_tokens += sum(len(e.token_ids) for e in events if isinstance(e, Tokens))
        if isinstance(events[-1], Finished):
            last = events[-1]
            num_reasoning = last.usage.num_reasoning_tokens
            num_images = self.usage.num_image_tokens
            usage = Usage(7, self.num_tokens, num_images, 2, num_reasoning)
            end = Finished(last.request_id, last.attempt, last.finish_reason, usage, last.timings)
            events = (*events[:-1], end)
        await self._publish(number, num_tokens, events)

    async def publish_raw(self, *events: CallEvent) -> None:
        await self._publish(next(self._numbers), self.num_tokens, events)

    async def _publish(self, number: int, num_tokens: int, events: Sequence[CallEvent]) -> None:
        publication = to_publication(self.claim, number, num_tokens, events)
        refused = await self.worker.queue.publish([publication])
        self.refused = refused.get(self.request.id)
        if self.refused == "cancelled":
            self.worker.cancelled.set()


Script = Callable[[Answer], Awaitable[None]]


async def say_hello(answer: Answer) -> None:
    """The default script: three tokens."""
    await answer.start()
    await answer.say("Hel")
    await answer.say("lo ")
    await answer.finish("you")


async def answer_any(answer: Answer) -> None:
    """A script for every task."""
    task, name = answer.request.task, (answer.request.id, answer.claim.attempt)
    data = array("f", NUMBERS).tobytes()
    if isinstance(task, Embed):
        await answer.publish(Vectors(*name, len(NUMBERS), data), answer.finished())
        return
    if isinstance(task, Rerank):
        await answer.publish(Scores(*name, data), answer.finished())
        return
    if isinstance(task, Tokenize):
        made = Tokenized(*name, 2, token_ids=tuple(TOKEN_IDS), text=TOLD)
        await answer.publish(made, answer.finished())
        return
    await answer.start()
    await answer.say(in_words(answer, "Hello "))
    await answer.finish(in_words(answer, "you"))


def in_words(answer: Answer, text: str) -> str:
    """Returns a text as the task's engine emits it: applications emit JSON lines."""
    is_run = isinstance(answer.request.task, Run)
    return json.dumps({"item": text}) + "\n" if is_run else text


def says(*pieces: str, begins: str = "", after: asyncio.Event | None = None, **end: Any) -> Script:
    """Returns a script that begins, waits for an event, and ends with `pieces`."""

    async def script(answer: Answer) -> None:
        await answer.start()
        if begins:
            await answer.say(in_words(answer, begins))
        if after is not None:
            await after.wait()
        await answer.finish(*[in_words(answer, piece) for piece in pieces], **end)

    return script


async def think(answer: Answer) -> None:
    """A script with reasoning before the answer."""
    name = (answer.request.id, answer.claim.attempt)
    await answer.start()
    await answer.publish(Tokens(*name, 0, (1,), reasoning="hmm"))
    await answer.publish(Tokens(*name, 1, (2,), reasoning=" well"))
    await answer.finish("yes")


async def fail_halfway(answer: Answer) -> None:
    """A script whose engine fails after the first token."""
    await answer.start()
    await answer.say("half")
    await answer.fail(ErrorCode.ENGINE_FAILURE)


async def talk_on(answer: Answer) -> None:
    """A script that continues until it is cancelled."""
    await answer.start()
    while answer.refused is None:
        await answer.say(in_words(answer, "on "))
        await asyncio.sleep(0.01)


async def say_nothing(answer: Answer) -> None:
    """A script that starts and then waits to be cancelled."""
    await answer.start()
    while answer.refused is None:
        await asyncio.sleep(0.02)
        lost = await answer.worker.queue.renew([answer.claim])
        answer.refused = lost.get(answer.request.id)
    answer.worker.cancelled.set()


async def find_segments(answer: Answer) -> None:
    name = (answer.request.id, answer.claim.attempt)
    found = Tokenized(*name, segment_ends=answer.worker.segment_ends)
    await answer.publish(found, answer.finished())


class ScriptedWorker:
    """A worker of one model whose engine is a function. It finds segments of audio itself."""

    def __init__(self, redis: Redis, redis_blocking: Redis, prefix: str, card: ModelCard) -> None:
        self.script: Script = say_hello
        self.find: Script = find_segments
        self.segment_ends: tuple[float, ...] = (2.0,)
        self.answers: list[Answer] = []
        self.cancelled = asyncio.Event()
        self.card = card
        self.registry = Registry(redis, prefix)
        self.blobs = RedisBlobStore(redis, prefix)
        self.queue = RedisWorkerQueue(
            redis, redis_blocking, keys_prefix=prefix, model=card.name, worker_id="scripted",
            lease_s=10.0, max_attempts=3, batch_age_s=60.0,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def requests(self):
        return [answer.request for answer in self.answers]

    async def start(self) -> None:
        await self.queue.create_group()
        await self._announce()
        self._tasks.append(asyncio.create_task(self._run()))

    async def _announce(self) -> None:
        await self.registry.announce(WorkerRecord("scripted", self.card, "mock"), ttl_s=600)

    async def _run(self) -> None:
        while True:
            claims = await self.queue.read(64, 0.5)
            if self.queue.num_backlog:
                claims += await self.queue.take(64)
            for claim in claims:
                answer, script = Answer(self, claim), self.script
                task = answer.request.task
                if isinstance(task, Tokenize) and task.finds_segments:
                    script = self.find
                else:
                    self.answers.append(answer)
                self._tasks.append(asyncio.ensure_future(script(answer)))

    @property
    def has_ended(self) -> bool:
        """Returns whether it has stopped claiming."""
        return self._tasks[0].done()

    async def rest(self) -> None:
        """Waits for all scripts and resets the worker for the next test."""
        _, *scripts = self._tasks
        await asyncio.wait_for(asyncio.gather(*scripts), 20)
        await self._announce()
        del self._tasks[1:]
        self.answers.clear()
        self.cancelled.clear()

    def stop_claiming(self) -> None:
        """Stops claiming; running requests continue, and `start` claims again."""
        self._tasks[0].cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in (self.queue, self.registry, self.blobs):
            await part.close()
        failures = [
            result
            for result in results
            if isinstance(result, Exception) and not isinstance(result, asyncio.CancelledError)
        ]
        if failures:
            raise ExceptionGroup("scripts of the worker failed", failures)


Create = Callable[[LimitSettings], Surface]


class RunningGateway:
    """A running gateway with a client."""

    def __init__(
        self, services: Services, server: DrainingServer, client: httpx.AsyncClient
    ) -> None:
        self.services = services
        self.server = server
        self.client = client

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    async def chat(self, body: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        return await self.client.post(CHAT, json=body or make_body(), **options)

    async def stream(self, body: dict[str, Any] | None = None, **options: Any) -> str:
        """Returns the text of a complete stream."""
        response = await self.chat({**(body or make_body()), "stream": True}, **options)
        assert response.status_code == 200, response.text
        return response.text

    async def begin_batch(self, headers: dict[str, str], *bodies: dict[str, Any]) -> dict[str, Any]:
        line = {"method": "POST", "url": CHAT}
        lines = [{**line, "custom_id": str(n), "body": body} for n, body in enumerate(bodies)]
        form = {"file": ("lines", "\n".join(map(json.dumps, lines))), "purpose": (None, "batch")}
        file = await self.client.post("/v1/files", files=form, headers=headers)
        assert file.status_code == 200, file.text
        wish = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        made = await self.client.post("/v1/batches", json=wish, headers=headers)
        assert made.status_code == 200, made.text
        return made.json()


def openai_client(
    gateway: RunningGateway, api_key: str = "none", *, is_strict: bool = False
) -> openai.AsyncOpenAI:
    """Returns OpenAI's client. `is_strict`: it validates every response."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key=api_key,
        max_retries=0,
        http_client=http,
        _strict_response_validation=is_strict,
    )


class _Impatience:
    """Replaces asyncio in uvicorn, so that it checks for shutdown ten times a second."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = _Impatience()  # type: ignore[assignment]
# Scripted workers enforce no deadlines, so gateways do not wait for them to.
dispatcher._DEADLINE_GRACE_S = 0.05


@asynccontextmanager
async def run_gateway_on_socket(
    settings: Settings, *, refresh: bool = True, surfaces: Sequence[Create] = SURFACES
) -> AsyncIterator[RunningGateway]:
    """Serves in this event loop."""
    services = Services(settings)
    server = services.create_server(create_app(services, surfaces))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        assert not task.done(), task
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=60, verify=False
        ) as client:
            if refresh:
                await services.models.refresh()
            yield RunningGateway(services, server, client)
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def run_worker(
    redis_url: str, prefix: str, card: ModelCard = CARD
) -> AsyncIterator[ScriptedWorker]:
    """Runs a scripted worker."""
    settings = RedisSettings(url=redis_url)
    redis, blocking = create_redis(settings), create_redis(settings, blocking=True)
    worker = ScriptedWorker(redis, blocking, prefix, card)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
        await redis.aclose()
        await blocking.aclose()
