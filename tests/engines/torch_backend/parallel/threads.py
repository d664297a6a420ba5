"""Members of a mesh that are threads of one process, and engines whose ranks they are."""

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, Lock
from typing import Any

import torch
from torch import Tensor

from engines.core.engine import BatchingEngine
from engines.text.processor import ChatProcessor, create_processor
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.generic.family import GenericFamily
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.parallel.leader import Leader, follow
from engines.torch_backend.parallel.mesh import Mesh
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings

CPU = torch.device("cpu")


@dataclass
class Table:
    """Where members that are threads lay down what they have for each other."""

    size: int
    parts: list[Tensor] = field(init=False)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [torch.empty(0)] * self.size
        self.barrier = Barrier(self.size, timeout=60)


@dataclass(frozen=True)
class ThreadMesh:
    """A member that is a thread."""

    rank: int
    table: Table

    @property
    def size(self) -> int:
        return self.table.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(dim=0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0]

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.table.parts[self.rank] = x
        self.table.barrier.wait()
        parts = list(self.table.parts)
        self.table.barrier.wait()
        return parts


def on_members(size: int, compute: Callable[[Mesh], Any], table: Table | None = None) -> list[Any]:
    """What each member computes."""
    table = table or Table(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(compute, [ThreadMesh(rank, table) for rank in range(size)]))


def make_processor(directory: Path) -> ChatProcessor:
    family, config = find_family(directory)
    return create_processor(
        directory, family.processor(directory, config), config.text.max_position_embeddings
    )


_loading = Lock()


class _OneByOne(GenericModel):
    """Transformers loads one model at a time: it changes what all threads share."""

    def _load(self, *args: Any) -> Any:
        with _loading:
            return super()._load(*args)


class _Family(GenericFamily):
    def build(self, config: Any, mesh: Mesh) -> GenericModel:
        return _OneByOne(config, mesh=mesh)


def load_part(directory: Path, mesh: Mesh, scheme: str | None) -> Any:
    chosen = METHODS[scheme] if scheme else None
    family, config = find_family(directory)
    if isinstance(family, GenericFamily):
        family = _Family()
    return load_model(directory, family, config, CPU, torch.float32, chosen, mesh=mesh)


@dataclass
class SharedModel:
    """A checkpoint's parts, one for each member; `start` makes an engine of them."""

    directory: Path
    size: int
    scheme: str | None = None
    models: list[Any] = field(init=False)
    table: Table = field(init=False)
    processor: ChatProcessor = field(init=False)

    def __post_init__(self) -> None:
        self.processor = make_processor(self.directory)
        self.table = Table(self.size)
        self.models = on_members(
            self.size, lambda mesh: load_part(self.directory, mesh, self.scheme), self.table
        )

    @contextmanager
    def running(self) -> Iterator[Callable[..., BatchingEngine]]:
        """What starts engines, whose other ranks end afterwards."""
        queues: list[SimpleQueue[bytes]] = []
        with ThreadPoolExecutor(16 * self.size) as threads:

            def start(**changes: Any) -> BatchingEngine:
                settings = TorchSettings(**{"num_kv_blocks": 256, "block_size": 4, **changes})
                mine: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(1, self.size)]
                queues.extend(mine)
                for rank, queue in enumerate(mine, 1):
                    threads.submit(self._serve, rank, settings, queue)

                def send(message: bytes) -> None:
                    for queue in mine:
                        queue.put(message)

                leader = Leader(ThreadMesh(0, self.table), send)
                runner = self._make_runner(0, settings, leader)
                return BatchingEngine(runner, self.processor, settings)

            try:
                yield start
            finally:
                for queue in queues:
                    queue.put(b"")

    def _make_runner(
        self, rank: int, settings: TorchSettings, leader: Leader | None = None
    ) -> TorchRunner:
        mesh = ThreadMesh(rank, self.table)
        model = self.models[rank]
        return TorchRunner(model, settings, CPU, torch.float32, 1, mesh=mesh, leader=leader)

    def _serve(self, rank: int, settings: TorchSettings, queue: SimpleQueue[bytes]) -> None:
        def receive() -> bytes:
            if message := queue.get():
                return message
            raise _Ended

        try:
            follow(receive, self._make_runner(rank, settings))
        except _Ended:
            return
        except BaseException:
            traceback.print_exc()
            self.table.barrier.abort()


class _Ended(Exception):
    pass
