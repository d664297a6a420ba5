"""Fixed memory of decode steps with one new token for each of up to B sequences.

Owned by `cuda_graph`, whose graphs read these tensors. A step is written to host memory and sent to the device in
three copies. Padding rows have no context and write to a slot that no sequence reads. The host memory is double-
buffered, because the device may still read one step while the next is written.

Shape letters: B rows, W blocks of the longest context.
"""

import numpy as np
import torch
from torch import Tensor

from engines.core.sequence import ScheduledSequence
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.sampling.choose import SampleParams, row_of
from engines.torch_backend.step import StepInputs


class DecodeBuffers:
    def __init__(
        self, num_rows: int, vocab_size: int, pool: KVCachePool, rotary: RotaryTable
    ) -> None:
        """The last block of the pool is for padding rows; `rotary` has an entry for each possible position."""
        self._block_size = pool.block_size
        self._vocab_size = vocab_size
        device, num_position_rows = rotary.cos.device, rotary.num_rows
        table_width = -(-len(rotary.cos) // pool.block_size)
        padding_slot = (pool.num_blocks - 1) * pool.block_size
        # a padding row, in the order of the views below
        self._idle = np.array(
            [[0, padding_slot, -1, 0, 0, 0, vocab_size, -1] + [0] * num_position_rows]
        ).T
        self._idle_numbers = np.array([[1.0, 1.0, 0.0]]).T
        is_pinned = device.type == "cuda"
        self._hosts = [
            (
                torch.zeros(len(self._idle), num_rows, dtype=torch.int64, pin_memory=is_pinned),
                torch.zeros(3, num_rows, dtype=torch.float32, pin_memory=is_pinned),
                torch.zeros(num_rows, table_width, dtype=torch.int32, pin_memory=is_pinned),
                torch.zeros(num_rows, dtype=torch.int64, pin_memory=is_pinned),  # sampled tokens
            )
            for _ in range(2)
        ]
        self._device = tuple(tensor.to(device, copy=True) for tensor in self._hosts[0][:3])
        integers, numbers, tables = self._device
        token_ids, slots, indices, lengths = integers[:4]
        self.is_random, keys, top_ks = integers[4:7]  # is_random: (B,) 0 for greedy rows
        #: (B,) the row of the previous step that samples the token; -1: it is known
        self.in_flight_rows = integers[7]
        self.inputs = StepInputs(
            sequences=(),
            num_decodes=num_rows,
            token_ids=token_ids,
            positions=integers[8] if num_position_rows == 1 else integers[8:],
            indices=indices,
            slots=slots,
            block_tables=tables,
            row_offsets=torch.arange(num_rows + 1, device=device),
            lengths=lengths,
        )
        temperatures, top_ps, min_ps = numbers
        self.sample_params = SampleParams(keys, top_ks, temperatures, top_ps, min_ps)

    def fill(self, items: list[ScheduledSequence]) -> None:
        """Write a step and send it to the device. The step before the last one must be complete."""
        self._hosts.reverse()
        *described, _ = self._hosts[0]
        integers, numbers, tables = (tensor.numpy() for tensor in described)
        integers[:], numbers[:] = self._idle, self._idle_numbers
        for row, item in enumerate(items):
            sequence, sampling = item.sequence, item.sequence.sampling
            index = item.start
            block, offset = divmod(index, self._block_size)
            key, top_k, *chosen = row_of(sampling, item.output_position, self._vocab_size)
            integers[:8, row] = (
                sequence.token_ids[index] if item.in_flight_index is None else 0,
                sequence.block_ids[block] * self._block_size + offset,
                index,
                index + 1,
                sampling.temperature > 0,
                key,
                top_k,
                -1 if item.in_flight_index is None else item.in_flight_index,
            )
            integers[8:, row] = [one for [one] in sequence.positions(index, index + 1)]
            numbers[:, row] = chosen
            tables[row, : block + 1] = sequence.block_ids[: block + 1]
        for host, device in zip(described, self._device, strict=True):
            device.copy_(host, non_blocking=True)

    def fetch(self, token_ids: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy the tokens of the last step to the host. Returns: the tensor, and the event of its arrival."""
        host = self._hosts[0][-1]
        host.copy_(token_ids, non_blocking=True)
        if not token_ids.is_cuda:
            return host, None
        arrival = torch.cuda.Event()
        arrival.record()
        return host, arrival
