"""Gateways and workers as separate processes around one Redis: who comes and goes needs no configuration."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.integration.fleet_process import ROOT

WITHIN_S = 30


class Started:
    """A process that said in its log that it is ready."""

    def __init__(self, *arguments: str, ready: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vlm", *arguments],
            cwd=ROOT, env={**os.environ, **variables}, text=True, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if ready in line:
                self.ready_line = line
                break
        else:
            raise AssertionError(f"vlm {' '.join(arguments)} ended early:\n" + "".join(lines))
        # what it says later must not block it
        self._reader = threading.Thread(target=self.process.stderr.read)
        self._reader.start()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=WITHIN_S)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


Start = Callable[..., Started]


@pytest.fixture
def start(redis_server, redis_prefix) -> Iterator[Start]:
    started: list[Started] = []

    def begin(*arguments: str, **variables: str) -> Started:
        ready = "gateway listens" if arguments[0] == "gateway" else "ready"
        variables |= {"VLM_REDIS_URL": redis_server, "VLM_REDIS__KEY_PREFIX": redis_prefix}
        started.append(Started(*arguments, ready=ready, **variables))
        return started[-1]

    yield begin
    for process in started:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)


def start_worker(start: Start, decode_s: float = 0.02) -> Started:
    return start("worker", "--engine", "mock", VLM_ENGINE__MOCK__DECODE_S=str(decode_s))


def start_gateway(start: Start) -> OpenAI:
    line = start("gateway", "--port", "0").ready_line
    url = next(word for word in line.split() if word.startswith("http://"))
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WITHIN_S)
    return client


def ask(client: OpenAI, text: str, num_tokens: int = 8) -> str:
    answer = client.chat.completions.create(
        model="mock",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=num_tokens,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content


def test_workers_join_and_leave_under_load_without_a_failed_request(start):
    first = start_worker(start)
    with (
        start_gateway(start) as client,
        start_gateway(start) as other,
        ThreadPoolExecutor(24) as pool,
    ):
        expected = ask(client, "question 0", 30)
        gateways = [client] * 6 + [other] * 6
        answers = [pool.submit(ask, gateways[i % 12], f"question {i % 6}", 30) for i in range(48)]
        start_worker(start)
        assert first.end() == 0
        texts = [answer.result(WITHIN_S) for answer in answers]
        assert texts[0] == expected
        assert all(texts[i] == texts[i % 6] for i in range(48))
