"""Rank 0 tells the others what to compute, and each of them computes it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.core.runner import SequenceFailure
from engines.core.sequence import ScheduledSequence
from engines.torch_backend.models.registry import ImageSlots
from engines.torch_backend.parallel.mesh import Mesh
from engines.torch_backend.parallel.step_message import (
    StepReader,
    StepWriter,
    pack,
    read_adapter,
    unpack,
)

_STEP, _PLAIN, _ADAPTER = 0, 1, 2


@dataclass(slots=True)
class Leader:
    """Rank 0's side; `send` brings a message to all others, `end` ends them."""

    mesh: Mesh
    send: Callable[[bytes], None]
    end: Callable[[], None] = lambda: None
    _writer: StepWriter = field(default_factory=StepWriter)

    def send_step(
        self,
        items: list[ScheduledSequence],
        inputs: Tensor,
        rows: list[int],
        images: list[ImageSlots],
        image_form: bytes,
    ) -> None:
        """Have all ranks compute their shares of a step. Shapes: inputs (1 + R, N). Raises: RankLost."""
        for adapter in self._writer.introduce(items):
            self.send(pack([[_ADAPTER], *adapter]))
        sections = self._writer.write(items, inputs, rows, images, image_form)
        self.send(pack([[_STEP], *sections]))
        if images:
            self.mesh.broadcast(torch.cat([image.features for image in images]))

    def send_plain(self, token_ids: Tensor) -> None:
        """Have all ranks compute their shares of a forward pass without pages. Raises: RankLost."""
        self.send(pack([[_PLAIN], token_ids.cpu().numpy()]))

    def release(self, request_id: str) -> None:
        """Let ranks forget a request. Idempotent."""
        self._writer.release(request_id)

    def close(self) -> None:
        self.end()


def follow(receive: Callable[[], bytes | bytearray], runner: Any) -> None:
    """Another rank's side: compute with its `TorchRunner` what is received. Returns never."""
    reader = StepReader()
    while True:
        [kind], *sections = unpack(receive())
        if kind == _PLAIN:
            runner.plain_logits(torch.from_numpy(sections[0].copy()))
            continue
        if kind == _ADAPTER:
            number, stored = read_adapter(sections)
            reader.adapters[number] = runner.take_adapter(stored)
            continue
        step, ended = reader.read(sections)
        for request_id in ended:
            runner.release(request_id)
        with suppress(SequenceFailure):  # rank 0 finds the same, and tells
            runner.follow(step)
