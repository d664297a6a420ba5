"""CUDA graphs of decode steps with one new token per sequence.

A step is padded to one of a few batch sizes and copied into the buffers of that size; one launch replays embedding,
layers, output head and sampling. A copy of the tokens stays on the device, so that the next step can be launched
before the host has them. A graph is captured when its batch size and kind of sampling first occur. Without a GPU,
tests run the same function eagerly over the same buffers, and compare its results with those of steps without graphs.

Shape letters: B rows, V vocabulary.
"""

import logging
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engines.core.runner import ComputedStep, RunningStep, SequenceFailure, StepResult, TokenChoice
from engines.core.sequence import ScheduledSequence
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.sampling import (
    NOT_FINITE,
    SampleParams,
    is_truncated,
    needs_host,
    row_of,
    sample,
    sample_random,
)
from engines.torch_backend.step import StepInputs
from shared.protocol import SamplingParams

if TYPE_CHECKING:
    from engines.torch_backend.models.llama import Llama

logger = logging.getLogger(__name__)


def runs_graphs(device: torch.device) -> bool:
    """True on CUDA. Tests patch this function to run the graph path on the CPU."""
    return device.type == "cuda"


class SamplingKind(Enum):
    GREEDY = auto()  #: all rows are greedy
    RANDOM = auto()  #: some rows are sampled
    TRUNCATED = auto()  #: some rows are sampled with `top_k`, `top_p` or `min_p`


NO_TOKEN = -1  #: token id of a row whose logits are not finite


@dataclass(frozen=True)
class DecodeStep:
    """A launched decode step. The next step can read its tokens on the device before the host has them."""

    request_ids: list[str]
    token_ids: Tensor  #: on the host, valid after `arrival`. Shape: (B,), padding rows included
    arrival: torch.cuda.Event | None
    can_be_followed = True

    def wait(self) -> StepResult:
        """Wait for the tokens. Raises: SequenceFailure for logits that are not finite."""
        if self.arrival is not None:
            self.arrival.synchronize()
        token_ids = self.token_ids[: len(self.request_ids)].tolist()
        for request_id, token_id in zip(self.request_ids, token_ids, strict=True):
            if token_id == NO_TOKEN:
                raise SequenceFailure(request_id, NOT_FINITE)
        return StepResult([TokenChoice(token_id) for token_id in token_ids])


class DecodeBuffers:
    """Static input tensors of the graphs of one batch size: one new token for each of up to B sequences.

    A step is written to host memory and sent to the device in three copies. Padding rows have no context and write to
    a slot that no sequence reads. The host memory is double-buffered, because the device can still read one step
    while the next is written.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, pool: KVCachePool, rotary: RotaryTable
    ) -> None:
        """The last block of the pool is for padding rows; `rotary` has an entry for each possible position."""
        self._block_size = pool.block_size
        self._vocab_size = vocab_size
        device, num_position_rows = rotary.cos.device, rotary.num_rows
        table_width = -(-len(rotary.cos) // pool.block_size)
        padding_slot = (pool.num_blocks - 1) * pool.block_size
        # values of a padding row, in the order of the views below
        self._padding = np.array(
            [[0, padding_slot, -1, 0, 0, 0, vocab_size, -1] + [0] * num_position_rows]
        ).T
        self._padding_floats = np.array([[1.0, 1.0, 0.0]]).T
        is_pinned = device.type == "cuda"
        self._hosts = [
            (
                torch.zeros(len(self._padding), num_rows, dtype=torch.int64, pin_memory=is_pinned),
                torch.zeros(3, num_rows, dtype=torch.float32, pin_memory=is_pinned),
                torch.zeros(num_rows, table_width, dtype=torch.int32, pin_memory=is_pinned),
                torch.zeros(num_rows, dtype=torch.int64, pin_memory=is_pinned),  # sampled tokens
            )
            for _ in range(2)
        ]
        self._device = tuple(tensor.to(device, copy=True) for tensor in self._hosts[0][:3])
        integers, floats, tables = self._device
        token_ids, slots, indices, lengths = integers[:4]
        self.is_random, keys, top_ks = integers[4:7]  # is_random: (B,) 0 for greedy rows
        #: (B,) row of the previous step that samples this row's input token; -1: the token is known
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
        temperatures, top_ps, min_ps = floats
        self.sample_params = SampleParams(keys, top_ks, temperatures, top_ps, min_ps)

    def fill(self, items: list[ScheduledSequence]) -> None:
        """Write a step and send it to the device. The second to last step must be complete: its memory is reused."""
        self._hosts.reverse()
        *host_inputs, _ = self._hosts[0]
        integers, floats, tables = (tensor.numpy() for tensor in host_inputs)
        integers[:], floats[:] = self._padding, self._padding_floats
        for row, item in enumerate(items):
            sequence, sampling = item.sequence, item.sequence.sampling
            index = item.start
            block, offset = divmod(index, self._block_size)
            key, top_k, *row_floats = row_of(sampling, item.output_position, self._vocab_size)
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
            floats[:, row] = row_floats
            tables[row, : block + 1] = sequence.block_ids[: block + 1]
        for host, device in zip(host_inputs, self._device, strict=True):
            device.copy_(host, non_blocking=True)

    def fetch(self, token_ids: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying the sampled tokens to the host. Returns the host tensor and, on CUDA, the copy's event."""
        host = self._hosts[0][-1]
        host.copy_(token_ids, non_blocking=True)
        if not token_ids.is_cuda:
            return host, None
        arrival = torch.cuda.Event()
        arrival.record()
        return host, arrival


#: A captured step, its logits and its tokens.
Captured = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]


