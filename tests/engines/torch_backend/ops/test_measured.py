"""What computes bfloat16 products follows from times, which a machine measures once."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.torch_backend.ops import measured as module
from engines.torch_backend.ops.cpu_level import CpuLevel
from engines.torch_backend.ops.measured import FEW, MANY, Timings, decide, measured
from tests.cpu_levels import RUNNABLE, ops_of

ALWAYS = 1 << 30
LEVEL = CpuLevel("fake", max_float_tokens=48, max_rounded_tokens=ALWAYS)


def times(few: float, many: float) -> dict[int, float]:
    return {**dict.fromkeys(FEW, few), MANY: many}


@pytest.mark.parametrize(
    ("rounded", "by_torch", "max_rounded_tokens"),
    [
        (times(0.8, 30), times(2, 33), ALWAYS),
        (times(1.05, 34), times(2, 33), ALWAYS),  # as good as noise tells
        (times(0.8, 30), times(2, 5), 48),  # torch has matrix units
        (times(2, 30), times(2, 33), 0),  # an instruction that is there, and slow
    ],
)
def test_the_fastest_way_is_taken(
    rounded: dict[int, float], by_torch: dict[int, float], max_rounded_tokens: int
):
    timings = {"rounded": rounded, "float": times(1, 90), "torch": by_torch}

    assert decide(LEVEL, timings).max_rounded_tokens == max_rounded_tokens


def test_times_are_measured_once_and_damaged_ones_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path, request: pytest.FixtureRequest
):
    level = replace(RUNNABLE[0], max_rounded_tokens=ALWAYS) if RUNNABLE else pytest.skip("no level")
    ops_of("fast", RUNNABLE[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = type("Library", (), {"file": tmp_path / "kernels.so"})()
    monkeypatch.setattr(module.native, "load", lambda level: library)
    num_measured = 0

    def measure(_: object) -> Timings:
        nonlocal num_measured
        num_measured += 1
        return {"rounded": times(0.8, 30), "float": times(1, 90), "torch": times(2, 5)}

    monkeypatch.setattr(module, "measure", measure)
    request.addfinalizer(measured.cache_clear)
    for expected in (1, 1):
        measured.cache_clear()
        assert measured(level, 2).max_rounded_tokens == level.max_float_tokens
        assert num_measured == expected
    [file] = tmp_path.glob("times-*.json")
    file.write_text('{"rounded": {}}')
    measured.cache_clear()
    assert measured(level, 2).max_rounded_tokens == level.max_float_tokens
    assert num_measured == 2
    two_days_ago = file.stat().st_mtime - 2 * 86_400
    os.utime(file, (two_days_ago, two_days_ago))
    measured.cache_clear()
    assert measured(level, 2).max_rounded_tokens == level.max_float_tokens
    assert num_measured == 3


def test_one_process_of_a_machine_measures_at_a_time(tmp_path: Path):
    library: Any = type("Library", (), {"file": tmp_path / "kernels.so"})()
    inside, most = 0, 0
    lock = threading.Lock()

    def measure() -> list[int]:
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.05)
        with lock:
            inside -= 1
        return [1]

    # each opens the lock file by itself, as processes do
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda key: module.recall(library, key, json.loads, measure), "abab")
        assert list(found) == [[1]] * 4
    assert most == 1
    assert len(list(tmp_path.glob("times-*.json"))) == 2


def test_a_level_without_a_choice_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "measure", lambda _: pytest.fail("it is measured"))

    assert measured(replace(LEVEL, max_rounded_tokens=0), 2).max_rounded_tokens == 0


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
def test_every_way_is_timed(level: CpuLevel):
    ops_of("fast", level)
    timings = module.measure(module.native.load(level))

    assert {name: sorted(each) for name, each in timings.items()} == {
        name: [*FEW, MANY] for name in ("rounded", "float", "torch")
    }
    assert all(seconds > 0 for each in timings.values() for seconds in each.values())
