"""Transcriptions: a worker cuts the audio into segments, each segment is a call, and their texts are joined."""

import asyncio
import json
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from shared.protocol import ErrorCode, Generate, ModelCard
from shared.settings.limits import LimitSettings
from tests.factories_audio import sound
from tests.factories_gateway import CARD, Answer, RunningGateway, ScriptedWorker, say_nothing
from tests.factories_keys import code
from tests.waiting import until

PATH = "/v1/audio/transcriptions"
ENDS = (28.25, 55.5, 3661.0625)
TEXTS = ["Hello there. ", " This <is>\n\nit -->", "Bye"]


@pytest.fixture
def card() -> ModelCard:
    return replace(CARD, supports_audio=True)


@pytest.fixture
def worker(worker: ScriptedWorker) -> ScriptedWorker:
    worker.segment_ends = ENDS
    return worker


async def read_out(answer: Answer) -> None:
    await answer.start()
    await answer.finish(*TEXTS[answer.choice].split("o"))


async def say(texts: list[str], answer: Answer) -> None:
    await answer.start()
    await answer.finish(texts[answer.choice])


def post(gateway: RunningGateway, path: str = PATH, **fields: Any):
    form = {"model": "tiny", **fields}
    files = {"file": ("a.wav", sound("wav"))}
    return gateway.client.post(path, data=form, files=files, timeout=30)


def parts_of(worker: ScriptedWorker) -> list[tuple[float, float]]:
    calls = sorted(worker.requests, key=lambda call: call.id)
    assert all(isinstance(call.task, Generate) for call in calls)
    return [(image.start_s, image.end_s) for call in calls for image in call.task.images]


async def test_each_segment_is_a_call_and_the_texts_are_joined(gateway, worker):
    worker.script = read_out
    answer = (await post(gateway)).json()
    assert parts_of(worker) == [(0.0, 28.25), (28.25, 55.5), (55.5, 3661.0625)]
    assert len({image.sha256 for call in worker.requests for image in call.task.images}) == 1
    assert answer["text"] == "Hell there. This <is>\n\nit --> Bye"
    usage = answer["usage"]
    num_output = sum(len(text.split("o")) for text in TEXTS)
    assert (usage["input_tokens"], usage["output_tokens"]) == (3 * 7, num_output)
    assert usage["total_tokens"] == 3 * 7 + num_output
    worker.answers.clear()
    worker.segment_ends = (12.5,)  # the model accepts the whole audio
    answer = (await post(gateway, response_format="verbose_json")).json()
    assert parts_of(worker) == [(0.0, 0.0)]
    assert (answer["duration"], answer["language"]) == (12.5, "unknown")
    assert [(s["start"], s["end"]) for s in answer["segments"]] == [(0.0, 12.5)]
    answer = await post(gateway, "/v1/audio/translations", response_format="verbose_json")
    assert (answer.json()["task"], answer.json()["language"]) == ("translate", "english")


async def test_segment_times_are_the_cuts_in_each_format(gateway, worker):
    worker.script = read_out
    fields = {"timestamp_granularities[]": ["segment"], "language": "en"}
    verbose = (await post(gateway, response_format="verbose_json", **fields)).json()
    assert verbose["segments"] == [
        {"id": 0, "start": 0.0, "end": 28.25, "text": "Hell there. "},
        {"id": 1, "start": 28.25, "end": 55.5, "text": "This <is>\n\nit -->"},
        {"id": 2, "start": 55.5, "end": 3661.0625, "text": "Bye"},
    ]
    assert (verbose["task"], verbose["language"]) == ("transcribe", "en")
    assert verbose["duration"] == 3661.0625
    srt = await post(gateway, response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    assert srt.text == (
        "1\n00:00:00,000 --> 00:00:28,250\nHell there.\n\n"
        "2\n00:00:28,250 --> 00:00:55,500\nThis <is> it -->\n\n"
        "3\n00:00:55,500 --> 01:01:01,062\nBye\n\n"
    )
    vtt = await post(gateway, "/v1/audio/translations", response_format="vtt")
    assert vtt.text == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:28.250\nHell there.\n\n"
        "00:00:28.250 --> 00:00:55.500\nThis &lt;is&gt; it --&gt;\n\n"
        "00:00:55.500 --> 01:01:01.062\nBye\n\n"
    )


