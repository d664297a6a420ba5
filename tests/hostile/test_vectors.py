"""Large attacks on vectors and stores, on real processes including the search process (`make hostile`).

The checks after each are those of `test_attacks`. Refusals of wrong formats are tested in
`gateway/api/test_embeddings.py` and `test_vector_stores.py`.
"""

import asyncio
import base64
import json
from array import array
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.factories_images import data_url
from tests.factories_search import run_search
from tests.faults.rest import MIB, Resources, growth
from tests.hostile.fleet import CANARY, JSON_TYPE, check, run_hostile_fleet
from tests.long import long

pytestmark = [pytest.mark.timeout(300), long("hostile")]

MODEL = "mock-embeddings"
EMBEDDINGS, RERANK, STORES, FILES = "/v1/embeddings", "/v1/rerank", "/v1/vector_stores", "/v1/files"
ITEMS, SEARCH = "/v1/vector_stores/{store}/items", "/v1/vector_stores/{store}/search"
VECTOR = [1.0] * 64

#: Method, path, body as JSON or bytes, and the allowed statuses.
Attack = tuple[str, str, Any, set[int]]


def embed(input: Any, *statuses: int, **more: Any) -> Attack:
    return "POST", EMBEDDINGS, {"model": MODEL, "input": input, **more}, set(statuses)


def put(*items: Any, statuses: set[int]) -> Attack:
    return "PUT", ITEMS, {"items": list(items)}, statuses


def search(query: Any, *statuses: int, **more: Any) -> Attack:
    return "POST", SEARCH, {"query": query, **more}, set(statuses)


def floats(value: str) -> str:
    return base64.b64encode(array("f", [float(value)] * 64).tobytes()).decode()


def raw_filter(depth: int) -> bytes:
    opening = b'{"type":"and","filters":['
    return b'{"query":"a","filters":' + opening * depth + b"]}" * depth + b"}"


QUOTES = ["'", "''; DROP TABLE x; --", "\\", "%", "\u0000", "a') OR 1=1 --", "\ud7ff\u202e"]
NO_NUMBERS = [
    floats("nan"),
    floats("inf"),
    floats("-inf"),
    [0.0] * 64,
    [1e39] * 64,
    [1.0] * 63,
    [],
    CANARY,
]
ATTACKS: list[Attack] = [
    embed(["x"] * 2049, 400), embed({"a": CANARY}, 400), embed([2**63], 400), embed("word " * 600, 400),
    embed([[1] * 512] * 600, 400), embed([{"image": data_url()}] * 65, 400), embed("x", 404, model=CANARY),
    embed("x", 400, dimensions=2**70), embed("x", 200, cache_salt=CANARY),
    # texts of 10 MB
    embed("x" * 10_000_000, 413), embed(["x" * 5_000_000] * 2, 413), embed([CANARY * 300_000], 413),
    put({"id": "a", "text": "x" * 10_000_000}, statuses={413}), search("x" * 10_000_000, 413),
    ("POST", RERANK, {"model": MODEL, "query": "x" * 10_000_000, "documents": ["x"]}, {413}),
    ("POST", RERANK, {"model": MODEL, "query": "x", "documents": ["x"] * 1001}, {400}),
    # vectors with invalid numbers
    *[put({"id": "a", "embedding": vector}, statuses={400}) for vector in NO_NUMBERS],
    *[("PUT", ITEMS, b'{"items":[{"id":"a","embedding":[%b]}]}' % word, {400})
      for word in (b"NaN", b"-Infinity", b"1e999", b"1e", b"0x1")],
    *[search({"embedding": vector}, 400) for vector in (floats("nan"), [0.0] * 64, [1.0], "")],
    # items and filters
    put(*[{"id": str(n), "embedding": VECTOR} for n in range(2049)], statuses={400, 413}),
    put({"id": "a" * 100_000, "text": "x"}, statuses={400}), put({"id": "a\u0000", "text": "x"}, statuses={400}),
    put({"id": "file-x:0", "text": "x"}, statuses={200}), put({"id": "../../x", "text": "x"}, statuses={200}),
    put({"id": "a", "text": "x", "attributes": {str(n): n for n in range(10_000)}}, statuses={400}),
    put({"id": "a", "text": "x", "attributes": {"k": 10**400}}, statuses={400}),
    put({"id": "a", "image": "https://" + "a" * 70_000}, statuses={400}),
    *[search("a", 200, filters={"type": "nin", "key": f"k{quote}", "value": [quote, 1, True]}) for quote in QUOTES],
    *[("POST", SEARCH, raw_filter(depth), {400}) for depth in (100, 1000, 100_000)],
    search("a", 400, filters={"type": "in", "key": "k", "value": ["v"] * 100_000}),
    ("DELETE", ITEMS, {"ids": ["a"] * 2049}, {400}), ("DELETE", ITEMS, {"ids": [QUOTES[1]]}, {200}),
    # stores and files
    ("POST", STORES, {"name": CANARY * 10_000}, {400}), ("POST", STORES, {"metadata": {"k": CANARY * 10_000}}, {400}),
    *[(method, f"{STORES}/{name}", {} if method == "POST" else None, {404, 405, 400})
      for name in ("..%2f..%2fetc", "%00", "vs_'--", "x" * 5000) for method in ("GET", "POST", "DELETE")],
    ("GET", f"{STORES}?after=%27--", None, {200, 400}), ("GET", f"{FILES}/..%2f..%2fetc%2fpasswd", None, {404}),
]  # fmt: skip


async def test_attacks_on_vectors_and_stores(tmp_path) -> None:
    async with AsyncExitStack() as stack:
        process = stack.enter_context(run_search(tmp_path / "search"))
        fleet = await stack.enter_async_context(
            run_hostile_fleet(tmp_path, VLM_SEARCH__URL=process.url)
        )
        command = ("vlm", "worker", "--engine", "mock_pooling")
        worker = await fleet.processes.worker("pooling", command=command, VLM_LOGS__FORMAT="json")
        await fleet.knows(MODEL)
        stores = {}
        for client in (fleet.client, fleet.other):
            created = await client.post(STORES, json={"embedding_model": MODEL})
            store = stores[client] = created.json()["id"]
            item = {"id": "mine", "text": f"of {store}"}
            answer = await client.put(ITEMS.format(store=store), json={"items": [item]})
            assert answer.status_code == 200, answer.text
        await fleet.learn_labels()
        before = Resources.of(process.pid)
        for method, path, body, statuses in ATTACKS:
            canary = asyncio.create_task(fleet.canary())
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            url = path.replace("{store}", stores[fleet.client])
            headers = JSON_TYPE if content is not None else {}
            check(
                await fleet.client.request(method, url, content=content, headers=headers), statuses
            )
            await canary
        for client, store in stores.items():
            answer = await client.get(f"{ITEMS.format(store=store)}/mine")
            assert answer.json()["content"] == [{"type": "text", "text": f"of {store}"}]
        await fleet.holds()
        assert worker.process.returncode is None
        assert growth(before, Resources.of(process.pid), max_bytes=128 * MIB) == []
