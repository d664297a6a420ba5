"""A video of 200 MB: the gateway streams it to the store, and a child process of a worker reads it from there."""

import os
import struct
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.factories_video import clip
from tests.integration.fleet_process import Served, run_vlm, start_fleet
from tests.integration.test_media import chat, num_tokens, video
from tests.shared.conftest import s3_url as s3_url

MIB = 1024 * 1024
NUM_BYTES = 200_000_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module", params=["directory", "bucket"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("obstore")
    folder = tmp_path_factory.mktemp("large")
    is_bucket = request.param == "bucket"
    store = request.getfixturevalue("s3_url") if is_bucket else f"file://{folder / 'blobs'}"
    with start_fleet(
        folder,
        VLM_BLOBS__STORE=store,
        VLM_LIMITS__MAX_VIDEO_BYTES=str(NUM_BYTES),
        VLM_LIMITS__MAX_KEY_RESPONSE_BYTES=str(2 * NUM_BYTES),
    ) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(tmp_path_factory.mktemp("clip") / "large.mp4", NUM_BYTES)


def padded(path: Path, num_bytes: int) -> Path:
    """Writes a clip with a box of zeros at its end; returns its path."""
    data = clip("mp4")
    with path.open("wb") as file:
        file.write(data + struct.pack(">I4s", num_bytes - len(data), b"free"))
        file.truncate(num_bytes)
    return path


def upload(client: httpx.Client, path: Path) -> httpx.Response:
    with path.open("rb") as file:
        files = {"file": ("clip.mp4", file)}
        return client.post("/v1/files", files=files, data={"purpose": "vision"})


def most_memory(process: psutil.Process) -> int:
    """Returns the largest resident memory since the last call, in bytes."""
    folder = Path("/proc") / str(process.pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    (folder / "clear_refs").write_text("5")
    return 1024 * int(status["VmHWM"].split()[0])


def test_a_large_video_is_not_held_in_memory(fleet: Served, large: Path, tmp_path: Path):
    gateway, worker = fleet.child("gateway"), fleet.child("worker")
    small = padded(tmp_path / "clip.mp4", MIB)
    with fleet.client() as client:
        assert num_tokens(chat(client, video(upload(client, small).json()["id"]))) == 32
        most_memory(gateway), most_memory(worker)
        before = gateway.memory_info().rss, worker.memory_info().rss
        file = upload(client, large).json()
        assert file["bytes"] == NUM_BYTES, file
        for count in (3, 4):
            assert num_tokens(chat(client, video(file["id"], num_frames=count))) == count
        with client.stream("GET", f"/v1/files/{file['id']}/content") as response:
            assert sum(map(len, response.iter_bytes())) == NUM_BYTES
    after = most_memory(gateway), most_memory(worker)
    assert after[0] - before[0] <= 32 * MIB
    assert after[1] - before[1] <= 32 * MIB
    decoders = [each for each in fleet.family() if "video_child" in " ".join(each.cmdline())]
    assert decoders
    assert max(most_memory(each) for each in decoders) <= 400 * MIB


def test_a_file_beyond_the_limit_is_refused_while_it_arrives(
    fleet: Served, large: Path, tmp_path: Path
):
    larger = tmp_path / "larger.mp4"
    larger.write_bytes(large.read_bytes()[:1000])
    with larger.open("r+b") as file:
        file.truncate(NUM_BYTES + 1)
    with fleet.client() as client:
        error = upload(client, larger).json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "file")
        with larger.open("r+b") as file:
            file.truncate(NUM_BYTES + 2 * MIB)
        response = upload(client, larger)
        code = response.json()["error"]["code"]
        assert (response.status_code, code) == (413, "request_too_large")


def test_limits_above_64_mib_need_a_store():
    environment = {**os.environ, "VLM_LIMITS__MAX_AUDIO_BYTES": str(NUM_BYTES)}
    done = run_vlm("gateway", "--redis-url", "unix:///nowhere", env=environment)
    assert done.returncode
    reason = "VLM_LIMITS__MAX_AUDIO_BYTES: above 67108864 bytes, set VLM_BLOBS__STORE too"
    assert reason in done.stderr
