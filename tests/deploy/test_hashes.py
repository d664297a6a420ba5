"""Digests of large files are remembered, and never those of what may have changed."""

import os
from pathlib import Path

import pytest

from deploy import pack as hashes
from deploy.pack import HashCache
from shared.packages.manifest import digest_of


def test_a_file_is_hashed_again_when_it_has_changed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(hashes, "MIN_BYTES", 1)
    monkeypatch.setattr(hashes, "QUIET_S", -1.0)
    num_hashed = 0
    original = hashes.digest_of_file

    def counted(path: Path) -> str:
        nonlocal num_hashed
        num_hashed += 1
        return original(path)

    monkeypatch.setattr(hashes, "digest_of_file", counted)
    file, memory = tmp_path / "weights", tmp_path / "cache" / "digests.json"
    file.write_bytes(b"old")
    for expected in (1, 1):
        cache = HashCache(memory)
        assert cache.digest(file) == digest_of(b"old")
        cache.save()
        assert num_hashed == expected
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # times of before: not its ctime
    assert HashCache(memory).digest(file) == digest_of(b"new")
    memory.write_text("[broken")
    assert HashCache(memory).digest(file) == digest_of(b"new")


@pytest.mark.parametrize("size", [10, 1000])
def test_what_was_just_written_or_is_small_is_not_remembered(tmp_path: Path, monkeypatch, size):
    monkeypatch.setattr(hashes, "MIN_BYTES", 100)
    file, memory = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(bytes(size))
    cache = HashCache(memory)
    assert cache.digest(file) == digest_of(bytes(size))
    cache.save()
    assert not memory.exists()
