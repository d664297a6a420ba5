"""Peers of the embedding engine: environments of their own, pinned, and a process for each system."""

import base64
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

#: What each peer is, by the name of its environment, all with one torch. Infinity's last release knows older transformers.
REQUIREMENTS = {
    "sentence-transformers": ("sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0"),
    "infinity": ("infinity-emb[torch]==0.0.78", "transformers==4.57.6", "torch==2.13.0"),
}  # fmt: skip
_CHILD = Path(__file__).with_name("embedding_peer.py")


def python_of(folder: Path, peer: str) -> Path:
    """The interpreter of a peer's environment; makes it at first use, which takes minutes.

    Raises: subprocess.CalledProcessError, OSError.
    """
    environment = folder / peer
    python, marker = environment / "bin" / "python", environment / "complete"
    if not marker.exists():
        if not python.exists():
            venv.create(environment, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]]
        subprocess.run(command, check=True, stdout=sys.stderr)
        marker.touch()
    return python


class PeerProcess:
    """One system, loaded and ready."""

    def __init__(self, python: Path, peer: str, directory: str, dtype: str) -> None:
        command = [str(python), str(_CHILD), peer, directory, dtype]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        if not self._read().get("ready"):
            raise RuntimeError(f"{peer} did not start")

    def __call__(self, texts: Sequence[str]) -> tuple[float, torch.Tensor]:
        """Seconds of CPU, and the vectors."""
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps(list(texts)) + "\n")
        pipe.flush()
        answer = self._read()
        data = bytearray(base64.b64decode(answer["vectors"]))
        return answer["seconds"], torch.frombuffer(data, dtype=torch.float32).view(len(texts), -1)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args[2:])} ended")  # type: ignore[index]
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
