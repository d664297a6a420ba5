"""The Python examples of docs pages work as they stand, but for the port, and print what the page shows."""

import asyncio

import pytest

from engines.registry import create_engine
from tests.doc_examples import Examples
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_search import serve_search
from tests.factories_worker import run_worker


@pytest.mark.parametrize("page", ["embeddings.md", "search.md"])
async def test_the_examples_print_what_the_page_shows(
    ends, redis_server, tmp_path, monkeypatch, page
):
    monkeypatch.setenv("NO_PROXY", "*")
    examples = Examples(page)

    def load():
        return create_engine({"kind": "mock_pooling", "served_name": "mock-embeddings"})

    async with serve_search(tmp_path / "search") as search, run_worker(ends, load=load):
        settings = make_settings(redis_server, ends.prefix, search=dict(search))
        async with run_gateway_on_socket(settings) as gateway:
            assert await asyncio.to_thread(examples.run, gateway.url) == examples.shown
    assert len(examples.shown) >= 3
