"""Clients that request vectors and write to stores, with the oracle of `history` for both.

A vector counts as a token of its answer: complete, in order, and delivered once. Stores have their own checks.
"""

import asyncio
import base64
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.factories_numbers import vector_of
from tests.faults.clients import Clients
from tests.faults.history import FINISHED
from tests.faults.processes import WITHIN_S

MODEL = "mock-embeddings"
STORES = "/v1/vector_stores"


class VectorClients(Clients):
    """Clients of `/v1/embeddings`."""

    async def ask(self, url: str, text: str, *, num_inputs: int = 3, **_: Any) -> None:
        """Sends one request for vectors; all its inputs begin with `text`."""
        inputs = [f"{text} part {number}" for number in range(num_inputs)]
        expected = [_encode(vector_of(each)) for each in inputs]
        body = {"model": MODEL, "input": inputs, "encoding_format": "base64"}
        async with self._asking(url, text, expected) as client:
            response = await client.post("/v1/embeddings", json=body)
            if await self._is_accepted(text, response):
                rows = response.json()["data"]
                assert [row["index"] for row in rows] == list(range(num_inputs))
                for row in rows:
                    self.history.token(text, row["embedding"], response.headers["x-request-id"])
                self._end(text, FINISHED)


def _encode(vector: Sequence[float]) -> str:
    return base64.b64encode(array("f", vector).tobytes()).decode()


@dataclass(slots=True)
class Write:
    """Items that are written together, by ID."""

    texts: Mapping[str, str]
    is_acknowledged: bool = False


class StoreClients:
    """Writers of one store, and a reader of its contents."""

    def __init__(self, url: str) -> None:
        self.writes: list[Write] = []  #: in order; writes to one ID do not overlap
        self.refusals: list[int] = []
        self.num_acknowledged = 0
        self.id = ""
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S)

    async def create(self) -> None:
        """Creates the store."""
        answer = await self._client.post(STORES, json={"embedding_model": MODEL})
        self.id = answer.raise_for_status().json()["id"]

    async def write(self, texts: Mapping[str, str]) -> bool:
        """Writes items; returns whether they were acknowledged. A refusal has `retry-after`."""
        write = Write(texts)
        self.writes.append(write)
        items = [{"id": name, "text": text} for name, text in texts.items()]
        answer = await self._client.put(f"{STORES}/{self.id}/items", json={"items": items})
        write.is_acknowledged = answer.status_code == 200
        self.num_acknowledged += write.is_acknowledged
        if not write.is_acknowledged:
            assert answer.status_code in (429, 503), answer.text
            assert "retry-after" in answer.headers
            self.refusals.append(answer.status_code)
        return write.is_acknowledged

    async def write_until(self, name: str, is_over: Callable[[], bool]) -> None:
        """Writes batches of two new items and one that is replaced each time; a refused batch is sometimes repeated."""
        number = 0
        while not is_over():
            ids = [f"{name} {number}", f"{name} {number}'s", f"{name} latest"]
            texts = {key: f"{key} version {number}" for key in ids}
            if not await self.write(texts):
                await asyncio.sleep(0.3)
                if number % 2:
                    continue  # repeats the batch
            number += 1

    async def check(self) -> None:
        """Checks all stored items, and finds each by its vector. Raises: AssertionError."""
        stored, after = [], ""
        while True:
            params = {"limit": 100, "after": after, "include": "embedding"}
            page = await self._get(f"{STORES}/{self.id}/items", params)
            stored += page["data"]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert self._violations(stored) == []
        assert (await self._get(f"{STORES}/{self.id}", {}))["num_items"] == len(stored)
        for item in stored[:: max(1, len(stored) // 20)]:
            await self._check_found(item)

    async def _check_found(self, item: Mapping[str, Any]) -> None:
        vector = vector_of(item["content"][0]["text"], prompt_name="document")
        assert item["embedding"] == _encode(vector)
        query = {"query": {"embedding": vector}, "max_num_results": 10}
        answer = await self._client.post(f"{STORES}/{self.id}/search", json=query)
        hits = [hit["id"] for hit in answer.raise_for_status().json()["data"]]
        assert hits[0] == item["id"]
        assert len(set(hits)) == len(hits)

    async def _get(self, path: str, params: Mapping[str, Any]) -> Any:
        return (await self._client.get(path, params=params)).raise_for_status().json()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    def _violations(self, stored: Sequence[Mapping[str, Any]]) -> list[str]:
        """Describes every violation."""
        found: dict[str, list[str]] = defaultdict(list)
        for item in stored:
            found[item["id"]].append(item["content"][0]["text"])
        broken = [f"{name} is there {len(t)} times" for name, t in found.items() if len(t) > 1]
        allowed = self._allowed()
        broken += [f"nobody wrote {name}" for name in found.keys() - allowed.keys()]
        for name, texts in allowed.items():
            text = found[name][0] if name in found else ""
            if text not in texts:
                broken.append(f"{name} is {text!r}, not one of {sorted(texts)}")
        return broken + self._torn({name: texts[0] for name, texts in found.items()})

    def _allowed(self) -> dict[str, set[str]]:
        """Returns the possible texts of each ID: the last acknowledged one, and those of later writes."""
        allowed: dict[str, set[str]] = {}
        for write in self.writes:
            for name, text in write.texts.items():
                if write.is_acknowledged:
                    allowed[name] = {text}
                else:
                    allowed.setdefault(name, {""}).add(text)
        return allowed

    def _torn(self, found: Mapping[str, str]) -> list[str]:
        """Returns writes that are stored only in part, although no later write can have replaced the other items."""
        broken, replaced = [], set[str]()
        for write in reversed(self.writes):
            kept = {
                name: found.get(name) == text
                for name, text in write.texts.items()
                if name not in replaced
            }
            if len(set(kept.values())) > 1:
                broken.append(f"a part of one write is there: {kept}")
            replaced |= write.texts.keys()
        return broken
