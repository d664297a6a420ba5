"""A model that ranks share: one of them is killed, and no client notices."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import pytest

from tests.integration.fleet_process import Served, start_fleet
from tests.long import long

pytestmark = [
    pytest.mark.timeout(600),
    long("faults"),
]
NUM_STREAMS = 4
NUM_TOKENS = 200
RANK = "engines.torch_backend.loading.rank"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Served]:
    served = start_fleet(
        tmp_path, "--workers", "2", "--tensor-parallel", "2", engine="torch",
        VLM_ENGINE__DTYPE="float32", VLM_ENGINE__MAX_NUM_SEQS="2", VLM_WORKER__LEASE_S="3",
    )  # fmt: skip
    yield served
    served.end()


def ask(fleet: Served, number: int, has_begun: Barrier | None = None) -> str:
    """The text of a streamed answer; says when it has some of it."""
    body: dict[str, Any] = {
        "model": "shapes", "stream": True, "max_tokens": NUM_TOKENS, "seed": number,
        "temperature": number % 2, "messages": [{"role": "user", "content": f"question {number}"}],
        "ignore_eos": True,
    }  # fmt: skip
    text, num_chunks = "", 0
    with (
        fleet.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            num_chunks += 1
            if num_chunks == 5 and has_begun is not None:
                has_begun.wait(120)
    return text


def test_a_rank_that_is_killed_ends_its_worker_and_others_go_on(fleet: Served) -> None:
    """P3, P4, and the worker comes back with all of its ranks."""
    expected = [ask(fleet, number) for number in range(NUM_STREAMS)]
    ranks = [process for process in fleet.family() if RANK in process.cmdline()]
    assert len(ranks) == 2
    victim, worker = ranks[0], ranks[0].parent()
    assert worker is not None
    has_begun = Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = [threads.submit(ask, fleet, number, has_begun) for number in range(NUM_STREAMS)]
        has_begun.wait(120)
        victim.kill()
        worker.wait(timeout=20)
        assert [answer.result() for answer in answers] == expected
    _, alive = psutil.wait_procs([victim], timeout=20)
    assert not alive
    assert ask(fleet, 0) == expected[0]
