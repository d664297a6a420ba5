"""A worker process on the mock engine that fails on request: `!kill-decode` in a prompt kills the worker there.

Faults are played on a request's first attempt; `!kill-always` on each. They are named in the prompt, not by the
clock, so that a loaded machine plays them at the same point. Arguments: those of `vlm worker`.
"""

import os
import re
import signal
import sys
import time

import engines.mock.engine
import vlm
from engines.core.runner import SequenceFailure
from engines.core.sequence import Batch, ScheduledSequence
from shared.protocol import TextPart, decode_call
from shared.queue.api import Publication
from shared.queue.publish import Publisher

#: Output tokens after which the faults of decoding are played.
FAULT_AT_TOKEN = 5
FAULTS = ("kill-prefill", "kill-decode", "kill-finish", "kill-always", "wedge", "raise", "break")
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
        attempt = int(sequence.request_id.rpartition("@")[2])
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


class FaultyPublisher(Publisher):
    """Dies after Redis has taken the end of a request and before anybody here knows."""

    async def _send(self, reply_to: str, batch: list[Publication]) -> dict[str, str]:
        refused = await super()._send(reply_to, batch)
        for publication in batch:
            if publication.ending is None:
                continue
            parts = decode_call(publication.claim.payload).task.messages[-1].parts
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            if fault_in(text, publication.claim.attempt) == "kill-finish":
                os.kill(os.getpid(), signal.SIGKILL)
        return refused


def main() -> None:
    """Run a worker with these faults in it."""
    import shared.queue.claim  # noqa: PLC0415

    engines.mock.engine.MockRunner = FaultyRunner
    shared.queue.claim.Publisher = FaultyPublisher
    sys.argv = ["vlm", "worker", "--engine", "mock", "--die-with-parent", *sys.argv[1:]]
    vlm.main()


if __name__ == "__main__":
    main()
