"""A fleet under attack: real processes, two tenants, a canary request beside every attack, and checks afterwards."""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from tests.faults.clients import answer_to, body_of, tokens_in
from tests.faults.processes import MODEL, PREFIX, ROOT, Process, Processes, run_processes
from tests.faults.rest import MIB, Resources, growth, redis_leftovers
from tests.waiting import until_equal

CANARY = "cAnArY7"  #: in every attack; no response, log or metric may contain it
KEYS = {"a": f"sk-a-{secrets.token_hex(8)}", "b": f"sk-b-{secrets.token_hex(8)}"}
JSON_TYPE = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
NUM_CANARY_TOKENS = 12
WITHIN_S = 15.0
MAX_ERROR_BYTES = 4096
MAX_GROWTH_BYTES = 32 * MIB
#: Internals that errors must not reveal.
INSIDE = re.compile(
    rb"0x[0-9a-f]{6,}|Traceback|/usr/|site-packages|faults:\{|" + str(ROOT).encode()
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SOURCES = [
    path.read_text() for part in ("gateway", "shared") for path in (ROOT / part).rglob("*.py")
]
_WORDS = {word for source in _SOURCES for word in re.findall(r'"([a-z_]+)"', source)}
#: By label: the values that the fleet itself uses, taken from its source.
OUR_WORDS = {
    "outcome": _WORDS,
    "reason": _WORDS,
    "status": {str(status) for status in range(200, 600)},
    "method": {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "other"},
    "route": {"unknown", "refused"},
}
ENCODED = re.compile(r"[A-Za-z0-9+/]{256,}")


class HostileFleet:
    """The gateway and the worker under attack. `client` and `other` are tenants; `stranger` has no key."""

    def __init__(self, processes: Processes, gateway: Process, worker: Process, url: str) -> None:
        self.processes = processes
        self.redis = processes.redis
        self.gateway, self.worker, self.url = gateway, worker, url
        self.client, self.other = (_client(url, key) for key in KEYS.values())
        self.stranger = _client(url, "")
        self.labels: set[tuple[str, str]] = set()  #: of all series after the first responses
        self._num_read = {"gateway": 0, "worker": 0}
        self._numbers = iter(range(10**6))

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def knows(self, model: str) -> None:
        """Waits until the gateway lists a model."""

        async def status() -> int:
            return (await self.client.get(f"/v1/models/{model}")).status_code

        await until_equal(status, 200, WITHIN_S)

    async def learn_labels(self) -> None:
        """Records the current labels of metrics as known."""
        self.labels = labels((await self.client.get("/metrics")).text)
        document = (await self.client.get("/openapi.json")).json()
        self.labels |= {("route", path) for path in document["paths"]}
        self.labels |= {
            ("route", path) for path in ("/openapi.json", "/docs", "/", "/admin", "/apps")
        }

    async def canary(self) -> None:
        """Checks that a greedy answer is complete and unchanged."""
        text = f"canary {next(self._numbers)}"
        response = await self.client.post(CHAT, json=body_of(text, NUM_CANARY_TOKENS))
        events = response.text.removesuffix("\n\n").split("\n\n")
        assert events.pop() == "data: [DONE]", response.text
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        tokens = [token for chunk in chunks for token in tokens_in(chunk)]
        assert tuple(tokens) == answer_to(text, NUM_CANARY_TOKENS)

    async def talk(self, *pieces: bytes) -> bytes:
        """Sends raw bytes; returns what the gateway sends until it closes the connection or stays silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            async with asyncio.timeout(WITHIN_S):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def holds(self) -> None:
        """Checks what must hold after an attack, in addition to `check` for each response."""
        assert (self.gateway.process.returncode, self.worker.process.returncode) == (None, None)
        assert (await self.stranger.get("/readyz")).status_code == 200
        await until_equal(lambda: redis_leftovers(self.redis, PREFIX), [], WITHIN_S)
        self._logs_are_clean()
        text = (await self.client.get("/metrics")).text
        assert CANARY not in text
        came = unknown_labels(text, self.labels)
        assert came == set(), came

    async def has_not_grown(self, before: list[Resources], kept_bytes: int) -> None:
        """Checks that memory, threads, files and connections are as before, after the last client has disconnected."""
        await self.close()
        allowed = (MAX_GROWTH_BYTES, MAX_GROWTH_BYTES + kept_bytes)

        def grown() -> list[str]:
            now = [Resources.of(process.pid) for process in (self.gateway, self.worker)]
            return [
                line
                for *pair, max_bytes in zip(before, now, allowed, strict=True)
                for line in growth(*pair, max_bytes=max_bytes)
            ]

        with suppress(TimeoutError):
            await until_equal(grown, [], 10.0)
        assert grown() == []

    def _logs_are_clean(self) -> None:
        for process in (self.gateway, self.worker):
            begin, self._num_read[process.name] = self._num_read[process.name], len(process.lines)
            for line in process.lines[begin:]:
                # One JSON object per line, for any input of clients.
                assert line.startswith('{"time": "'), line
                assert line.endswith("}\n")
                assert CANARY not in line
                assert not ENCODED.search(line)
                assert not [key for key in KEYS.values() if key in line]

    async def close(self) -> None:
        for client in (self.client, self.other, self.stranger):
            await client.aclose()


def labels(metrics: str) -> set[tuple[str, str]]:
    """Returns all pairs of a label name and a value."""
    lines = (line for line in metrics.splitlines() if not line.startswith("#"))
    return {pair for line in lines for pair in _LABEL.findall(line)}


def unknown_labels(metrics: str, known: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns new label values that are neither outcomes nor reasons of ours."""
    came = labels(metrics) - known
    return {(name, value) for name, value in came if value not in OUR_WORDS.get(name, ("other",))}


def _client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=WITHIN_S)


def check(response: httpx.Response, statuses: set[int]) -> None:
    """Checks for a documented status, and an error in OpenAI's format without echoed input and internals."""
    assert response.status_code in statuses, (response.status_code, response.text[:500])
    assert not INSIDE.search(response.content)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < MAX_ERROR_BYTES
        assert CANARY not in response.text
        assert response.status_code != 503 or "retry-after" in response.headers


@asynccontextmanager
async def run_hostile_fleet(
    folder: Path, *, kept_bytes: int = 0, **more: str
) -> AsyncIterator[HostileFleet]:
    """Runs a fleet and records its resources at rest; at the end, checks that attacks have left nothing.

    `kept_bytes`: memory that the worker can keep. `more`: variables of the gateway.
    """
    async with run_processes(folder) as processes:
        variables = {"VLM_LOGS__FORMAT": "json", "VLM_ENGINE__MOCK__DECODE_S": "0.001"}
        gateway, url = await processes.gateway(
            **variables, VLM_GATEWAY__API_KEYS=",".join(KEYS.values()),
            VLM_GATEWAY__BODY_TIMEOUT_S="2",
            TEST_GATEWAY_CONSTANTS="header_timeout_s=2,send_timeout_s=2", **more,
        )  # fmt: skip
        worker = await processes.worker(
            "worker", command=("vlm", "worker", "--engine", "mock"), **variables
        )
        fleet = HostileFleet(processes, gateway, worker, url)
        try:
            await _settle(fleet)
            before = [Resources.of(process.pid) for process in (gateway, worker)]
            yield fleet
            await fleet.has_not_grown(before, kept_bytes)
        finally:
            await fleet.close()


async def _settle(fleet: HostileFleet) -> None:
    await fleet.knows(MODEL)
    for _ in range(3):
        await fleet.canary()
    await fleet.learn_labels()
