"""The client records arrival times, and counts an incomplete answer as an error."""

import time

import pytest

from loadtest.asking import first_model
from loadtest.client import Answer, AnswerError, ChatClient
from loadtest.scenarios import text_part, to_chat_body, user_message
from tests.loadtest.fake_server import WORDS, FakeServer, chunk, completion, event, stream

HELLO = [user_message([text_part("hello")])]
WHOLE = to_chat_body("fake", HELLO, max_tokens=3, stream=False)
STREAMED = to_chat_body("fake", HELLO, max_tokens=3, stream=True)


def ask(fake: FakeServer, body=STREAMED) -> Answer:
    with ChatClient(fake.url) as client:
        return client.ask(body)


def test_first_text_counts_and_not_the_role(fake):
    fake.pieces = [chunk(""), 0.05, *stream()[1:]]
    started_at = time.perf_counter()
    answer = ask(fake)
    role_sent_at, text_sent_at = fake.sent_at[0], fake.sent_at[1]
    assert answer.ttft_s >= text_sent_at - role_sent_at >= 0.05
    assert started_at + answer.ttft_s < time.perf_counter()


def test_gap_of_a_chunk_is_divided_by_its_tokens():
    usage = {"completion_tokens": 5}
    answer = Answer(1.0, "abcdefg", "length", usage, [(0.2, 2), (0.4, 1), (0.8, 5)])
    assert answer.itl_s == pytest.approx([0.1, 0.1, 0.2, 0.2])
    answer = Answer(1.0, "ab", "stop", {"completion_tokens": 3}, [(0.2, 1), (0.4, 1)])
    assert answer.itl_s == pytest.approx([0.2])  # the last token has no text


@pytest.mark.parametrize("end", ["/", "/v1"])
def test_address_is_accepted_with_and_without_the_version(fake, end):
    with ChatClient(fake.url + end) as client:
        assert client.models() == ["fake"]
        answer = client.ask(WHOLE)
    assert fake.paths == ["/v1/models", "/v1/chat/completions"]
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("".join(WORDS), 3, "length")
    assert (answer.ttft_s, answer.itl_s) == (None, [])


def test_models_without_chat_or_worker_are_not_used(fake):
    fake.models = [
        {"id": "clip", "num_workers": 1, "tasks": ["embed"]},
        {"id": "gone", "num_workers": 0, "tasks": ["generate"]},
        {"id": "chats", "num_workers": 1, "tasks": ["generate"]},
    ]
    assert first_model(fake.url, "") == "chats"
    fake.models.pop()
    with pytest.raises(AnswerError, match="no chat model"):
        first_model(fake.url, "")
    fake.status = 401
    with pytest.raises(AnswerError, match="--api-key"):
        first_model(fake.url, "")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (stream()[:-1], "without"),
        ([*stream(), chunk("more")], "continues"),
        ([event(b"[DONE]")], "lacks"),
        ([chunk("a"), event({"error": {"code": "engine_failure", "message": "-"}})], "engine_fail"),
        ([event(b"{]")], "malformed"),
        ("no object", "malformed"),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}, "lacks text"),
    ],
)
def test_broken_answer_is_an_error_and_the_next_request_connects_again(fake, answer, message):
    fake.pieces = fake.completion = answer
    with ChatClient(fake.url) as client:
        with pytest.raises(AnswerError, match=message):
            client.ask(STREAMED if isinstance(answer, list) else WHOLE)
        fake.completion = completion()
        assert client.ask(WHOLE).num_tokens == 3


def test_refusals_and_dead_servers_are_errors(fake):
    fake.status, fake.completion = 429, {"error": {"code": "rate_limit_exceeded", "type": "x"}}
    for body in (WHOLE, STREAMED):
        with pytest.raises(AnswerError, match="status 429: rate_limit_exceeded"):
            ask(fake, body)
    with ChatClient("http://127.0.0.1:9") as client, pytest.raises(AnswerError, match="connection"):
        client.ask(WHOLE)
