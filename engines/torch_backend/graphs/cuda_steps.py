"""How a GPU computes steps: kernels that are right there, graphs for decoding, varlen attention for prompts.

Owned by the runner where the device is a GPU. What of it serves is decided at the start: each part is tried, may be
switched off by name, and has a slower way in its place.
"""

import torch
from torch import Tensor

from engines.core.runner import RunningStep
from engines.core.sequence import ScheduledSequence
from engines.torch_backend.graphs.cuda_graph import DecodeGraphs
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.layers.step_attention import StepAttention
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.ops.registry import CUDA_GRAPH, Site, choose
from engines.torch_backend.settings import TorchSettings


def is_served(device: torch.device) -> bool:
    """Whether this is how to compute there. Tests say so of a CPU: what is missing there has its reference implementation."""
    return device.type == "cuda"


class CudaSteps:
    """A decoder on one GPU."""

    def __init__(
        self,
        decoder: Llama,
        text: TextConfig,
        config: TorchSettings,
        pool: KVCachePool,
        rotary: RotaryTable,
        dtype: torch.dtype,
    ) -> None:
        """The last block of the pool must be nobody's: what is padded is kept there. `decoder` is to be bound to `ops`."""
        device = rotary.cos.device
        disabled = config.switched_off
        site = Site(device, dtype, text, config.block_size, config.kv_dtype, joins=True)
        self.ops = choose(site, disabled)
        self._pool = pool
        self._rotary = rotary
        self._decoder = decoder
        self.graphs: DecodeGraphs | None = None
        # the reference of the attention kernel copies every context, at its longest: a graph of it would not pay
        has_attention = self.ops.uses("decode_attention")
        if CUDA_GRAPH not in disabled and (has_attention or device.type == "cpu"):
            self.graphs = DecodeGraphs(
                decoder, self.ops, pool, rotary, config.max_num_seqs, text.vocab_size
            )

    def warm_up(self) -> None:
        """Capture graphs; without them, if that fails."""
        if self.graphs is not None and not self.graphs.warm_up():
            self.graphs = None

    def decode(self, items: list[ScheduledSequence]) -> RunningStep | None:
        """The next tokens on their way, if a graph can compute the step; else None. Raises: SequenceFailure."""
        if self.graphs is None or not self.graphs.can_run(items):
            return None
        return self.graphs.launch(items)

    def forward(self, embeddings: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states of all new tokens. Shapes: (N, C), (N,); returns (N, C)."""
        attend = StepAttention(self.ops, self._pool, plan, self._rotary, positions)
        return self._decoder(embeddings, attend)
