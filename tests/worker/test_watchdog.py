"""The watchdog ends the process for a hung step, and for nothing else."""

import threading
import time

import pytest

from worker.engine_thread import EXIT_WEDGED, Watchdog


def test_a_hung_step_ends_the_process(capfd: pytest.CaptureFixture[str]):
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    started_at = time.monotonic()
    dog = Watchdog(0.02, lambda: started_at, end)
    dog.start()

    assert ended.wait(5)
    assert codes == [EXIT_WEDGED]


def test_an_idle_engine_is_left_alone():
    looked = threading.Event()
    codes: list[int] = []

    def started_at() -> None:
        looked.set()

    dog = Watchdog(0.02, started_at, codes.append)
    dog.start()
    assert looked.wait(5)
    dog.stop()

    assert codes == []
