"""Clients that write down what they see, and the answers that they should see."""

import json
import time
from functools import cache

import httpx

from engines.base import EngineCall
from engines.core.sequence import EngineRequest
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, Grammar, SamplingParams, TextPart
from tests.faults.history import CANCELLED, FAILED, FINISHED, REFUSED, History, Sight
from tests.faults.processes import MODEL, REQUEST_TIMEOUT_S, WITHIN_S

NUM_TOKENS = 40


@cache
def answer_to(text: str, num_tokens: int = NUM_TOKENS) -> tuple[str, ...]:
    """The uninterrupted answer of the mock engine, token by token."""
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    engine = create_engine({"kind": "mock", "max_num_seqs": 1, "mock": instant}).engine
    prompt = engine.processor.build_prompt([ChatMessage("user", (TextPart(text),))], [])
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.add(EngineRequest("r", prompt.token_ids, sampling))
    token_ids = [t for _ in range(num_tokens + 2) for out in engine.step() for t in out.token_ids]
    return tuple(engine.tokenizer.token_bytes(token_id).decode() for token_id in token_ids)


def held_answer_to(text: str, schema: str) -> str:
    """The uninterrupted answer of the mock engine to a request with a schema."""
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    engine = create_engine({"kind": "mock", "mock": instant}).engine
    task = Generate(
        (ChatMessage("user", (TextPart(text),)),),
        SamplingParams(max_tokens=100, temperature=0.0),
        grammar=Grammar("json", schema, "response_format"),
    )
    engine.add(engine.prepare(EngineCall("r", task), []))
    pieces = []
    while engine.has_work():
        pieces += [output.text for output in engine.step()]
    engine.close()
    return "".join(pieces)


def body_of(text: str, num_tokens: int = NUM_TOKENS) -> dict:
    """A greedy, streamed request that shows its tokens."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "logprobs": True,
        "stream": True,
        "ignore_eos": True,
    }


class Clients:
    """Clients of one fleet under one history."""

    def __init__(self) -> None:
        self.history = History()
        self.errors: dict[str, dict] = {}  #: by request: the error that it ended in

    async def ask(
        self,
        url: str,
        text: str,
        *,
        leave_after: int | None = None,
        num_tokens: int = NUM_TOKENS,
        priority: str = "interactive",
    ) -> None:
        """One streamed request, named by its text, from start to end."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        self.history.ask(text, deadline, answer_to(text, num_tokens))
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S) as client:
            try:
                request = client.stream(
                    "POST",
                    "/v1/chat/completions",
                    json=body_of(text, num_tokens),
                    headers={"x-vlm-priority": priority},
                )
                async with request as response:
                    await self._read(text, response, leave_after)
            except httpx.ConnectError:  # it never reached a gateway
                self._end(text, REFUSED)
            except httpx.HTTPError as error:
                self._end(text, FAILED, error={"code": type(error).__name__})

    async def _read(self, text: str, response: httpx.Response, leave_after: int | None) -> None:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            kind = REFUSED if "retry-after" in response.headers else FAILED
            self._end(text, kind, error=error)
            return
        index = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                self._end(text, FINISHED)
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self._end(text, FAILED, error=chunk["error"])
                    continue
                index = self._note(text, chunk, index)
                if leave_after is not None and index >= leave_after:
                    self._end(text, CANCELLED)
                    return

    def _note(self, text: str, chunk: dict, index: int) -> int:
        for choice in chunk["choices"]:
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                now = time.monotonic()
                sight = Sight(text, now, index, entry["token"], answer_id=chunk["id"])
                self.history.see(sight)
                index += 1
        return index

    def _end(self, text: str, kind: str, error: dict | None = None) -> None:
        if error is not None:
            self.errors[text] = error
        self.history.see(Sight(text, time.monotonic(), terminal=kind))
