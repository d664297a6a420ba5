"""The examples of docs/embeddings.md work as they stand, but for the port, and print what the page shows."""

import asyncio
import contextlib
import io
import re
from pathlib import Path
from typing import Any

from engines.registry import create_engine
from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_worker import run_worker

PAGE = (Path(__file__).parents[3] / "docs" / "embeddings.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```$", PAGE, re.M | re.S)


def run(url: str) -> list[str]:
    names: dict[str, Any] = {}
    printed = []
    for code, _ in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code.replace("http://127.0.0.1:8000", url), names)
        printed.append(out.getvalue())
    names["client"].close()
    return printed


async def test_the_examples_print_what_the_page_shows(ends, redis_server, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    name = "mock-embeddings"

    def load():
        return create_engine({"kind": "mock_pooling", "served_name": name})

    async with (
        run_worker(ends, load=load),
        run_gateway_on_socket(make_settings(redis_server, ends.prefix)) as gateway,
    ):
        assert await asyncio.to_thread(run, gateway.url) == [shown for _, shown in BLOCKS]
    assert len(BLOCKS) >= 3
