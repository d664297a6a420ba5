"""Videos and audio over HTTP, with a gateway, Redis and a worker with the mock engine.

In the mock engine a frame is one token, and so is a tenth of a second. `tests/worker/prepare` tests the decoders.
"""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.factories_audio import SOUNDS, make_audio, sound
from tests.factories_images import data_url, encoded, image_part
from tests.factories_video import CLIPS, clip
from tests.integration.fleet_process import Served, invoke_vlm, start_fleet

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with start_fleet(tmp_path_factory.mktemp("serve")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def clip_url(name: str = "mp4") -> str:
    return f"data:{CLIPS[name][1]};base64,{to_base64(clip(name))}"


def sound_url(name: str = "wav") -> str:
    return f"data:{SOUNDS[name][1]};base64,{to_base64(sound(name))}"


def chat(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    body = {"model": "mock", "messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body)


def video(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


def input_audio(data: str, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def audio(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": url}


def file(file_id: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}}


def num_tokens(response: httpx.Response) -> int:
    """Returns the number of prompt tokens of an answer beyond those of its text."""
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    num = usage.get("input_tokens") or usage["prompt_tokens"]
    return num - len("user: What is it?\nassistant:")


def respond(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    asked = [{"role": "user", "content": [*parts, TEXT | {"type": "input_text"}]}]
    body = {"model": "mock", "input": asked, "max_output_tokens": 2, **fields}
    return client.post("/v1/responses", json=body)


def frames_url(num_frames: int) -> str:
    files = [to_base64(encoded(seed, (32, 24), "JPEG")) for seed in range(num_frames)]
    return "data:video/jpeg;base64," + ",".join(files)


def upload(client: httpx.Client, name: str, data: bytes) -> str:
    """Uploads a file; returns its ID."""
    form = {"files": {"file": (name, data)}, "data": {"purpose": "vision"}}
    file = client.post("/v1/files", **form).json()  # type: ignore[arg-type]
    assert client.get(f"/v1/files/{file['id']}/content").content == data
    return file["id"]


def test_the_part_or_the_request_selects_the_frames(client: httpx.Client):
    url, three = clip_url(), {"video": {"num_frames": 3}}
    for options, fields, expected in (
        ({}, {}, 32),
        ({"num_frames": 5}, {}, 5),
        ({"fps": 500}, {}, 50),
        ({"start_s": 1.0, "end_s": 1.4}, {}, 10),
        ({}, {"media_io_kwargs": three}, 3),
        ({"fps": 2}, {"media_io_kwargs": three}, 4),
    ):
        assert num_tokens(chat(client, video(url, **options), **fields)) == expected, options


def test_all_forms_of_audio_are_equivalent(client: httpx.Client):
    """The media type that the client states is ignored."""
    url = sound_url()
    for part in (
        input_audio(to_base64(sound("wav")), "mp3"),
        input_audio(url),
        {"type": "audio_url", "audio_url": {"url": url}},
        audio(url),
        {"type": "file", "file": {"file_data": url}},
    ):
        assert num_tokens(chat(client, part)) == 20


def test_usage_and_metrics_count_tokens_by_the_kind_of_medium(client: httpx.Client):
    def counted() -> list[float]:
        lines = client.get("/metrics").text.splitlines()
        numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = [f'vlm_{kind}_tokens_total{{model="mock"}}' for kind in ("audio", "image")]
        return [float(numbers.get(name, 0)) for name in names]

    before = counted()
    parts = [input_audio(sound_url()), image_part(data_url()), video(clip_url())]
    usage = chat(client, *parts).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["audio_tokens"] == 20
    assert details["image_tokens"] > 32
    kinds = ("audio_tokens", "image_tokens", "text_tokens")
    assert sum(details[kind] for kind in kinds) == usage["prompt_tokens"]
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [details["audio_tokens"], details["image_tokens"]]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: video(clip_url("nonsense")), "video_url"),
        (lambda: video(clip_url("playlist")), "video_url"),
        (lambda: video(clip_url(), start_s=5), "video_url.start_s"),
        (lambda: video(frames_url(2), fps=1e-320), "video_url.fps"),
        (lambda: input_audio(to_base64(sound("no samples"))), "input_audio"),
        (lambda: audio(sound_url("another codec")), "audio_url"),
        (lambda: input_audio(""), "input_audio"),
        (lambda: input_audio("%%"), "input_audio"),
        (lambda: input_audio(to_base64(b"text")), "input_audio"),
        (lambda: audio("ftp://a"), "audio_url"),
        (lambda: audio("data:audio/wav,AA"), "audio_url"),
        (lambda: {"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
    ],
)
def test_a_bad_part_is_a_400_that_names_its_field(client: httpx.Client, make, field: str):
    """Also if only the worker detects the error; it then decodes the next file."""
    response = chat(client, make())
    expected = (400, f"messages.[0].content.[0].{field}")
    assert (response.status_code, response.json()["error"]["param"]) == expected
    assert num_tokens(chat(client, video(clip_url(), num_frames=4))) == 4


def test_uploaded_files_are_used_by_their_ids(client: httpx.Client):
    clip_id, sound_id = upload(client, "a.mp4", clip("mp4")), upload(client, "a.wav", sound("wav"))
    five = {"media_io_kwargs": {"video": {"num_frames": 5}}}
    assert num_tokens(chat(client, file(clip_id), **five)) == 5
    assert num_tokens(chat(client, video(clip_id, num_frames=6))) == 6
    for part in (file(sound_id), audio(sound_id)):
        assert num_tokens(chat(client, part)) == 20
    for named, num in (({"file_id": clip_id}, 32), ({"file_data": sound_url()}, 20)):
        assert num_tokens(respond(client, {"type": "input_file", **named})) == num
    silent = upload(client, "a.mp4", clip("sound"))
    part = {"type": "input_file", "file_id": silent}
    for refused, field in (
        (chat(client, video(sound_id)), "messages.[0].content.[0].video_url"),
        (chat(client, audio(clip_id)), "messages.[0].content.[0].audio_url"),
        (chat(client, file(silent)), "messages.[0].content.[0].file.file_id"),
        (respond(client, part), "input.[0].content.[0].file_id"),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    told = client.post(TRANSCRIPTIONS, json={"model": "mock", "file": sound_id}).json()
    assert told["text"] == transcribe(client, sound("wav")).json()["text"]


def test_responses_accept_and_store_media(client: httpx.Client):
    clip = {"type": "input_video", "video_url": clip_url(), "num_frames": 7}
    answer = respond(client, clip, input_audio(sound_url()))
    assert num_tokens(answer) == 7 + 20
    first = answer.json()
    assert first["usage"]["input_tokens_details"]["audio_tokens"] == 20
    second = respond(client, input="And now?", previous_response_id=first["id"]).json()
    assert 0 < second["usage"]["input_tokens"] - first["usage"]["input_tokens"] < 60


def test_stages_add_up_with_the_stage_media_decode(client: httpx.Client):
    for part in (video(clip_url("vp9")), input_audio(sound_url("opus"))):
        timings = chat(client, part, timings=True).json()["timings"]
        total = timings.pop("e2e_s")
        assert timings["media_decode_s"] > 0
        assert sum(timings.values()) == pytest.approx(total, rel=0.02)
    assert chat(client, timings=True).json()["timings"]["media_decode_s"] == 0


def test_the_model_reports_support_of_audio_and_videos(client: httpx.Client):
    [model] = [each for each in client.get("/v1/models").json()["data"] if each["id"] == "mock"]
    assert model["input_modalities"] == ["text", "image", "video", "audio"]
    assert (model["limits"]["max_audios"], model["limits"]["max_videos"]) == (4, 2)


def test_tokenize_counts_the_used_frames(client: httpx.Client):
    messages = [{"role": "user", "content": [video(clip_url(), num_frames=4)]}]
    told = client.post("/tokenize", json={"model": "mock", "messages": messages}).json()
    assert told["frames"] == [{"used": 4, "total": 50}]


def test_a_list_of_frames_is_a_video(client: httpx.Client):
    url = frames_url(3)
    assert num_tokens(chat(client, video(url, fps=0.5))) == 3
    for options, part in (({"num_frames": 2}, url), ({}, f"{url},AAAA")):
        assert chat(client, video(part, **options)).status_code == 400


def test_an_option_of_the_command_line_determines_the_kind_of_a_file(
    served: Served, tmp_path: Path
):
    for kind, name, data in (("video", "ts", clip("mpegts")), ("audio", "webm", sound("webm"))):
        path = tmp_path / f"file.{name}"
        path.write_bytes(data)
        asked = ("chat", "--url", served.url, f"--{kind}", str(path), "--max-tokens", "2", "What?")
        done = invoke_vlm(*asked)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip()


def ask_eight_at_once(served: Served, first: int) -> list[httpx.Response]:
    """Sends eight different videos concurrently."""
    url = clip_url("large")

    def ask(count: int) -> httpx.Response:
        with served.client() as client:
            return chat(client, video(url, num_frames=count))

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(ask, range(first, first + 8)))


def test_eight_videos_at_once_are_all_answered(served: Served):
    assert [num_tokens(each) for each in ask_eight_at_once(served, 100)] == [*range(100, 108)]
    decoders = [each for each in served.family() if "video_child" in " ".join(each.cmdline())]
    assert 1 <= len(decoders) <= 2  # worker.decode_processes


def test_videos_beyond_the_limits_are_refused_until_later_and_beyond_the_context(tmp_path: Path):
    with start_fleet(
        tmp_path,
        VLM_LIMITS__MAX_OPEN_BODY_BYTES=str(2 * len(clip_url("large"))),
        VLM_LIMITS__MAX_QUEUE_DEPTH="2",
        VLM_ENGINE__MAX_MODEL_LEN="40",
    ) as served:
        responses = ask_eight_at_once(served, 2)
        assert {200} <= {each.status_code for each in responses} <= {200, 429, 503}
        for each in responses:
            assert each.status_code == 200 or int(each.headers["retry-after"]) >= 1
        with served.client() as client:
            error = chat(client, video(clip_url())).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert "the video has 32 frames, 32 tokens" in error["message"]
            assert num_tokens(chat(client, video(clip_url(), num_frames=8))) == 8


# Transcriptions


@pytest.fixture
def sdk(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def transcribe(client: httpx.Client, data: bytes, **fields: str) -> httpx.Response:
    files = {"file": ("a.wav", data)}
    return client.post(TRANSCRIPTIONS, files=files, data={"model": "mock", **fields})


def test_language_prompt_and_translation_are_part_of_the_question(client: httpx.Client):
    counts = [
        transcribe(client, sound("wav"), **fields).json()["usage"]["input_tokens"]
        for fields in ({}, {"language": "de"}, {"language": "de", "prompt": "Names: Ada."})
    ]
    assert counts == sorted({*counts})
    files, fields = {"file": ("a.wav", sound("wav"))}, {"model": "mock", "language": "de"}
    found = client.post("/v1/audio/translations", files=files, data=fields)
    assert found.json()["usage"]["input_tokens"] not in counts
    assert found.headers["x-vlm-ignored"] == "language"


def test_the_error_names_a_bad_missing_or_empty_file(client: httpx.Client):
    form = {"files": {"prompt": (None, "x"), "model": (None, "mock")}}
    for response in (
        client.post(TRANSCRIPTIONS, **form),  # type: ignore[arg-type]
        *(transcribe(client, data) for data in (b"", encoded(), sound("cut"), sound("slow rate"))),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


def test_a_long_file_is_split_in_its_pauses_and_transcribed(sdk: openai.OpenAI):
    file = ("a.mp3", make_audio("libmp3lame", "mp3", 75.0, rate=16_000, pauses=(27.0, 49.0)))
    create = sdk.audio.transcriptions.create
    found = create(
        file=file, model="mock", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert found.segments is not None
    assert [round(segment.start) for segment in found.segments] == [0, 27, 49]
    assert [round(segment.end) for segment in found.segments] == [27, 49, 75]
    assert found.duration == pytest.approx(75.0, abs=0.2)
    assert found.text == " ".join(segment.text.strip() for segment in found.segments)
    usage: Any = found.usage  # OpenAI counts seconds in this format
    assert (usage.type, usage.seconds) == ("duration", found.duration)
    assert 750 <= usage.input_token_details["audio_tokens"] <= 755
    events = list(create(file=file, model="mock", stream=True))
    assert events[-1].type == "transcript.text.done"
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text
    assert events[-1].text.strip() == found.text
    assert str(create(file=file, model="mock", response_format="srt")).count(" --> ") == 3
    assert str(create(file=file, model="mock", response_format="text")) == found.text
    whole: Any = create(file=file, model="mock").usage
    assert (whole.type, 750 <= whole.input_token_details.audio_tokens <= 755) == ("tokens", True)
