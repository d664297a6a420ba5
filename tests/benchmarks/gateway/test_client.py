"""The benchmark client uses all its connections and counts only complete and correct answers."""

import base64
import io
import json

import pytest
from PIL import Image

from benchmarks.gateway.client import BenchError, Job, run_job
from benchmarks.peers.burst import Server
from benchmarks.peers.burst import run as run_burst
from loadtest.albums import NumberedUrls, noise_jpeg
from tests.loadtest.fake_server import WORDS, chunk, completion, event, stream

TEXT = "".join(WORDS)
IMAGE = {"type": "image_url", "image_url": {"url": NumberedUrls(noise_jpeg()).url(0)}}
HELLO = {"type": "text", "text": "hello"}


def job(fake=None, stream=False, content=None, **changes) -> Job:
    messages = [{"role": "user", "content": content or [HELLO]}]
    body = {"model": "fake", "messages": messages, "max_tokens": 3, "stream": stream}
    port = int(fake.url.rpartition(":")[2]) if fake else 1
    options = {"num_connections": 2, "seconds": 0.2, "warmup_s": 0.05, "expected_text": TEXT}
    return Job(port, json.dumps(body), stream=stream, **{**options, **changes})


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_connection_is_used_and_every_answer_counted(fake, streamed):
    result = await run_job(job(fake, stream=streamed))
    assert result.num_events == result.num_all * (7 if streamed else 0)
    assert 0 < len(result.latencies_s) <= result.num_all == len(fake.bodies)
    assert len(fake.connections) == 2
    assert 0 < result.latency_s(0.5) <= result.latency_s(0.99) < 5.0


async def test_each_request_shows_the_next_image(fake):
    content = [IMAGE, HELLO]
    await run_job(job(fake, content=content, has_new_images=True, num_connections=1))
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in fake.bodies]
    jpegs = [base64.b64decode(url.partition(",")[2]) for url in urls]
    numbers = [int(jpeg[6:18]) for jpeg in jpegs]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(set(urls)) == len(urls)
    pixels = [Image.open(io.BytesIO(jpeg)).convert("RGB").tobytes() for jpeg in jpegs[:2]]
    assert pixels[0] == pixels[1]


@pytest.mark.parametrize(
    "change",
    [
        {"status": 503},
        {"completion": completion(choices=[])},
        {"completion": {"choices": [{"message": {"content": TEXT}, "finish_reason": "stop"}]}},
        {"completion": {"choices": [{"message": {"content": "no"}, "finish_reason": "length"}]}},
    ],
)
async def test_wrong_whole_answer_ends_the_job(fake, change):
    for name, value in change.items():
        setattr(fake, name, value)
    with pytest.raises(BenchError):
        await run_job(job(fake))


@pytest.mark.parametrize(
    "pieces",
    [
        stream()[:-1],
        [piece for piece in stream() if piece != chunk(WORDS[1])],
        [chunk(TEXT), event(b"[DONE]")],
        [chunk(TEXT), event({"error": {"code": "engine_failure"}})],
    ],
)
async def test_incomplete_stream_ends_the_job(fake, pieces):
    fake.pieces = pieces
    with pytest.raises((OSError, BenchError)):
        await run_job(job(fake, stream=True))


def test_a_burst_asks_about_a_new_image_each_time(fake, capsys):
    run_burst([Server("fake", fake.url)], 5, num_tokens=3, rounds=2)
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in fake.bodies]
    assert len(set(urls)) == len(urls) == 1 + 2 * 5
    assert "requests/s" in capsys.readouterr().out


def test_a_burst_with_a_shorter_answer_is_refused(fake):
    with pytest.raises(ValueError, match="fake: 200"):
        run_burst([Server("fake", fake.url)], 2, num_tokens=4, rounds=1)
