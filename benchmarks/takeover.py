"""Record docs/takeover.svg: a worker is killed in the middle of a stream. `python -m benchmarks.takeover docs/takeover.svg`

The fleet is `vlm serve` with its built-in model, and the times are those of the run.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from loadtest.fleet import free_port

IMAGE = Path("engines/packages/shapes/samples/shapes.png")
QUESTION = "Describe the image."
KILL_AFTER = 8  #: tokens
LEASE_S = 2
#: A stream without the killed worker has no such gap.
_LEAST_GAP_S = 0.2
_WIDTH, _HEIGHT, _LINE = 92, 9, 20

Piece = tuple[float, str]  #: seconds, text


@contextmanager
def run_fleet() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "vlm", "serve", "--port", str(port), "--workers", "2"]
    environment = {**os.environ, "VLM_WORKER__LEASE_S": str(LEASE_S)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            while True:
                try:
                    if httpx.get(f"{url}/readyz?workers=2").is_success:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.2)
            yield url, process
        finally:
            process.terminate()


def find_workers(fleet: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(fleet.pid).children()
    found = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if each.cmdline()[1:4] == ["-m", "vlm", "worker"]]


def ask(url: str, victim: psutil.Process | None) -> tuple[list[Piece], float]:
    """The pieces of an answer, and when the victim was killed."""
    image = f"data:image/png;base64,{base64.b64encode(IMAGE.read_bytes()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"model": "shapes", "temperature": 0, "stream": True, "messages": messages}
    pieces: list[Piece] = []
    began_at, killed_s = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if text:
                pieces.append((time.perf_counter() - began_at, text))
            if victim is not None and not killed_s and len(pieces) == KILL_AFTER:
                os.kill(victim.pid, signal.SIGKILL)
                killed_s = time.perf_counter() - began_at
    return pieces, killed_s


def record() -> tuple[list[Piece], float, int]:
    """A take in which the killed worker had the stream."""
    with run_fleet() as (url, fleet):
        whole = "".join(text for _, text in ask(url, None)[0])
        while True:
            victim = find_workers(fleet)[0]
            pieces, killed_s = ask(url, victim)
            if "".join(text for _, text in pieces) != whole:
                raise SystemExit("the answer is not that of a run without a killed worker")
            gaps = [b[0] - a[0] for a, b in pairwise(pieces)]
            if max(gaps) > _LEAST_GAP_S:
                return pieces, killed_s, victim.pid
            while len(find_workers(fleet)) < 2:
                time.sleep(0.2)
            time.sleep(5)


def draw(pieces: list[Piece], killed_s: float, pid: int) -> str:
    """The take as an animated SVG."""
    events = [(0.0, f'$ vlm chat --image shapes.png "{QUESTION}"\n')]
    events += [(1.0 + at_s, text) for at_s, text in pieces]
    end_s = events[-1][0]
    words = len("".join(text for _, text in pieces).split())
    events.append((end_s + 0.5, f"\n\n{words} words, the same as without the kill.\n"))
    kill = (1.0 + killed_s, f"$ kill -9 {pid}    # the worker that was answering")
    spans, column, row = [], 0, 0

    def show(at_s: float, text: str, place: str, style: str = "") -> str:
        begin = f'<set attributeName="visibility" to="visible" begin="{at_s:.2f}s" fill="freeze"/>'
        return f'<text {place} {style} visibility="hidden">{escape(text)}{begin}</text>'

    for at_s, text in events:
        for word in text.replace("\n", " \n ").split(" "):
            if word == "\n":
                column, row = 0, row + 1
            elif word:
                if column + len(word) > _WIDTH:
                    column, row = 0, row + 1
                spans.append(
                    show(at_s, word, f'x="{16 + 8.43 * column:.1f}" y="{34 + _LINE * row}"')
                )
                column += len(word) + 1
    place = f'x="16" y="{34 + _LINE * (_HEIGHT - 1)}"'
    spans.append(show(*kill, place, 'class="kill"'))
    width, height = 32 + 8.43 * _WIDTH, 30 + _LINE * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">'
        "<title>A worker is killed in the middle of a stream; another one continues it</title>"
        "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}"
        ".kill{fill:#ff7b72}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{"".join(spans)}</svg>\n'
    )


if __name__ == "__main__":
    pieces, killed_s, pid = record()
    longest_s = max(b[0] - a[0] for a, b in pairwise(pieces))
    print(f"the longest pause is {longest_s:.2f} s, with a lease of {LEASE_S} s")
    Path(sys.argv[1]).write_text(draw(pieces, killed_s, pid))
