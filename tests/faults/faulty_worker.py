"""A worker process on a mock engine that fails on request: `!kill-decode` in a prompt kills the worker there.

Faults are played on a request's first attempt; `!kill-always` on each. They are named in the prompt, not by the
clock, so that a loaded machine plays them at the same point. Arguments: those of `vlm worker`.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence

import engines.mock.engine
import engines.mock_pooling.engine
import shared.queue.worker
import vlm
from engines.core.runner import SequenceFailure
from engines.core.sequence import Batch, ScheduledSequence
from engines.pooling.batch import Row
from engines.pooling.engine import PoolingEngine, PoolingInput
from shared.protocol import Embed, Task, TextPart, decode_call
from shared.queue.api import Publication

#: Output tokens after which the faults of decoding are played.
FAULT_AT_TOKEN = 5
FAULTS = (
    "kill-prefill", "kill-decode", "kill-batch", "kill-finish", "kill-always", "wedge", "raise", "break",
)  # fmt: skip
_FAULT = re.compile("!(" + "|".join(FAULTS) + ")")


def fault_in(text: str, attempt: int) -> str:
    """The fault that a prompt asks for at this attempt, if any."""
    found = _FAULT.search(text)
    name = found[1] if found else ""
    return name if attempt == 1 or name == "kill-always" else ""


class FaultyRunner(engines.mock.engine.MockRunner):
    """The mock's arithmetic, interrupted."""

    def launch(self, batch: Batch) -> engines.mock.engine.MockStep:
        """One step, unless a request in it asks for something else."""
        for item in batch.items:
            self._play(item)
        return super().launch(batch)

    def _play(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        prompt = bytes(t for t in sequence.token_ids[: sequence.num_prompt_tokens] if t < 256)
        attempt = int(sequence.request_id.rpartition("@")[2].partition(".")[0])
        fault = fault_in(prompt.decode(errors="replace"), attempt)
        is_in_decode = sequence.num_output_tokens == FAULT_AT_TOKEN
        if fault in ("kill-prefill", "kill-always") or (fault == "kill-decode" and is_in_decode):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "wedge" and is_in_decode:
            time.sleep(3600)
        elif fault == "raise" and is_in_decode:
            raise SequenceFailure(sequence.request_id, "the step failed")
        elif fault == "break" and is_in_decode:
            raise RuntimeError("the device is lost")


class FaultyPoolingModel(engines.mock_pooling.engine.MockPoolingModel):
    """The pretended arithmetic, interrupted."""

    def compute(self, rows: Sequence[Row]) -> None:
        """One batch, unless a text in it asks for something else."""
        for row in rows:
            if _faults.pop(row, "") == "kill-batch":
                os.kill(os.getpid(), signal.SIGKILL)
        super().compute(rows)


_faults: dict[Row, str] = {}


class FaultyPoolingEngine(PoolingEngine):
    """Notes which rows ask for a fault: the model knows no attempts."""

    def add(self, request: PoolingInput) -> None:
        attempt = int(request.request_id.rpartition("@")[2].partition(".")[0])
        for row in request.rows:
            if fault := fault_in(row.content.decode(errors="replace"), attempt):
                _faults[row] = fault
        super().add(request)


class FaultyPublisher(shared.queue.worker.Publisher):
    """Dies after Redis has taken the end of a request and before anybody here knows."""

    async def _send(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        refused = await super()._send(reply_to, batch)
        for publication in batch:
            if publication.ending is None:
                continue
            text = _text_of(decode_call(publication.claim.payload).task)
            if fault_in(text, publication.claim.attempt) == "kill-finish":
                os.kill(os.getpid(), signal.SIGKILL)
        return refused


def _text_of(task: Task) -> str:
    parts = task.inputs if isinstance(task, Embed) else task.messages[-1].parts  # type: ignore[union-attr]
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def main() -> None:
    """Run a worker with these faults in it."""
    engines.mock.engine.MockRunner = FaultyRunner
    engines.mock_pooling.engine.MockPoolingModel = FaultyPoolingModel
    engines.mock_pooling.engine.PoolingEngine = FaultyPoolingEngine
    shared.queue.worker.Publisher = FaultyPublisher
    parent = ("--die-with-parent", str(os.getppid()))
    sys.argv = ["vlm", "worker", "--engine", "mock", *parent, *sys.argv[1:]]
    vlm.main()


if __name__ == "__main__":
    main()
