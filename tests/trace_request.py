"""Prints the files that one streamed chat request runs through: `make trace-request`, or with options

    python -m tests.trace_request --engine torch --image

Gateway and worker run in this process with a Redis on a unix socket, so that one profiler traces both. The first
request is not traced, so code that runs only once is not counted; neither are other processes, Lua and C++.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from engines.registry import create_engine
from shared.redis.embedded import EmbeddedRedis
from shared.settings.load import load_settings
from tests.factories_gateway import run_gateway_on_socket
from tests.factories_images import data_url
from worker.main import WorkerProcess

ROOT = Path(__file__).parent.parent
NUM_LOOKS = 3
PACKAGES = ("gateway", "shared", "worker", "engines")
PREFIXES = tuple(f"{ROOT}{os.sep}{package}{os.sep}" for package in PACKAGES)


class Trace:
    """The called functions, in the order of their first calls."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: dict[str, dict[str, None]] = {}

    def start(self) -> None:
        """Traces this thread, and threads that start later."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(PREFIXES):
            return
        self.functions.setdefault(code.co_filename, {})[code.co_qualname] = None

    def print(self) -> None:
        """Prints the files in the order of their first calls, and their number."""
        for number, (path, functions) in enumerate(self.functions.items(), 1):
            name = str(Path(path).relative_to(ROOT))
            print(f"{number:3}  {name:48} {len(functions):3}  {', '.join(list(functions)[:3])}")
        files = Counter(Path(path).relative_to(ROOT).parts[0] for path in self.functions)
        parts = ", ".join(f"{package} {files[package]}" for package in PACKAGES)
        print(
            f"\n{files.total()} files ({parts}), {sum(map(len, self.functions.values()))} functions"
        )


def make_body(model: str, has_image: bool) -> dict[str, Any]:
    """Returns a streamed chat request."""
    text = {"type": "text", "text": "What is in this image?"}
    image = {"type": "image_url", "image_url": {"url": data_url(size=(64, 64))}}
    content = [image, text] if has_image else [text]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 8, "stream": True}


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        answer = (await response.aread()).decode()
    assert response.is_success, answer
    assert answer.endswith("data: [DONE]\n\n"), answer


async def trace(engine: str, has_image: bool, redis_url: str) -> Trace:
    """Answers a request several times; returns what every repetition calls.

    A file that only some of them call belongs to another task that ran at the same time.
    """
    settings = load_settings(
        redis={"url": redis_url},
        gateway={"port": 0},
        worker={"decode_processes": 0},
        engine={"kind": engine},
    )
    create_engine({"kind": engine}).engine.close()  # imports are slow while every call is traced
    found = Trace()
    found.start()
    worker = asyncio.create_task(WorkerProcess(settings).run())
    async with run_gateway_on_socket(settings) as gateway:
        while not (models := (await gateway.client.get("/v1/models")).json()["data"]):
            await asyncio.wait({worker}, timeout=0.1)
            assert not worker.done(), worker
        body = make_body(models[0]["id"], has_image)
        await ask(gateway.client, body)
        ways: list[dict[str, dict[str, None]]] = []
        for _ in range(NUM_LOOKS):
            found.functions = {}
            found.is_on = True
            await ask(gateway.client, body)
            found.is_on = False
            ways.append(found.functions)
        found.functions = {
            path: ways[0][path] for path in ways[0] if all(path in way for way in ways)
        }
    worker.cancel()
    with suppress(asyncio.CancelledError):
        await worker
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The way of one streamed chat request.")
    parser.add_argument("--engine", default="mock", help="mock or torch")
    parser.add_argument("--image", action="store_true", help="ask about an image")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlm-trace-") as folder:
        server = EmbeddedRedis(Path(folder))
        try:
            found = asyncio.run(trace(options.engine, options.image, server.start()))
        finally:
            server.stop()
    found.print()


if __name__ == "__main__":
    main()
