"""Every attack on vectors and stores that a client can make, on real processes, search process included (`make hostile`).

What must hold after each is that of `test_attacks`; the short form is in `gateway/api/test_embeddings.py` and
`test_vector_stores.py`.
"""

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.factories_images import data_url
from tests.factories_search import run_search
from tests.faults.rest import Resources, growth
from tests.hostile.fleet import CANARY, JSON_TYPE, HostileFleet, check, run_hostile_fleet
from tests.long import long

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    long("hostile"),
]
MODEL = "mock-embeddings"
EMBEDDINGS, RERANK, STORES, FILES = "/v1/embeddings", "/v1/rerank", "/v1/vector_stores", "/v1/files"
ITEMS, SEARCH = "/v1/vector_stores/{store}/items", "/v1/vector_stores/{store}/search"
VECTOR = [1.0] * 64

#: Method, path, body as JSON or as bytes, and the statuses that it may get.
Attack = tuple[str, str, Any, set[int]]


def embed(input: Any, *statuses: int, **more: Any) -> Attack:
    return "POST", EMBEDDINGS, {"model": MODEL, "input": input, **more}, set(statuses)


def put(*items: Any, statuses: set[int]) -> Attack:
    return "PUT", ITEMS, {"items": list(items)}, statuses


def search(query: Any, *statuses: int, **more: Any) -> Attack:
    return "POST", SEARCH, {"query": query, **more}, set(statuses)


def floats(value: str) -> str:
    return base64.b64encode(array("f", [float(value)] * 64).tobytes()).decode()


def nested(depth: int) -> dict[str, Any]:
    where: dict[str, Any] = {"type": "eq", "key": "k", "value": CANARY}
    for _ in range(depth):
        where = {"type": "and", "filters": [where]}
    return where


def raw_filter(depth: int) -> bytes:
    opening = b'{"type":"and","filters":['
    return b'{"query":"a","filters":' + opening * depth + b"]}" * depth + b"}"


