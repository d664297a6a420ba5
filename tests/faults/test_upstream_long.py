"""A real llama-server, vLLM or SGLang behind the fleet: worker, server or both are killed during a stream."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from shared.process import cancel
from tests.engines.upstream import sglang, vllm
from tests.engines.upstream.llama import run_llama_server
from tests.engines.upstream.llama import write_model as write_gguf
from tests.faults.processes import WITHIN_S, Process, Processes, run_processes
from tests.long import long

pytestmark = [long("faults"), pytest.mark.timeout(600)]

#: The functions that write a model and run its server, by the name of the engine.
GPU_SERVERS = {
    "vllm": (vllm.write_model, vllm.run_vllm),
    "sglang": (sglang.write_model, sglang.run_sglang),
}
NUM_TOKENS = 60
PAUSE_S = 0.03  #: before each event of the server, so that streams last long enough
#: Greedy, and without partial characters, whose token IDs llama-server does not report.
BODY = {
    "model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True}, "logit_bias": {str(i): -100 for i in range(131, 259)},
}  # fmt: skip


@dataclass
class SlowProxy:
    """Forwards a server's events with pauses. `target` is the server's port."""

    port: int = 0
    target: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            answers, requests = await asyncio.open_connection("127.0.0.1", self.target)
            for way in (_copy(reader, requests), _copy(answers, writer, PAUSE_S)):
                task = asyncio.create_task(way)
                self.tasks.add(task)
            return
        writer.close()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float = 0.0
) -> None:
    """Copies until one side has disconnected, then disconnects the other."""
    try:
        with suppress(OSError):
            while data := await reader.read(65536):
                for line in data.splitlines(keepends=True):
                    if line.startswith(b"data:"):
                        await asyncio.sleep(pause_s)
                    writer.write(line)
                    await writer.drain()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def run_slow_proxy() -> AsyncIterator[SlowProxy]:
    proxy = SlowProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await cancel(*proxy.tasks)


async def start_worker(
    all_: Processes, name: str, kind: str, model: Path, proxy: SlowProxy
) -> Process:
    return await all_.worker(
        name,
        command=("vlm", "worker", "--engine", kind),
        VLM_ENGINE__MODEL=str(model),
        VLM_ENGINE__URL=f"http://127.0.0.1:{proxy.port}",
        VLM_ENGINE__SERVED_NAME="tiny",
        VLM_ENGINE__SILENCE_S="2",
    )


async def read(url: str, middle: asyncio.Event) -> tuple[str, int]:
    """Returns text and number of tokens of one answer. Sets `middle` after a third of it."""
    text, num_tokens, num_chunks = "", 0, 0
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S) as client,
        client.stream("POST", "/v1/completions", json=BODY) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["text"] for choice in chunk["choices"])
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
            num_chunks += 1
            if num_chunks == NUM_TOKENS // 3:
                middle.set()
    return text, num_tokens


def start_server(stack: AsyncExitStack, kind: str, model: Path) -> tuple[int, Callable[[], None]]:
    """Starts a server; returns its port, and a function that kills it."""
    if kind in GPU_SERVERS:
        url, server = stack.enter_context(GPU_SERVERS[kind][1](model))
        [child] = psutil.Process(server.pid).children()  # the child of the guard process
        kill = partial(os.killpg, child.pid, signal.SIGKILL)
    else:
        url, process = stack.enter_context(run_llama_server(model))
        kill = process.kill
    return int(url.rpartition(":")[2]), kill


@pytest.mark.parametrize("killed", ["worker", "server", "both"])
@pytest.mark.parametrize("kind", ["llama-server", *GPU_SERVERS])
async def test_a_stream_continues_from_its_tokens(kind: str, killed: str, tmp_path: Path):
    is_gguf = kind == "llama-server"
    write = write_gguf if is_gguf else GPU_SERVERS[kind][0]
    model = write(tmp_path / ("tiny.gguf" if is_gguf else "tiny"))
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(run_slow_proxy())
        all_ = await stack.enter_async_context(run_processes(tmp_path))
        proxy.target, kill = await asyncio.to_thread(start_server, stack, kind, model)
        _, url = await all_.gateway()
        worker = await start_worker(all_, "first", kind, model, proxy)
        expected = await read(url, asyncio.Event())
        assert expected[1] == NUM_TOKENS
        middle = asyncio.Event()
        answer = asyncio.create_task(read(url, middle))
        await asyncio.wait_for(middle.wait(), WITHIN_S)
        if killed != "server":
            worker.signal(signal.SIGKILL)
        if killed != "worker":
            kill()
        await worker.ended()  # a worker ends when its server is lost
        if killed != "worker":
            proxy.target, _ = await asyncio.to_thread(start_server, stack, kind, model)
        await start_worker(all_, "second", kind, model, proxy)
        assert await asyncio.wait_for(answer, WITHIN_S) == expected
