"""The examples of docs/embeddings.md work as they stand, but for the port, and print what the page shows."""

import asyncio

from engines.registry import create_engine
from tests.doc_examples import Examples
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_worker import run_worker


async def test_the_examples_print_what_the_page_shows(ends, redis_server, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    examples = Examples("embeddings.md")

    def load():
        return create_engine({"kind": "mock_pooling", "served_name": "mock-embeddings"})

    async with (
        run_worker(ends, load=load),
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        assert await asyncio.to_thread(examples.run, gateway.url) == examples.shown
    assert len(examples.shown) >= 3
