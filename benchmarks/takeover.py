"""Record docs/takeover.svg: a worker is killed in the middle of a stream. `python -m benchmarks.takeover docs/takeover.svg`

The fleet is `vlm serve` with its built-in model. The times in the picture were measured.
"""

import json
import sys
import time
from contextlib import AbstractContextManager
from html import escape
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from loadtest.albums import to_png_url
from loadtest.fleet import Server, free_port, run_server

IMAGE = Path("engines/packages/shapes/samples/shapes.png")
QUESTION = "Describe the image."
KILL_AFTER = 8  #: tokens before the kill
LEASE_S = 2
#: A longer gap shows that the killed worker was computing the stream; other streams have shorter gaps.
_LEAST_GAP_S = 0.2
_WIDTH, _HEIGHT, _LINE = 92, 9, 20

Piece = tuple[float, str]  #: seconds, text


def run_fleet() -> AbstractContextManager[Server]:
    port = free_port()
    command = ["-m", "vlm", "serve", "--port", str(port), "--workers", "2"]
    return run_server(command, port, "/readyz?workers=2", {"VLM_WORKER__LEASE_S": str(LEASE_S)})


def find_workers(fleet: Server) -> list[psutil.Process]:
    children = psutil.Process(fleet.process.pid).children()
    found = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if each.cmdline()[1:4] == ["-m", "vlm", "worker"]]


def ask(url: str, victim: psutil.Process | None) -> tuple[list[Piece], float]:
    """The pieces of an answer, and the time at which the victim was killed."""
    image = to_png_url(IMAGE.read_bytes())
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
                victim.kill()
                killed_s = time.perf_counter() - began_at
    return pieces, killed_s


def record() -> tuple[list[Piece], float, int]:
    """Record a run in which the killed worker was computing the stream."""
    with run_fleet() as fleet:
        whole = "".join(text for _, text in ask(fleet.url, None)[0])
        while True:
            victim = find_workers(fleet)[0]
            pieces, killed_s = ask(fleet.url, victim)
            if "".join(text for _, text in pieces) != whole:
                raise SystemExit("the answer differs from that of a run without a killed worker")
            gaps = [b[0] - a[0] for a, b in pairwise(pieces)]
            if max(gaps) > _LEAST_GAP_S:
                return pieces, killed_s, victim.pid
            while len(find_workers(fleet)) < 2:
                time.sleep(0.2)
            time.sleep(5)


def draw(pieces: list[Piece], killed_s: float, pid: int) -> str:
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
