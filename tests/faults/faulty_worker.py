"""A worker process on a mock engine with faults: `!kill-decode` in a prompt kills the worker during decode.

Faults occur at a request's first attempt, and `!kill-always` at every attempt. They are named in the prompt instead of
timed, so they occur at the same point on a loaded machine. Arguments: those of `vlm worker`.
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

#: Number of output tokens after which faults of decoding occur.
FAULT_AT_TOKEN = 5
FAULTS = (
    "kill-prefill", "kill-decode", "kill-batch", "kill-finish", "kill-always", "wedge", "raise", "break",
)  # fmt: skip
_FAULT = re.compile("!(" + "|".join(FAULTS) + ")")


def fault_in(text: str, attempt: int) -> str:
    """Returns the fault that a prompt requests for this attempt, or an empty string."""
    found = _FAULT.search(text)
    name = found[1] if found else ""
    return name if attempt == 1 or name == "kill-always" else ""


class FaultyRunner(engines.mock.engine.MockRunner):
    """The mock runner with faults."""

    def launch(self, batch: Batch) -> engines.mock.engine.MockStep:
        """Launches a step, unless a request in it requests a fault."""
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
    """The mock pooling model with faults."""

    def compute(self, rows: Sequence[Row]) -> None:
        """Computes a batch, unless a text in it requests a fault."""
        for row in rows:
            if _faults.pop(row, "") == "kill-batch":
                os.kill(os.getpid(), signal.SIGKILL)
        super().compute(rows)


_faults: dict[Row, str] = {}


class FaultyPoolingEngine(PoolingEngine):
    """Records which rows request a fault, because the model does not get the attempt."""

    def add(self, request: PoolingInput) -> None:
        attempt = int(request.request_id.rpartition("@")[2].partition(".")[0])
        for row in request.rows:
            if fault := fault_in(row.content.decode(errors="replace"), attempt):
                _faults[row] = fault
        super().add(request)


class FaultyPublisher(shared.queue.worker.Publisher):
    """Dies after Redis has accepted the end of a request, before the worker processes the reply."""

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
    """Runs a worker with these faults."""
    engines.mock.engine.MockRunner = FaultyRunner
    engines.mock_pooling.engine.MockPoolingModel = FaultyPoolingModel
    engines.mock_pooling.engine.PoolingEngine = FaultyPoolingEngine
    shared.queue.worker.Publisher = FaultyPublisher
    parent = ("--die-with-parent", str(os.getppid()))
    sys.argv = ["vlm", "worker", "--engine", "mock", *parent, *sys.argv[1:]]
    vlm.main()


if __name__ == "__main__":
    main()
