"""Audio over HTTP, by a gateway, Redis and a worker with the mock engine, for which a tenth of a second is a token."""

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.factories_audio import SOUNDS, sound
from tests.factories_images import data_url as image_url
from tests.factories_video import clip
from tests.integration.fleet_process import Served, invoke_vlm

BAD = [name for name, (_, _, problem) in SOUNDS.items() if problem and name != "long"]
TEXT = {"type": "text", "text": "What is said?"}
FIELD = "messages.[0].content.[0]"


@pytest.fixture
def client(served: Served):
    with served.client() as client:
        yield client


def base(name: str = "wav") -> str:
    return base64.b64encode(sound(name)).decode()


def data_url(name: str = "wav") -> str:
    return f"data:{SOUNDS[name][1]};base64,{base(name)}"


def chat(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    body = {"model": "mock", "messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body, timeout=60)


def input_audio(data: str, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def num_tokens(response: httpx.Response) -> int:
    """Prompt tokens of an answer beyond those of its text."""
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"] - len("user: What is said?\nassistant:")


@pytest.mark.parametrize("name", [name for name, (_, _, problem) in SOUNDS.items() if not problem])
def test_audio_of_many_kinds_is_answered(client: httpx.Client, name: str):
    """Whatever the client says that it is."""
    assert num_tokens(chat(client, input_audio(base(name), "mp3"))) in (20, 21)


def test_all_forms_of_a_part_are_the_same(client: httpx.Client):
    for part in (
        input_audio(base()),
        input_audio(data_url()),
        {"type": "audio_url", "audio_url": {"url": data_url()}},
        {"type": "audio_url", "audio_url": data_url()},
        {"type": "file", "file": {"file_data": data_url()}},
    ):
        assert num_tokens(chat(client, part)) == 20


def test_usage_and_metrics_count_tokens_by_the_kind_of_medium(client: httpx.Client):
    def counted() -> list[float]:
        lines = client.get("/metrics").text.splitlines()
        numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = [f'vlm_{kind}_tokens_total{{model="mock"}}' for kind in ("audio", "image")]
        return [float(numbers.get(name, 0)) for name in names]

    picture = {"type": "image_url", "image_url": {"url": image_url()}}
    before = counted()
    usage = chat(client, input_audio(base()), picture).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["audio_tokens"] == 20
    assert details["image_tokens"] > 0
    assert (
        details["audio_tokens"] + details["image_tokens"] + details["text_tokens"]
        == usage["prompt_tokens"]
    )
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [details["audio_tokens"], details["image_tokens"]]


@pytest.mark.parametrize("name", BAD)
def test_bad_audio_is_a_400_that_names_its_field(client: httpx.Client, name: str):
    for part, field in (
        (input_audio(base(name)), "input_audio"),
        ({"type": "audio_url", "audio_url": {"url": data_url(name)}}, "audio_url"),
    ):
        response = chat(client, part)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"{FIELD}.{field}")
        assert error["message"].startswith(
            ("The audio ", "The codec of the audio ", "The file has no audio", "Unsupported audio")
        )


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        (input_audio(""), "input_audio", "The audio is empty: send WAV, MP3"),
        (input_audio("%%"), "input_audio", "not valid base64"),
        (input_audio(base64.b64encode(b"text").decode()), "input_audio", "Unsupported audio: send WAV, MP3"),
        ({"type": "audio_url", "audio_url": "ftp://a"}, "audio_url", "Unknown URL"),
        ({"type": "audio_url", "audio_url": "data:audio/wav,AA"}, "audio_url", "send data:audio/wav;base64"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "data"),
    ],
)  # fmt: skip
def test_a_bad_part_is_a_400_that_names_its_field(client: httpx.Client, part, field, message):
    response = chat(client, part)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"{FIELD}.{field}")
    assert message in error["message"]


def test_more_audio_than_the_limit_is_refused_by_the_first_beyond_it(client: httpx.Client):
    error = chat(client, *[input_audio(base())] * 5).json()["error"]
    assert error["param"] == "messages.[0].content.[4].input_audio"
    assert "send at most 4 audio files" in error["message"]


def test_uploaded_audio_is_used_by_its_id(client: httpx.Client):
    files = {"file": ("a.m4a", sound("m4a"))}
    file = client.post("/v1/files", files=files, data={"purpose": "vision"}).json()
    for part in (
        {"type": "file", "file": {"file_id": file["id"]}},
        {"type": "audio_url", "audio_url": {"url": file["id"]}},
    ):
        assert num_tokens(chat(client, part)) in (20, 21)
    assert client.get(f"/v1/files/{file['id']}/content").content == sound("m4a")
    wrong = {"type": "video_url", "video_url": {"url": file["id"]}}
    assert "send it as audio_url" in chat(client, wrong).json()["error"]["message"]


def test_an_uploaded_video_without_sound_is_no_audio(client: httpx.Client):
    files = {"file": ("a.mp4", clip("mp4"))}
    file = client.post("/v1/files", files=files, data={"purpose": "vision"}).json()
    error = chat(client, {"type": "audio_url", "audio_url": file["id"]}).json()["error"]
    assert (error["message"], error["param"]) == ("The file has no audio.", f"{FIELD}.audio_url")


def test_responses_take_audio_and_remember_it(client: httpx.Client):
    text = {"type": "input_text", "text": "What is said?"}
    content = [input_audio(base()), text]
    body = {
        "model": "mock",
        "input": [{"role": "user", "content": content}],
        "max_output_tokens": 2,
    }
    first = client.post("/v1/responses", json=body, timeout=60).json()
    assert first["usage"]["input_tokens"] - len("user: What is said?\nassistant:") == 20
    assert first["usage"]["input_tokens_details"]["audio_tokens"] == 20
    body = {**body, "input": "And now?", "previous_response_id": first["id"]}
    second = client.post("/v1/responses", json=body, timeout=60).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_stages_add_up_with_a_stage_of_its_own(client: httpx.Client):
    timings = chat(client, input_audio(base("opus")), timings=True).json()["timings"]
    total = timings.pop("e2e_s")
    assert timings["media_decode_s"] > 0
    assert sum(timings.values()) == pytest.approx(total, rel=0.02)


def test_the_model_says_that_it_takes_audio_and_videos(client: httpx.Client):
    [model] = [each for each in client.get("/v1/models").json()["data"] if each["id"] == "mock"]
    assert model["input_modalities"] == ["text", "image", "video", "audio"]
    assert (model["limits"]["max_audios"], model["limits"]["max_videos"]) == (4, 2)


def test_the_command_line_asks_about_audio(served: Served, tmp_path: Path):
    path = tmp_path / "a.flac"
    path.write_bytes(sound("flac"))
    done = invoke_vlm(
        "chat", "--url", served.url, "--audio", str(path), "--max-tokens", "2", "What?"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
