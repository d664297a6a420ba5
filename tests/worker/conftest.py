"""What workers publish, read by a gateway of the test."""

from collections.abc import AsyncIterator

import pytest

from tests.factories_queue import Ends
from tests.factories_worker import Answers


@pytest.fixture
async def answers(ends: Ends) -> AsyncIterator[Answers]:
    """All events of the test's requests."""
    answers = Answers(ends)
    yield answers
    await answers.close()
