"""Hostile images: the gateway or a child process refuses them, or they are decoded as by image viewers."""

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings

from engines.base import InvalidImage
from engines.child_process import can_filter
from gateway.http.errors import InvalidRequest
from gateway.media.loader import ImageSource
from shared.settings.limits import LimitSettings
from tests.factories_hostile_images import CASES, SIZE, Case
from tests.factories_images import encoded, load
from tests.fuzzing import EDITS, edited, num_examples, takes_its_time
from worker.prepare import decoder_pool
from worker.prepare.decoder_pool import DecoderPool

LIMITS = LimitSettings()
TEXTS = (
    decoder_pool.CANNOT_DECODE,
    decoder_pool.TOO_LONG,
    "The size of the image differs from its header.",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    with closing(DecoderPool(1, LIMITS.max_image_bytes, LIMITS.max_image_pixels, 2.0)) as pool:
        yield pool


def children() -> set[int]:
    return {
        child.pid
        for child in psutil.Process().children()
        if "decoder_child" in " ".join(child.cmdline())
    }


async def admit(data: bytes) -> tuple[int, int]:
    """Returns the size of an image that the gateway accepts. Raises: InvalidRequest."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    [image] = await load(ImageSource(url, "p"))
    return image.ref.width, image.ref.height


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_each_image_has_the_outcome_of_its_case(pool: DecoderPool, case: Case):
    data = case.make()
    if case.door is not None:
        with pytest.raises(InvalidRequest) as raised:
            await admit(data)
        assert raised.value.code == case.door
        assert "0x" not in raised.value.message
        return
    size = await admit(data)
    if not case.decodes:
        with pytest.raises(InvalidImage) as refused:
            pool.decode(data, size)
        assert str(refused.value) in TEXTS
    else:
        image = pool.decode(data, size)
        assert (image.mode, image.size) == ("RGB", case.size or SIZE)
        if case.pixel is not None:
            found = image.getpixel((0, 0))
            assert all(abs(a - b) <= 3 for a, b in zip(found, case.pixel, strict=True)), found  # type: ignore[arg-type]
    assert pool.decode(encoded(), SIZE).size == SIZE  # the next image is decoded as usual


@takes_its_time
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
@settings(max_examples=num_examples(50))
@given(edits=EDITS)
async def test_an_image_of_changed_bytes_is_refused_or_decoded(pool: DecoderPool, form, edits):
    data = edited(encoded(format=form), edits)
    with suppress(InvalidRequest, InvalidImage):
        size = await admit(data)
        image = pool.decode(data, size)
        assert image.width * image.height == size[0] * size[1]


def test_an_image_beyond_the_limits_is_refused_and_its_memory_is_freed():
    with closing(DecoderPool(1, 10_000_000, 4_000_000, max_cpu_s=5.0)) as pool:
        before = psutil.Process().memory_info().shared
        for size in ((4000, 1000), (1000, 4000)):
            assert pool.decode(encoded(size=size), size).size == size
        assert psutil.Process().memory_info().shared - before < 6_000_000
        for data, size in ((encoded(), (4001, 1000)), (bytes(12_000_001), SIZE)):
            with pytest.raises(InvalidImage, match="limits"):
                pool.decode(data, size)
        assert pool.decode(encoded(), SIZE).size == SIZE


def test_a_child_that_dies_fails_one_image(pool: DecoderPool):
    pool.decode(encoded(), SIZE)
    [victim] = children()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(InvalidImage):
        pool.decode(encoded(), SIZE)
    assert pool.decode(encoded(), SIZE).size == SIZE
    assert victim not in children()


def test_a_child_that_hangs_fails_one_image():
    before = children()
    with closing(DecoderPool(1, 100_000, 10_000, max_cpu_s=1.0)) as pool:
        pool.decode(encoded(), SIZE)
        [victim] = children() - before
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(InvalidImage, match="too long"):
            pool.decode(encoded(), SIZE)
        assert victim not in children()
    assert children() == before


def test_a_child_has_no_secrets_and_is_confined(monkeypatch):
    monkeypatch.setenv("VLM_GATEWAY__API_KEYS", "sk-secret")
    fresh = DecoderPool(1, 100_000, 10_000, max_cpu_s=5.0)
    before = children()
    fresh.decode(encoded(), SIZE)
    [child] = children() - before
    assert set(psutil.Process(child).environ()) <= {"PYTHONPATH", "LC_CTYPE"}
    assert not psutil.Process(child).net_connections("inet")
    status = Path(f"/proc/{child}/status").read_text()
    assert not can_filter() or "Seccomp:\t2" in status
    assert not can_filter() or "NoNewPrivs:\t1" in status
    fresh.close()
    assert child not in children()


#: Attempts of an image that has taken over its decoder; each prints the error that it gets.
BREAKOUT = """
import ctypes, os, socket, subprocess, sys
from engines.child_process import confine
attempts = {
    "environ": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "file": lambda: open("/etc/passwd").read(),
    "write": lambda: open("/tmp/decoder", "w"),
    "tcp": lambda: socket.socket(),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "program": lambda: os.execv("/bin/true", ["true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
}
if not confine():
    sys.exit(3)
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    except Exception as error:
        print(name, error)
    else:
        print(name)
"""


@pytest.mark.skipif(not can_filter(), reason="this kernel filters no system calls")
def test_a_confined_process_opens_no_file_and_no_socket():
    command = [sys.executable, "-c", BREAKOUT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_memory_beyond_the_limit_is_not_allocated():
    small = DecoderPool(1, 90_000_000, -15_000_000, max_cpu_s=5.0)
    with closing(small), pytest.raises(InvalidImage):
        small.decode(encoded(size=(6000, 5000)), (6000, 5000))


def test_a_child_is_replaced_after_many_images(monkeypatch):
    monkeypatch.setattr(DecoderPool, "max_files", 2)
    before, seen = children(), set[int]()
    with closing(DecoderPool(1, 100_000, 10_000, max_cpu_s=5.0)) as pool:
        for _ in range(4):
            pool.decode(encoded(), SIZE)
            seen |= children() - before
    assert len(seen) == 3  # the last child has no image yet