class DecodeGraphs:
    """CUDA graphs of decode steps, by batch size and kind of sampling."""

    def __init__(
        self,
        decoder: "Llama",
        ops: Ops,
        pool: KVCachePool,
        rotary: RotaryTable,
        max_num_seqs: int,
    ) -> None:
        """Padding rows write to the last block of the pool, which belongs to no sequence."""
        self._decoder = decoder
        self._create_attention = ops["paged_attention"]
        self._pool = pool
        self._rotary = rotary
        self._device = rotary.cos.device
        self._sizes = batch_sizes(max_num_seqs)
        # last sampled token of each row; 0, a valid id, if there is none
        self._sampled = torch.zeros(self._sizes[-1], dtype=torch.int64, device=self._device)
        self._buffers: dict[int, DecodeBuffers] = {}
        #: by batch size and kind of sampling
        self.captured: dict[tuple[int, SamplingKind], Captured] = {}
        self._memory: Any = None  # torch's memory pool, shared by all graphs

    def can_run(self, items: list[ScheduledSequence]) -> bool:
        """Whether a graph can run the step: one new text token per sequence, and no prompt logprobs."""
        return len(items) <= self._sizes[-1] and all(
            item.num_new_tokens == 1 and item.samples and not item.images and not item.scored
            for item in items
        )

    def launch(self, items: list[ScheduledSequence]) -> RunningStep:
        """Start a step. Waits for the logits only if sampling needs them on the host. Raises: SequenceFailure."""
        params = [item.sequence.sampling for item in items]
        if any(needs_host(item.sequence) for item in items):
            logits, _, _ = self._compute(items, SamplingKind.GREEDY)
            choices = sample(logits[: len(items)], [item.sequence for item in items])
            return ComputedStep(StepResult(list(choices)))
        _, token_ids, buffers = self._compute(items, _sampling_kind(params))
        request_ids = [item.sequence.request_id for item in items]
        return DecodeStep(request_ids, *buffers.fetch(token_ids))

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Capture the common graphs: the largest first, because others reuse its memory. Returns False on failure."""
        try:
            for size in reversed(self._sizes):
                for kind in (SamplingKind.GREEDY, SamplingKind.RANDOM):
                    self._compute([], kind, size)
            for size in (self._sizes[-1], self._sizes[0]):  # their sorts use different kernels
                self._compute([], SamplingKind.TRUNCATED, size)
        except Exception as error:  # compilers and drivers raise any type
            logger.warning("steps are not captured in CUDA graphs: %s", str(error)[:500])
            return False
        return True

    def _compute(
        self, items: list[ScheduledSequence], kind: SamplingKind, size: int | None = None
    ) -> tuple[Tensor, Tensor, DecodeBuffers]:
        """Run one step. Returns logits (B, V), tokens (B,) and buffers. Only greedy graphs keep the logits."""
        size = size or next(size for size in self._sizes if size >= len(items))
        if size not in self._buffers:
            vocab_size = self._decoder.text.vocab_size
            self._buffers[size] = DecodeBuffers(size, vocab_size, self._pool, self._rotary)
        buffers = self._buffers[size]
        buffers.fill(items)
        if self._device.type != "cuda":
            return *self.step(buffers, kind), buffers
        captured = self.captured.get((size, kind)) or self._capture(size, kind)
        graph, logits, token_ids = captured
        graph.replay()
        return logits, token_ids, buffers

    def step(self, buffers: DecodeBuffers, kind: SamplingKind) -> tuple[Tensor, Tensor]:
        """The function that is captured: decoder and sampling. It reads and writes device memory only."""
        decoder, inputs = self._decoder, buffers.inputs
        rotation = self._rotary.at_all(inputs.positions)
        attend = self._create_attention(decoder.text.num_heads, self._pool, inputs, rotation)
        rows = buffers.in_flight_rows
        sampled_before = self._sampled.index_select(0, rows.clamp(min=0))
        x = decoder.embed(torch.where(rows < 0, inputs.token_ids, sampled_before))
        hidden = decoder(x, attend)
        logits = decoder.logits(hidden)
        scores = logits.float()
        best, token_ids = scores.max(dim=-1)
        if kind is not SamplingKind.GREEDY:
            params, truncated = buffers.sample_params, kind is SamplingKind.TRUNCATED
            sampled = sample_random(scores, params, truncated=truncated, is_exact=True)
            token_ids = torch.where(buffers.is_random > 0, sampled, token_ids)
        token_ids = token_ids.masked_fill(~best.isfinite(), NO_TOKEN)
        self._sampled[: len(token_ids)].copy_(token_ids.clamp(min=0))
        return logits, token_ids

    def _capture(self, size: int, kind: SamplingKind) -> Captured:
        buffers = self._buffers[size]
        sampled_before = self._sampled.clone()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # this run compiles kernels and lets libraries allocate
            self.step(buffers, kind)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._sampled.copy_(sampled_before)  # the replay of this step reads them again
        graph = torch.cuda.CUDAGraph()
        # another thread can allocate memory during the capture, to load an adapter
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, token_ids = self.step(buffers, kind)
        self._memory = graph.pool()
        if kind is not SamplingKind.GREEDY:
            logits = logits.new_empty(0)  # not needed; frees their memory for the next graph
        self.captured[size, kind] = graph, logits, token_ids
        return graph, logits, token_ids


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to which steps are padded: at most 7 padding rows, and fewer than half of the rows."""
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*small, *range(8, max_num_seqs, 8), max_num_seqs)


def _sampling_kind(params: list[SamplingParams]) -> SamplingKind:
    sampled = [p for p in params if p.temperature > 0]
    if any(map(is_truncated, sampled)):
        return SamplingKind.TRUNCATED
    return SamplingKind.RANDOM if sampled else SamplingKind.GREEDY
