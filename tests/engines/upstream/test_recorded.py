"""Streams that `record.py` recorded from a real vLLM and SGLang give the same answers as without streaming."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineCall, EngineOutput
from engines.registry import create_engine
from engines.upstream.client import DONE
from engines.upstream.dialect import Chunk, Dialect
from engines.upstream.settings import SglangSettings, VllmSettings
from engines.upstream.sglang import Sglang
from engines.upstream.vllm import FINISH, Vllm
from shared.protocol import ChatMessage, FinishReason, Generate, SamplingParams, TextPart
from tests.engines.upstream.asking import answer, ids_of
from tests.engines.upstream.stand_in import StandIn

SAMPLING = SamplingParams(max_tokens=400, ignore_eos=True)
CALL = EngineCall("r", Generate((ChatMessage("user", (TextPart("hello"),)),), SAMPLING))
DIALECTS: dict[str, Dialect] = {"vllm": Vllm(VllmSettings()), "sglang": Sglang(SglangSettings())}
RECORDED: dict[tuple[str, str], dict[str, Any]] = {
    (file.name.partition("-")[0], line["name"]): line
    for file in Path(__file__).parent.glob("*.jsonl")
    for line in map(json.loads, file.read_text().splitlines())
}
SGLANG = {name: line for (api, name), line in RECORDED.items() if api == "sglang"}


def read_whole(api: str, whole: dict[str, Any]) -> tuple[list[int], str, int, list[Any]]:
    """Returns token IDs, finish reason, number of prompt tokens, and the (ID, logprob) pairs of each token."""
    if api == "sglang":
        meta = whole["meta_info"]
        scored = zip(
            meta.get("output_token_logprobs", []), meta.get("output_top_logprobs", []), strict=True
        )
        scores = [[(each[1], each[0]) for each in (own, *best)] for own, best in scored]
        return whole["output_ids"], meta["finish_reason"]["type"], meta["prompt_tokens"], scores
    (choice,) = whole["choices"]
    scores = [
        [(each["token_id"], each["logprob"]) for each in (own, *own["top_logprobs"])]
        for own in (choice["logprobs"] or {}).get("content") or []
    ]
    return choice["token_ids"], choice["finish_reason"], whole["usage"]["prompt_tokens"], scores


def read(api: str, lines: list[str]) -> list[Chunk]:
    events = (line.removeprefix("data: ").encode() for line in lines)
    return [DIALECTS[api].parse(event) for event in events if event != DONE]


def is_answered(line: dict[str, Any]) -> bool:
    return "choices" in line.get("whole", {}) or "output_ids" in line.get("whole", {})


@pytest.mark.parametrize(
    ("api", "name"), [key for key, line in RECORDED.items() if is_answered(line)]
)
def test_recorded_events_give_the_recorded_answer(api: str, name: str):
    recorded = RECORDED[api, name]
    token_ids, finish, num_prompt_tokens, scores = read_whole(api, recorded["whole"])
    chunks = read(api, recorded["lines"])
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [token.token_id for token in tokens] == token_ids
    assert [c.finish for c in chunks if c.finish] == [FINISH[finish]]
    assert {c.num_prompt_tokens for c in chunks} == {num_prompt_tokens}
    assert chunks[-1].num_cached_tokens is not None
    assert bool(scores) == (name == "logprobs")
    for token, expected in zip(tokens, scores, strict=bool(scores)):
        found = [(token.token_id, token.logprob), *token.top_logprobs]
        assert [each[0] for each in found] == [each[0] for each in expected]
        logprobs = [each[1] for each in expected]
        assert [each[1] for each in found] == pytest.approx(logprobs, abs=1e-4)
        assert len(found) == 3


def ask(server: StandIn, checkpoint: Path, *streams: str) -> list[EngineOutput]:
    """Returns the answer of an engine whose server sends these recorded streams of SGLang, then simulated ones."""
    server.gets, server.streams = SGLANG["server"]["gets"], [SGLANG[n]["lines"] for n in streams]
    values = {"kind": "sglang", "model": str(checkpoint), "url": server.url}
    loaded = create_engine(values)
    assert loaded.card.max_model_len == 512  # the recorded value
    with closing(loaded.engine) as engine:
        return answer(engine, CALL)


def test_a_request_that_sglang_aborts_is_continued(server: StandIn, checkpoint: Path):
    outputs = ask(server, checkpoint, "aborted")
    first, second = (body["input_ids"] for body in server.bodies)
    chunks = read("sglang", SGLANG["aborted"]["lines"])
    received = [t.token_id for chunk in chunks if not chunk.error for t in chunk.tokens]
    assert 0 < len(received) < 400
    assert second == [*first, *received]
    assert ids_of(outputs)[: len(received)] == received
    assert len(ids_of(outputs)) == 400
    assert outputs[-1].finish_reason is FinishReason.LENGTH
