"""Transcriptions over HTTP, by OpenAI's own client and as plain forms, with the mock engine."""

from typing import Any

import httpx
import openai
import pytest

from tests.factories_audio import SOUNDS, make_audio, sound
from tests.factories_images import encoded as picture
from tests.integration.fleet_process import Served

PATH = "/v1/audio/transcriptions"


@pytest.fixture
def client(served: Served):
    with served.client() as client:
        yield client


@pytest.fixture
def sdk(served: Served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(client: httpx.Client, data: bytes, path: str = PATH, **fields: str) -> httpx.Response:
    return client.post(
        path, files={"file": ("a.wav", data)}, data={"model": "mock", **fields}, timeout=60
    )


def test_the_official_client_gets_text_and_usage(sdk: openai.OpenAI):
    file = ("a.mp3", sound("mp3"))
    found = sdk.audio.transcriptions.create(file=file, model="mock", language="en", temperature=0)
    assert found.text
    assert found.usage is not None
    assert found.usage.type == "tokens"
    assert found.usage.input_token_details.audio_tokens in (20, 21)  # type: ignore[union-attr]
    text = sdk.audio.transcriptions.create(
        file=file, model="mock", language="en", response_format="text"
    )
    assert str(text) == found.text


def test_translations_have_another_question(client: httpx.Client):
    path = "/v1/audio/translations"
    found, other = post(client, sound("wav"), path).json(), post(client, sound("wav")).json()
    assert found["text"]
    assert found["usage"]["input_tokens"] != other["usage"]["input_tokens"]
    ignored = post(client, sound("wav"), path, language="de").headers["x-vlm-ignored"]
    assert ignored == "language"


def test_language_and_prompt_are_part_of_the_question(client: httpx.Client):
    counts = [
        post(client, sound("wav"), **fields).json()["usage"]["input_tokens"]
        for fields in ({}, {"language": "de"}, {"language": "de", "prompt": "Names: Ada."})
    ]
    assert counts == sorted({*counts})


def test_json_may_name_an_uploaded_file(client: httpx.Client):
    files = {"file": ("a.flac", sound("flac"))}
    file = client.post("/v1/files", files=files, data={"purpose": "vision"}).json()
    response = client.post(PATH, json={"model": "mock", "file": file["id"]}, timeout=60)
    assert response.json()["text"] == post(client, sound("flac")).json()["text"]


@pytest.mark.parametrize(
    "name", [n for n, (_, _, problem) in SOUNDS.items() if problem and n != "long"]
)
def test_a_bad_file_is_a_400_that_names_it(client: httpx.Client, name: str):
    response = post(client, sound(name))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "file"), error


def test_files_that_are_missing_empty_or_no_audio_are_named(client: httpx.Client):
    form = {"files": {"prompt": (None, "x"), "model": (None, "mock")}}
    for response in (
        client.post(PATH, **form),  # type: ignore[arg-type]
        post(client, b""),
        post(client, picture()),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


def test_a_long_file_is_cut_in_its_pauses_and_transcribed_whole(sdk: openai.OpenAI):
    file = ("a.mp3", make_audio("libmp3lame", "mp3", 75.0, rate=16_000, pauses=(27.0, 49.0)))
    found = sdk.audio.transcriptions.create(
        file=file, model="mock", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert found.segments is not None
    assert [round(segment.start) for segment in found.segments] == [0, 27, 49]
    assert [round(segment.end) for segment in found.segments] == [27, 49, 75]
    assert found.duration == pytest.approx(75.0, abs=0.2)
    assert found.text == " ".join(segment.text.strip() for segment in found.segments)
    usage: Any = found.usage  # OpenAI's own is of seconds in this format
    assert (usage.type, usage.seconds) == ("duration", found.duration)
    assert 750 <= usage.input_token_details["audio_tokens"] <= 755
    events = list(sdk.audio.transcriptions.create(file=file, model="mock", stream=True))
    assert events[-1].type == "transcript.text.done"
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text
    assert events[-1].text.strip() == found.text
    srt = sdk.audio.transcriptions.create(file=file, model="mock", response_format="srt")
    assert str(srt).count(" --> ") == 3