async def test_a_segment_without_speech_has_no_caption(gateway, worker):
    worker.script = partial(say, [" Yes", "", " Yes"])
    srt = (await post(gateway, response_format="srt")).text
    assert [block.splitlines()[0] for block in srt.strip().split("\n\n")] == ["1", "2"]
    assert (await post(gateway)).json()["text"] == " Yes Yes"


async def test_a_stream_has_the_text_in_the_order_of_the_segments(gateway, worker):
    has_ended = asyncio.Event()

    async def the_last_first(answer: Answer) -> None:
        await answer.start()
        if answer.choice == 0:
            await answer.say("one")
            await has_ended.wait()
        await answer.finish(*(" ", str(answer.choice), "!"))
        if answer.choice == 2:
            has_ended.set()

    worker.script = the_last_first
    text = (await post(gateway, stream="true")).text
    *deltas, done = [json.loads(line[6:]) for line in text.splitlines() if line]
    assert deltas[0]["delta"] == "one"
    assert done["type"] == "transcript.text.done"
    assert "".join(event["delta"] for event in deltas) == done["text"] == "one 0! 1! 2!"


async def test_a_space_joins_segments_of_languages_that_have_spaces(gateway, worker):
    for texts, joined in (
        (["one.", "two", "three"], "one. two three"),
        (["\u4f60\u597d\u3002", "\u4e16\u754c", "ok"], "\u4f60\u597d\u3002\u4e16\u754c ok"),
        (["\uc548\ub155.", "\uc138\uacc4", ""], "\uc548\ub155. \uc138\uacc4"),
    ):
        worker.script = partial(say, texts)
        assert (await post(gateway)).json()["text"] == joined


async def test_a_failed_segment_fails_the_request_and_cancels_the_others(gateway, worker):
    async def fail_one(answer: Answer) -> None:
        if answer.choice == 1:
            await answer.fail(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "It is too long.")
        else:
            await say_nothing(answer)

    worker.script = fail_one
    response = await post(gateway)
    assert code(response)[:2] == (400, "context_length_exceeded")
    await until(lambda: sum(answer.refused == "cancelled" for answer in worker.answers) == 2)


async def test_a_resumable_request_is_one_call(gateway, worker):
    gateway.client.headers["idempotency-key"] = "a"
    response = await post(gateway, response_format="verbose_json")
    assert response.status_code == 400
    assert "has one answer" in response.json()["error"]["message"]
    worker.segment_ends = (5.0,)
    answers = [(await post(gateway, response_format="verbose_json")).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert (len(worker.requests), answers[0]["duration"]) == (1, 5.0)


@pytest.mark.parametrize("changes", [{"limits": {"max_key_requests_per_minute": 1}}])
async def test_a_file_on_disk_is_sent_twice_and_counts_as_one_request(gateway, worker, monkeypatch):
    monkeypatch.setattr(gateway.services.loader, "uses_disk", True)
    fetch = AsyncMock(side_effect=lambda _, file, *more: file.write(sound("wav")))
    monkeypatch.setattr(gateway.services.loader, "fetcher", Mock(fetch=fetch))
    body = {"model": "tiny", "file": "http://a.example/a.wav"}
    assert (await gateway.client.post(PATH, json=body)).status_code == 200
    assert len(parts_of(worker)) == len(ENDS)
    assert (await post(gateway)).status_code == 429


async def test_a_bad_field_is_named(gateway, worker):
    for fields, param, message in (
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities", "words are not supported"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities.[0]", "segment"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities": "segment"}, "timestamp_granularities", "array"),
        ({"stream": "true", "response_format": "vtt"}, "response_format", "support json"),
        ({"temperature": "1", "temperature[]": "1"}, "temperature", "Send one"),
        ({"response_format": "diarized_json"}, "response_format", "srt"),
        ({"temperature": "warm"}, "temperature", "float"),
        ({"temperature": "3"}, "temperature", "1"),
        ({"language": "x"}, "language", "2"),
        ({"prompt": "x" * 5000}, "prompt", "4096"),
    ):  # fmt: skip
        response = await post(gateway, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert message in error["message"]
    most = LimitSettings.max_audio_segments
    worker.segment_ends = tuple(float(number) for number in range(1, most + 2))
    error = (await post(gateway)).json()["error"]
    assert error["param"] == "file"
    assert f"this one has more than {most} segments" in error["message"]
    assert not worker.requests
