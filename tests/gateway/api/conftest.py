"""OpenAI's client of a test's gateway."""

import openai
import pytest


@pytest.fixture
def api_key() -> str:
    return "none"


@pytest.fixture
async def client(gateway, api_key):
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=api_key, max_retries=0, http_client=http
    ) as client:
        yield client
