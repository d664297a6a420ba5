"""Runs one system in a process, which reads tasks as JSON lines from stdin and writes results to stdout.

Started by `fleet`, also in environments that lack our packages. Output of libraries to stdout is redirected to
stderr.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def create_peer(system: str, checkpoint: str, **options: Any) -> object:
    """Load a system, which has a method for each task. Raises: the errors of the system."""
    maker, _, precision = system.partition(":")
    if maker in ("sentence-transformers", "infinity"):
        from benchmarks.peers.embedders import Embedder  # noqa: PLC0415

        return Embedder(maker, checkpoint, precision)
    import engines.torch_backend  # noqa: F401, PLC0415 - must come before transformers

    if maker == "transformers":
        from benchmarks.peers.hugging_face import HuggingFace  # noqa: PLC0415

        return HuggingFace(Path(checkpoint), precision, options["num_threads"])
    if maker == "llama.cpp":
        from benchmarks.peers.llama_cpp_peer import LlamaCpp  # noqa: PLC0415

        return LlamaCpp(Path(checkpoint), precision, **options)
    from benchmarks.peers.ours import Ours  # noqa: PLC0415

    return Ours(Path(checkpoint), precision, options["num_threads"], options["max_batch_size"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = create_peer(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        task, arguments = json.loads(line)
        print(json.dumps(getattr(peer, task)(**arguments)), file=answers)


if __name__ == "__main__":
    main()
