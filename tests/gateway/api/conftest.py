"""The `client` fixture: OpenAI's client of the test's gateway."""

import pytest

from tests.factories_gateway import openai_client


@pytest.fixture
def api_key() -> str:
    return "none"


@pytest.fixture
async def client(gateway, api_key):
    async with openai_client(gateway, api_key) as client:
        yield client
