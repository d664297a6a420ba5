"""The process of one system: questions as JSON lines on stdin, seconds as JSON lines on stdout.

Started by `fleet`. Libraries may print what they like: their stdout is our stderr.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import engines.torch_backend  # noqa: F401 - must come before transformers


def create_peer(system: str, options: dict[str, Any]) -> object:
    """Load a system, which has a method for each `Task`. Raises: what it raises."""
    maker, _, precision = system.partition(":")
    checkpoint, num_threads = Path(options["checkpoint"]), options["num_threads"]
    device = options["device"]
    if maker == "transformers":
        from benchmarks.peers.hugging_face import HuggingFace  # noqa: PLC0415

        return HuggingFace(checkpoint, precision, num_threads, device)
    max_batch_size = options["max_batch_size"]
    if maker == "llama.cpp":
        from benchmarks.peers.llama_cpp_peer import LlamaCpp  # noqa: PLC0415 - not installed with us

        files = Path(options["files"])
        num_context = options["num_context"]
        return LlamaCpp(checkpoint, precision, num_threads, max_batch_size, files, num_context)
    from benchmarks.peers.ours import Ours  # noqa: PLC0415

    return Ours(checkpoint, precision, num_threads, max_batch_size, device)


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = create_peer(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        task, arguments = json.loads(line)
        print(json.dumps(getattr(peer, task)(**arguments)), file=answers)


if __name__ == "__main__":
    main()