QUOTES = (
    "'",
    '"',
    "''; DROP TABLE x; --",
    "\\",
    "%",
    "_",
    "`",
    "\u0000",
    "a') OR 1=1 --",
    "\ud7ff\u202e",
)
ATTACKS: dict[str, list[Attack]] = {
    "inputs": [
        embed(["x"] * 2049, 400), embed([], 400), embed([""], 400), embed([[]], 400), embed(None, 400),
        embed([["x"]], 400), embed({"a": CANARY}, 400), embed([1, "x"], 400), embed([-1], 400),
        embed([65_536], 400), embed([2**63], 400), embed([[1] * 513], 400), embed([1.5], 400),
        embed([[1] * 512] * 600, 400), embed("word " * 600, 400),
        embed([{"text": "x", "image": data_url()}], 400), embed([{"image": CANARY}], 400),
        embed([{"image": data_url()}] * 65, 400), embed([{"audio": CANARY}], 400),
    ],
    "texts of 10 MB": [
        embed("x" * 10_000_000, 413), embed(["x" * 5_000_000] * 2, 413), embed([CANARY * 300_000], 413),
        put({"id": "a", "text": "x" * 10_000_000}, statuses={413}), search("x" * 10_000_000, 413),
        ("POST", RERANK, {"model": MODEL, "query": "x" * 10_000_000, "documents": ["x"]}, {413}),
        ("POST", RERANK, {"model": MODEL, "query": "x", "documents": ["x"] * 1001}, {400}),
    ],
    "options": [
        embed("x", 400, dimensions=0), embed("x", 400, dimensions=63), embed("x", 400, dimensions=2**70),
        embed("x", 400, encoding_format="int8"), embed("x", 400, prompt_name=CANARY),
        embed("x", 400, truncate="MIDDLE"), embed("x", 400, truncate_prompt_tokens=-2),
        embed("x", 404, model=CANARY), embed("x", 400, model="mock"), embed("x", 200, cache_salt=CANARY),
    ],
    "vectors that are no numbers": [
        *[put({"id": "a", "embedding": vector}, statuses={400}) for vector in
          (floats("nan"), floats("inf"), floats("-inf"), [0.0] * 64, [1e39] * 64, [1.0] * 63, [], "AAA", CANARY, {})],
        *[("PUT", ITEMS, b'{"items":[{"id":"a","embedding":[%b]}]}' % word, {400})
          for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1e", b"0x1")],
        *[search({"embedding": vector}, 400) for vector in (floats("nan"), [0.0] * 64, [1.0], "")],
    ],
    "items": [
        put(*[{"id": str(n), "embedding": VECTOR} for n in range(2049)], statuses={400, 413}),
        put(statuses={400}), put({"id": "", "text": "x"}, statuses={400}),
        put({"id": "a" * 100_000, "text": "x"}, statuses={400}), put({"id": "a\u0000", "text": "x"}, statuses={400}),
        put({"id": "file-x:0", "text": "x"}, statuses={200}), put({"id": "../../x", "text": "x"}, statuses={200}),
        put({"id": "a", "text": "x", "attributes": {"k": "v" * 10_000}}, statuses={400}),
        put({"id": "a", "text": "x", "attributes": {str(n): n for n in range(10_000)}}, statuses={400}),
        put({"id": "a", "text": "x", "attributes": {"k": 10**400}}, statuses={400}),
        put({"id": "a", "image": "https://" + "a" * 70_000}, statuses={400}),
        put({"id": "a", "image": "file:///etc/passwd"}, statuses={400}),
    ],
    "filters": [
        *[search("a", 200, filters={"type": "eq", "key": "k", "value": quote}) for quote in QUOTES],
        *[search("a", 200, filters={"type": "nin", "key": f"k{quote}", "value": [quote, 1, True]}) for quote in QUOTES],
        search("a", 200, filters=nested(7)), search("a", 400, filters=nested(8)), search("a", 400, filters=nested(100)),
        *[("POST", SEARCH, raw_filter(depth), {400}) for depth in (1000, 100_000)],
        search("a", 400, filters={"type": "or", "filters": [nested(0)] * 64}),
        search("a", 400, filters={"type": "in", "key": "k", "value": ["v"] * 100_000}),
        search("a", 400, filters={"type": "gt", "key": "k", "value": CANARY}),
        ("DELETE", ITEMS, {"filters": nested(9)}, {400}), ("DELETE", ITEMS, {"ids": ["a"] * 2049}, {400}),
        ("DELETE", ITEMS, {"ids": [QUOTES[2]]}, {200}), ("DELETE", ITEMS, {}, {400}),
    ],
    "stores and files": [
        ("POST", STORES, {"name": CANARY * 10_000}, {400}), ("POST", STORES, {"metadata": {"k": CANARY * 10_000}}, {400}),
        ("POST", STORES, {"embedding_model": "mock"}, {400}), ("POST", STORES, {"dimensions": -1}, {400}),
        *[(method, f"{STORES}/{name}", {} if method == "POST" else None, {404, 405, 400})
          for name in ("vs_" + "0" * 32, "..%2f..%2fetc", "%00", "vs_'--", "x" * 5000)
          for method in ("GET", "POST", "DELETE")],
        ("GET", f"{STORES}?limit=1e9", None, {400}), ("GET", f"{STORES}?after=%27--", None, {200, 400}),
        ("POST", FILES, b"--x\r\n", {400, 415}), ("GET", f"{FILES}/..%2f..%2fetc%2fpasswd", None, {404}),
        ("POST", "/v1/vector_stores/{store}/files", {"file_id": "file-" + "0" * 32}, {404}),
    ],
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory) -> AsyncIterator[HostileFleet]:
    """The fleet of the other attacks, a worker that makes vectors and a search process."""
    with run_search(tmp_path_factory.mktemp("search")) as process:
        folder = tmp_path_factory.mktemp("hostile")
        async with run_hostile_fleet(folder, VLM_SEARCH__URL=process.url) as fleet:
            command = ("vlm", "worker", "--engine", "mock_pooling")
            worker = await fleet.processes.worker(
                "pooling", command=command, VLM_LOGS__FORMAT="json"
            )
            await _prepare(fleet)
            before = Resources.of(process.pid)
            yield fleet
            assert worker.process.returncode is None
            assert growth(before, Resources.of(process.pid), max_bytes=128 * 1024 * 1024) == []


async def _prepare(fleet: HostileFleet) -> None:
    """Each tenant has a store with an item; what the fleet's metrics name is then known."""
    while (await fleet.client.get(f"/v1/models/{MODEL}")).status_code != 200:
        await asyncio.sleep(0.02)
    for client in (fleet.client, fleet.other):
        store = (await client.post(STORES, json={"embedding_model": MODEL})).json()["id"]
        fleet.stores.append(store)
        await _is_whole(fleet, client, store, write=True)
    await fleet.learn_labels()


async def _is_whole(fleet: HostileFleet, client: Any, store: str, *, write: bool = False) -> None:
    """The store's first item is found as it was written."""
    if write:
        item = {"id": "mine", "text": f"of {store}"}
        answer = await client.put(ITEMS.format(store=store), json={"items": [item]})
        assert answer.status_code == 200, answer.text
    answer = await client.get(f"{ITEMS.format(store=store)}/mine")
    assert answer.json()["content"] == [{"type": "text", "text": f"of {store}"}]


@asynccontextmanager
async def under_attack(fleet: HostileFleet) -> AsyncIterator[None]:
    canary = asyncio.create_task(fleet.canary())
    yield
    await canary
    for client, store in zip((fleet.client, fleet.other), fleet.stores, strict=True):
        await _is_whole(fleet, client, store)
    await fleet.holds()


@pytest.mark.parametrize("row", ATTACKS)
async def test_attacks_on_vectors_and_stores(fleet: HostileFleet, row: str) -> None:
    async with under_attack(fleet):
        for method, path, body, statuses in ATTACKS[row]:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            url = path.replace("{store}", fleet.stores[0])
            headers = JSON_TYPE if content is not None else {}
            response = await fleet.client.request(method, url, content=content, headers=headers)
            check(response, statuses)
