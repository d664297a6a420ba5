"""Streams: the order of chunks, usage, timings, and failures before and after the status line."""

import json
from itertools import product
from operator import methodcaller

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.completions import ChatAnswer, ChatOptions
from gateway.calls.surface import AnswerHead
from shared.protocol import ErrorCode, FinishReason, OutputLogprob, TokenLogprob, Tokens
from shared.telemetry.metrics import STAGES
from tests.factories_gateway import Answer, make_body
from tests.fuzzing import num_examples


def read_events(text: str) -> list:
    """Returns the data of each event of a stream, without comments."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    data = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    return [json.loads(item) if item != "[DONE]" else item for item in data]


async def test_chunks_are_in_the_order_of_openais_api(gateway, worker):
    *chunks, done = read_events(await gateway.stream())
    assert done == "[DONE]"
    first, *others, last = (
        [(c["index"], c["delta"], c["finish_reason"]) for c in chunk["choices"]] for chunk in chunks
    )
    assert first == [(0, {"role": "assistant", "content": ""}, None)]
    assert last == [(0, {}, "stop")]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert "".join(texts) == "Hello you"  # tokens can be joined in one chunk
    assert others == [[(0, {"content": text}, None)] for text in texts]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk and "timings" not in chunk for chunk in chunks)


async def test_usage_is_in_the_last_chunk_and_null_before(gateway, worker):
    body = make_body(stream_options={"include_usage": True}, timings=True)
    *chunks, usage, done = read_events(await gateway.stream(body))
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 10
    assert set(usage["timings"]) == {f"{stage}_s" for stage in STAGES} | {"e2e_s"}
    assert all("timings" not in chunk for chunk in chunks)
    *chunks, _ = read_events(await gateway.stream(make_body(timings=True, n=2)))
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_continuous_usage_grows_with_each_chunk(gateway, worker, path):
    """vLLM's test suite requires this, also if the last token has text."""

    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.publish(*answer.deltas("Hel"))
        await answer.publish(*answer.deltas("lo"), answer.finished(FinishReason.LENGTH))

    worker.script = script
    options = {"continuous_usage_stats": True}
    body = make_body(stream=True, stream_options=options, prompt="x")
    body.pop("prompt" if "chat" in path else "messages")
    response = await gateway.client.post(path, json=body)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line[:7] == "data: {"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-2:] == [1, 2]
    assert counts == sorted(set(counts))
    [choice] = chunks[-1]["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice.get("text") or choice["delta"]["content"]) == "lo"


async def test_tokens_without_complete_text_are_not_a_chunk(gateway, worker):
    entry = OutputLogprob(TokenLogprob("é", -1.0))

    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.say("")
        await answer.publish(*answer.deltas("é", logprobs=(entry,)), answer.finished())

    worker.script = script
    *chunks, _ = read_events(await gateway.stream(make_body(logprobs=True)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "é", None]
    [told] = choices[1]["logprobs"]["content"]
    assert told == {"token": "é", "logprob": -1.0, "bytes": [195, 169], "top_logprobs": []}


async def test_a_failure_before_the_answer_has_a_status(gateway, worker):
    for status, retry, codes in (
        (400, None, ("context_length_exceeded", "invalid_image", "invalid_request")),
        (503, "true", ("image_unavailable", "worker_lost", "cancelled", "too_many_attempts")),
        (500, "false", ("request_kills_workers", "engine_failure")),
        (504, "false", ("deadline_exceeded",)),
    ):
        for code, stream in product(map(ErrorCode, codes), (False, True)):
            worker.script = methodcaller("fail", code)
            response = await gateway.chat(make_body(stream=stream))
            assert response.status_code == status, code
            assert response.json()["error"]["code"] == code.value
            assert response.headers.get("x-should-retry") == retry
            assert ("retry-after" in response.headers) == (retry == "true")


async def test_a_failed_stream_states_whether_to_retry(gateway, worker):
    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.say("half")
        await answer.fail(code, "It broke.")

    worker.script = script
    for code, more in (
        (ErrorCode.TOO_MANY_ATTEMPTS, {"should_retry": True, "retry_after": 1}),
        (ErrorCode.REQUEST_KILLS_WORKERS, {"should_retry": False}),
    ):
        *_, last = read_events(await gateway.stream())
        told = {"message": "It broke.", "type": "server_error", "param": None, "code": code.value}
        assert last == {"error": told | more}


@settings(max_examples=num_examples(100))
@given(st.lists(st.text(), min_size=1))
def test_any_text_of_a_model_is_one_valid_event(texts):
    answer = ChatAnswer(ChatOptions(), AnswerHead("i", 1, "m"))
    events = [(0, Tokens("r", 1, i, (i,), text)) for i, text in enumerate(texts)]
    text = b"".join(data for _, data in answer.frames(events, None)).decode()
    *chunks, end = text.split("\n\n")
    assert end == ""
    parsed = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    content = "".join(c["choices"][0]["delta"]["content"] for c in parsed)
    assert content == "".join(texts)
