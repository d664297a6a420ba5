"""Fixtures: events that workers publish, a package store, and a process that decodes media."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.packages.store import FileStore
from shared.settings.limits import LimitSettings
from tests.factories_queue import Ends
from tests.factories_worker import Answers
from worker.prepare.video_pool import VideoPool


@pytest.fixture
async def answers(ends: Ends) -> AsyncIterator[Answers]:
    """All events of the test's requests."""
    answers = Answers(ends)
    yield answers
    await answers.close()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture(scope="module")
def pool() -> Iterator[VideoPool]:
    pool = VideoPool(1, LimitSettings())
    yield pool
    pool.close()
