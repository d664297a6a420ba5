"""Clients that record what they receive, and the answers that they should receive."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import httpx

from engines.base import EngineCall
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, Grammar, SamplingParams, TextPart
from tests.faults.history import CANCELLED, FAILED, FINISHED, REFUSED, History
from tests.faults.processes import MODEL, REQUEST_TIMEOUT_S, WITHIN_S

NUM_TOKENS = 40


@cache
def answer_to(text: str, num_tokens: int = NUM_TOKENS, schema: str = "") -> tuple[str, ...]:
    """Returns the uninterrupted answer of the mock engine, token by token. An answer with a `schema` ends by itself."""
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    engine = create_engine({"kind": "mock", "max_num_seqs": 1, "mock": instant}).engine
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=not schema)
    grammar = Grammar("json", schema, "response_format") if schema else None
    task = Generate((ChatMessage("user", (TextPart(text),)),), sampling, grammar=grammar)
    engine.add(engine.prepare(EngineCall("r", task), []))
    token_ids = []
    while engine.has_work():
        token_ids += [token_id for output in engine.step() for token_id in output.token_ids]
    engine.close()
    return tuple(engine.tokenizer.token_bytes(token_id).decode() for token_id in token_ids)


def body_of(text: str, num_tokens: int = NUM_TOKENS) -> dict:
    """Returns a greedy, streamed request whose response contains its tokens."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "logprobs": True,
        "stream": True,
        "ignore_eos": True,
    }


def tokens_in(chunk: dict) -> list[str]:
    """Returns the tokens of a chunk of a stream."""
    found = [(choice.get("logprobs") or {}).get("content") or () for choice in chunk["choices"]]
    return [entry["token"] for content in found for entry in content]


class Clients:
    """Clients of one fleet that share a history."""

    def __init__(self) -> None:
        self.history = History()
        self.errors: dict[str, dict] = {}  #: the error of each failed request

    async def ask(
        self,
        url: str,
        text: str,
        *,
        leave_after: int | None = None,
        num_tokens: int = NUM_TOKENS,
        priority: str = "interactive",
    ) -> None:
        """Runs one streamed request, named by its text, to its end."""
        request = {"json": body_of(text, num_tokens), "headers": {"x-vlm-priority": priority}}
        async with (
            self._asking(url, text, answer_to(text, num_tokens)) as client,
            client.stream("POST", "/v1/chat/completions", **request) as response,
        ):
            if await self._is_accepted(text, response):
                await self._read(text, response, leave_after)

    @asynccontextmanager
    async def _asking(
        self, url: str, text: str, expected: Sequence[str]
    ) -> AsyncIterator[httpx.AsyncClient]:
        self.history.ask(text, time.monotonic() + REQUEST_TIMEOUT_S, expected)
        # Reading the certificates of the authorities would take 20 ms per client.
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, verify=False, timeout=WITHIN_S
        ) as client:
            try:
                yield client
            except httpx.ConnectError:  # no gateway was reached
                self._end(text, REFUSED)
            except httpx.HTTPError as error:
                self._end(text, FAILED, error={"code": type(error).__name__})

    async def _is_accepted(self, text: str, response: httpx.Response) -> bool:
        if response.status_code == 200:
            return True
        error = json.loads(await response.aread())["error"]
        self._end(text, REFUSED if "retry-after" in response.headers else FAILED, error=error)
        return False

    async def _read(self, text: str, response: httpx.Response, leave_after: int | None) -> None:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                self._end(text, FINISHED)
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self._end(text, FAILED, error=chunk["error"])
                    continue
                for token in tokens_in(chunk):
                    self.history.token(text, token, chunk["id"])
                if leave_after is not None and len(self.history.tokens(text)) >= leave_after:
                    self._end(text, CANCELLED)
                    return

    def _end(self, text: str, kind: str, error: dict | None = None) -> None:
        if error is not None:
            self.errors[text] = error
        self.history.end(text, kind)
