"""A rank beside rank 0: loads its part of a model, and computes its part of every step until rank 0 hangs up.

Run as `python -m engines.torch_backend.loading.rank NUMBER`, the number being that of its socket. It answers nothing:
what a step comes to, rank 0 knows.
"""

import logging
import os
import select
import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

from engines.base import EngineStartError
from engines.child_process import READY, receive_message, send_message
from engines.torch_backend.loading.load import load_runner, prepare_kernels
from engines.torch_backend.parallel.leader import follow
from engines.torch_backend.parallel.process_mesh import ProcessMesh
from engines.torch_backend.parallel.ranks import EXIT_BROKEN, RankStart
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings

logger = logging.getLogger(__name__)


def run(sock: socket.socket) -> int:
    """Serve rank 0; returns the exit code."""
    sock.sendall(READY)
    start = msgspec.json.decode(receive_message(sock), type=RankStart)
    threading.Thread(target=_end_with, args=(sock,), daemon=True).start()
    logging.basicConfig(format=f"rank {start.rank}: %(levelname)s %(message)s", level="WARNING")
    try:
        runner = _load(start)
    except EngineStartError as error:
        send_message(sock, str(error).encode())
        return os.EX_CONFIG
    follow(lambda: receive_message(sock), runner)
    return 0


def _load(start: RankStart) -> TorchRunner:
    """Raises: EngineStartError."""
    settings = TorchSettings.model_validate(start.settings)
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = ProcessMesh(start.rank, start.size, device, Path(start.meeting_place))
    kernels = prepare_kernels(settings, device)
    dtype = getattr(torch, start.dtype)
    return load_runner(settings, Path(start.directory), device, dtype, kernels, mesh)


def _end_with(sock: socket.socket) -> None:
    """End when rank 0 does, wherever the other thread waits."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is told unasked
    poll.poll()
    os._exit(0)


def main() -> None:
    """The process."""
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            code = run(sock)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = 0
        except Exception:
            logger.exception("a rank broke")
            code = EXIT_BROKEN
    os._exit(code)


if __name__ == "__main__":
    main()
