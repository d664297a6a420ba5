"""Videos over HTTP, by a gateway, Redis and a worker with the mock engine, for which a frame is a token."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.factories_video import CLIPS, clip
from tests.integration.fleet_process import Served, invoke_vlm, start_fleet

BAD = [name for name, (_, _, problem) in CLIPS.items() if problem]
TEXT = {"type": "text", "text": "What moves?"}


@pytest.fixture
def client(served: Served):
    with served.client() as client:
        yield client


def data_url(name: str = "mp4") -> str:
    return f"data:{CLIPS[name][1]};base64,{base64.b64encode(clip(name)).decode()}"


def chat(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    body = {"model": "mock", "messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body, timeout=60)


def video(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


def num_frames(response: httpx.Response) -> int:
    """Prompt tokens of an answer beyond those of its text."""
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"] - len("user: What moves?\nassistant:")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 32), ({"num_frames": 5}, 5), ({"fps": 2}, 4), ({"fps": 500}, 50), ({"num_frames": 200}, 50),
        ({"start_s": 1.0, "end_s": 1.4}, 10), ({"start_s": 1.5, "fps": 4}, 2),
    ],
)  # fmt: skip
def test_the_part_says_which_frames_are_used(client: httpx.Client, options, expected: int):
    assert num_frames(chat(client, video(data_url(), **options))) == expected


def test_options_of_the_request_are_those_of_parts_without(client: httpx.Client):
    kwargs = {"video": {"num_frames": 3}}
    assert num_frames(chat(client, video(data_url()), media_io_kwargs=kwargs)) == 3
    response = chat(client, video(data_url(), fps=2), media_io_kwargs=kwargs)
    assert num_frames(response) == 4


@pytest.mark.parametrize("name", [name for name, (_, _, problem) in CLIPS.items() if not problem])
def test_videos_of_many_kinds_are_answered(client: httpx.Client, name: str):
    assert num_frames(chat(client, video(data_url(name), num_frames=4))) in (1, 4)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_is_a_400_that_names_its_field(client: httpx.Client, name: str):
    response = chat(client, video(data_url(name)))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages.[0].content.[0].video_url")
    if error["code"] == "invalid_image":
        assert CLIPS[name][2] in error["message"]
    else:  # the gateway looks at the first bytes
        assert error["message"] == "Unsupported video: send MP4, WebM, AVI or MPEG-TS."
    assert num_frames(chat(client, video(data_url(), num_frames=4))) == 4


def test_a_bad_option_is_named_though_only_the_worker_knows(client: httpx.Client):
    error = chat(client, video(data_url(), start_s=5)).json()["error"]
    assert error["param"] == "messages.[0].content.[0].video_url.start_s"


def test_stages_add_up_with_a_stage_of_its_own(client: httpx.Client):
    timings = chat(client, video(data_url("vp9"), fps=3), timings=True).json()["timings"]
    total = timings.pop("e2e_s")
    assert timings["media_decode_s"] > 0
    assert sum(timings.values()) == pytest.approx(total, rel=0.02)
    timings = chat(client, timings=True).json()["timings"]
    assert timings["media_decode_s"] == 0


def test_tokens_of_a_video_are_tokens_of_the_prompt(client: httpx.Client):
    usage = chat(client, video(data_url())).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert (usage["prompt_tokens"], details["image_tokens"], details["text_tokens"]) == (60, 32, 28)


def test_the_tokenizer_says_how_many_frames_are_used(client: httpx.Client):
    messages = [{"role": "user", "content": [video(data_url(), num_frames=4)]}]
    told = client.post("/tokenize", json={"model": "mock", "messages": messages}).json()
    assert told["frames"] == [{"used": 4, "total": 50}]


def test_frames_are_a_video(client: httpx.Client):
    files = []
    for shade in (0, 90, 180):
        file = io.BytesIO()
        Image.new("L", (32, 24), shade).convert("RGB").save(file, "JPEG")
        files.append(base64.b64encode(file.getvalue()).decode())
    url = "data:video/jpeg;base64," + ",".join(files)
    assert num_frames(chat(client, video(url))) == 3
    assert num_frames(chat(client, video(url, fps=0.5))) == 3
    for options, part in (({"num_frames": 2}, url), ({}, f"{url},AAAA")):
        assert chat(client, video(part, **options)).status_code == 400


def test_an_uploaded_video_is_used_by_its_id(client: httpx.Client):
    files = {"file": ("clip.mp4", clip("mp4"))}
    file = client.post("/v1/files", files=files, data={"purpose": "vision"}).json()
    part = {"type": "file", "file": {"file_id": file["id"]}}
    assert num_frames(chat(client, part)) == 32
    kwargs = {"video": {"num_frames": 5}}
    assert num_frames(chat(client, part, media_io_kwargs=kwargs)) == 5
    assert num_frames(chat(client, video(file["id"], num_frames=6))) == 6
    assert client.get(f"/v1/files/{file['id']}/content").content == clip("mp4")


def test_responses_take_a_video_and_remember_it(client: httpx.Client):
    part = {"type": "input_video", "video_url": data_url(), "num_frames": 7}
    text = {"type": "input_text", "text": "What moves?"}
    body = {
        "model": "mock",
        "input": [{"role": "user", "content": [part, text]}],
        "max_output_tokens": 2,
    }
    first = client.post("/v1/responses", json=body, timeout=60).json()
    assert first["usage"]["input_tokens"] - len("user: What moves?\nassistant:") == 7
    body = {**body, "input": "And now?", "previous_response_id": first["id"]}
    second = client.post("/v1/responses", json=body, timeout=60).json()
    more = second["usage"]["input_tokens"] - first["usage"]["input_tokens"]
    assert 0 < more < 60


def test_the_command_line_asks_about_a_video(served: Served, tmp_path: Path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip("mp4"))
    done = invoke_vlm(
        "chat", "--url", served.url, "--video", str(path), "--max-tokens", "2", "What?"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def ask_eight_at_once(served: Served) -> list[httpx.Response]:
    """Videos of which no two are the same."""
    url = data_url("large")
    with served.client() as client, ThreadPoolExecutor(8) as threads:
        return list(
            threads.map(lambda number: chat(client, video(url, num_frames=number)), range(100, 108))
        )


def test_eight_videos_at_once_are_all_answered(served: Served):
    for _ in range(2):
        responses = ask_eight_at_once(served)
        assert [num_frames(each) for each in responses] == [*range(100, 108)]
    decoders = [each for each in served.family() if "video_child" in " ".join(each.cmdline())]
    assert 1 <= len(decoders) <= 2  # worker.decode_processes


def test_videos_beyond_the_limits_are_sent_away_until_later(tmp_path: Path):
    most = 2 * len(data_url("large"))
    served = start_fleet(
        tmp_path, VLM_LIMITS__MAX_OPEN_BODY_BYTES=str(most), VLM_LIMITS__MAX_QUEUE_DEPTH="2"
    )
    try:
        responses = ask_eight_at_once(served)
        assert {200} <= {each.status_code for each in responses} <= {200, 429, 503}
        for each in responses:
            assert each.status_code == 200 or int(each.headers["retry-after"]) >= 1
        with served.client() as client:
            assert num_frames(chat(client, video(data_url(), num_frames=4))) == 4
    finally:
        served.end()


def test_a_video_that_fills_the_context_is_told_by_its_frames_and_tokens(tmp_path: Path):
    served = start_fleet(tmp_path, VLM_ENGINE__MAX_MODEL_LEN="40")
    try:
        with served.client() as client:
            error = chat(client, video(data_url())).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            assert error["message"] == (
                "the model's maximum context length is 40 tokens; the prompt has 60 tokens and leaves no "
                "room for output; the video has 32 frames, 32 tokens: send fewer frames with a lower num_frames or fps"
            )
            assert num_frames(chat(client, video(data_url(), num_frames=8))) == 8
    finally:
        served.end()
