"""Sends requests, each with a new image, at the same time to servers that speak the OpenAI API.

Called by `vlm bench burst`. The servers are measured alternately.
"""

import asyncio
import base64
import io
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx
from PIL import Image

from benchmarks.peers.prompts import IMAGE_SIZE
from benchmarks.tables import Spread, in_turn, new_table, show

_TIMEOUT_S = 1800.0


@dataclass(slots=True)
class Server:
    """A server, and its results in the order of the rounds."""

    name: str
    url: str
    model: str = ""
    rates: list[float] = field(default_factory=list)  #: requests/s
    latencies_s: list[float] = field(default_factory=list)  #: median of each round
    num_prompt_tokens: int = 0


def _image(source: random.Random) -> str:
    """A JPEG of noise in large squares, about 30 kB, as a data URL."""
    noise = Image.frombytes("RGB", (80, 60), source.randbytes(3 * 80 * 60))
    file = io.BytesIO()
    noise.resize(IMAGE_SIZE).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def _ask(client: httpx.AsyncClient, server: Server, image: str, num_tokens: int) -> float:
    """Send a request; returns its seconds. Raises: httpx.HTTPError; ValueError for an error or a wrong length."""
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "Describe the image in a few words."},
    ]
    body = {
        "model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": num_tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    began = time.perf_counter()
    response = await client.post(f"{server.url}/v1/chat/completions", json=body)
    elapsed = time.perf_counter() - began
    usage = response.json().get("usage", {}) if response.is_success else {}
    if usage.get("completion_tokens") != num_tokens:
        raise ValueError(f"{server.name}: {response.status_code} {response.text[:500]}")
    server.num_prompt_tokens = usage["prompt_tokens"]
    return elapsed


async def _burst(server: Server, images: list[str], num_tokens: int) -> tuple[float, float]:
    """Send all requests at once; returns requests/s and the median latency."""
    limits = httpx.Limits(max_connections=len(images))
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
        began = time.perf_counter()
        times = await asyncio.gather(*(_ask(client, server, image, num_tokens) for image in images))
        return len(images) / (time.perf_counter() - began), statistics.median(times)


def run(servers: list[Server], num_requests: int, num_tokens: int, rounds: int) -> None:
    """The command. Raises: httpx.HTTPError, ValueError for a server that fails."""
    source = random.Random(0)
    for server in servers:
        listed = httpx.get(f"{server.url}/v1/models", timeout=10).raise_for_status().json()
        server.model = listed["data"][0]["id"]
        asyncio.run(_burst(server, [_image(source)], num_tokens))  # loads and compiles
    for number, server in in_turn(rounds, servers):
        images = [_image(source) for _ in range(num_requests)]
        rate, latency_s = asyncio.run(_burst(server, images, num_tokens))
        server.rates.append(rate)
        server.latencies_s.append(latency_s)
        print(f"round {number + 1}: {server.name} {rate:.3f} requests/s", flush=True)
    table = new_table(
        f"{num_requests} requests at once, {num_tokens} tokens each: median and minimum-maximum",
        "server", "prompt tokens", "requests/s", "median latency s", f"{servers[0].name}, times",
    )  # fmt: skip
    best = statistics.median(servers[0].rates)
    for server in servers:
        ratio = best / statistics.median(server.rates)
        rate, latency = Spread.of(server.rates), Spread.of(server.latencies_s)
        rates = f"{rate.median:.3f}\n{rate.low:.3f}-{rate.high:.3f}"
        table.add_row(
            server.name, str(server.num_prompt_tokens), rates, latency.text(), f"{ratio:.2f}"
        )
    show(table)
