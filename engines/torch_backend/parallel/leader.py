"""Rank 0 sends each step to the other ranks, and each of them computes its part of it.

Messages are msgpack. Image features go from device to device.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, finalize

import msgspec
import torch
from torch import Tensor

from engines.core.runner import SequenceFailure
from engines.torch_backend.lora.peft import LowRank
from engines.torch_backend.parallel.mesh import Mesh
from engines.torch_backend.step import BidirectionalSpan, SequenceRows, StepInputs


class StepMessage(msgspec.Struct, tag="step", array_like=True):
    """The fields of `StepInputs`, on the host."""

    sequences: list[SequenceRows]
    token_ids: list[int]
    positions: list[list[int]]
    sampled_rows: list[int]
    bidirectional: list[BidirectionalSpan]
    adapters: list[int]  #: of each sequence, by number; 0: none
    image_rows: list[tuple[int, int]]  #: first row and number of slots of the features
    image_width: int
    image_dtype: str
    image_form: bytes  #: of the model's `image_form`
    ended: list[str]  #: requests that have ended before this step
    dropped: list[int]  #: adapters that no request uses any more


class PlainMessage(msgspec.Struct, tag="plain", array_like=True):
    """A forward pass without pages."""

    token_ids: list[int]


class AdapterMessage(msgspec.Struct, tag="adapter", array_like=True):
    """An adapter's matrices by the names of maps: rank, inputs, outputs, and float32 `down` and scaled `up`."""

    number: int
    matrices: dict[str, tuple[int, int, int, bytes, bytes]]

    @classmethod
    def create(cls, number: int, stored: Mapping[str, LowRank]) -> "AdapterMessage":
        matrices = {}
        for name, change in stored.items():
            down, up = change.down.float().contiguous(), change.up.float().mul(change.scale)
            matrices[name] = (*down.shape, len(up), down.numpy().tobytes(), up.numpy().tobytes())
        return cls(number, matrices)

    def changes(self) -> dict[str, LowRank]:
        return {
            name: LowRank(_matrix(down, (rank, width)), _matrix(up, (height, rank)), 1.0)
            for name, (rank, width, height, down, up) in self.matrices.items()
        }


def _matrix(data: bytes, shape: tuple[int, int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)


class Leader:
    """Rank 0's side."""

    def __init__(
        self, mesh: Mesh, send: Callable[[bytes], None], end: Callable[[], None] = lambda: None
    ) -> None:
        """`send` brings a message to all other ranks, and raises RankLost; `end` ends them."""
        self.close = end
        self.mesh = mesh
        self._send = send
        self._ended: list[str] = []
        self._dropped: list[int] = []
        self._num_adapters = 0
        #: numbers of the adapters that the others have
        self._adapters: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def send_step(
        self,
        inputs: StepInputs,
        token_ids: list[int],
        positions: list[list[int]],
        image_form: bytes,
    ) -> None:
        """Have all ranks compute their parts of a step. `positions` are R rows. Raises: RankLost."""
        adapters = [self._introduce(each) if each else 0 for each in inputs.adapters]
        features = [image.features for image in inputs.images]
        first = features[0] if features else torch.empty(0, 0)
        ended, self._ended = self._ended, []
        message = StepMessage(
            list(inputs.sequences),
            token_ids,
            positions,
            inputs.sampled_rows,
            inputs.bidirectional,
            adapters,
            [(image.start, len(image.features)) for image in inputs.images],
            first.shape[1],
            str(first.dtype).removeprefix("torch."),
            image_form,
            ended,
            [self._dropped.pop() for _ in range(len(self._dropped))],
        )
        self._send(msgspec.msgpack.encode(message))
        if features:
            self.mesh.broadcast(torch.cat(features))

    def send_plain(self, token_ids: Tensor) -> None:
        """Have all ranks compute their parts of a forward pass without pages. Raises: RankLost."""
        self._send(msgspec.msgpack.encode(PlainMessage(token_ids.tolist())))

    def release(self, request_id: str) -> None:
        """Let ranks forget a request, with the next step. Idempotent."""
        self._ended.append(request_id)

    def _introduce(self, adapter: Any) -> int:
        """An adapter's number; its matrices are sent once. Raises: RankLost."""
        if adapter not in self._adapters:
            self._num_adapters += 1
            number = self._adapters[adapter] = self._num_adapters
            finalize(adapter, self._dropped.append, number)
            self._send(msgspec.msgpack.encode(AdapterMessage.create(number, adapter.stored)))
            adapter.stored.clear()
        return self._adapters[adapter]


_decoder = msgspec.msgpack.Decoder(StepMessage | PlainMessage | AdapterMessage)


def follow(receive: Callable[[], bytes | bytearray], runner: Any) -> None:
    """Another rank's side: compute with its `TorchRunner` what is received. Returns never."""
    adapters: dict[int, Any] = {}
    while True:
        message = _decoder.decode(receive())
        match message:
            case PlainMessage():
                runner.plain_logits(torch.tensor(message.token_ids))
            case AdapterMessage():
                adapters[message.number] = runner.take_adapter(message.changes())
            case StepMessage():
                for number in message.dropped:
                    adapters.pop(number, None)
                for request_id in message.ended:
                    runner.release(request_id)
                with suppress(SequenceFailure):  # rank 0 finds the same, and tells
                    runner.follow(message, [adapters.get(number) for number in message.adapters])
