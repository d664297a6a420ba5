"""How a GPU computes steps: kernels that are right there, graphs for decoding, varlen attention for prompts.

Owned by the runner where the device is a GPU. What of it serves is decided at the start: each part is tried, may be
switched off by name, and has a slower way in its place.
"""

import logging
from importlib import import_module

import torch
from torch import Tensor

from engines.core.runner import RunningStep
from engines.core.sequence import ScheduledSequence
from engines.torch_backend.graphs.cuda_decoder import CudaDecoder
from engines.torch_backend.graphs.cuda_graph import DecodeGraphs
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan
from engines.torch_backend.layers.cuda_attention import StepAttention
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.layers.varlen import find_varlen
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.ops.decoder_ops import DecoderOps
from engines.torch_backend.settings import TorchSettings

logger = logging.getLogger(__name__)

GRAPH, VARLEN = "cuda_graph", "varlen"


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
        """The last block of the pool must be nobody's: what is padded is kept there."""
        device = rotary.cos.device
        disabled = set(config.disabled_gpu_kernels)
        self._pool = pool
        self._rotary = rotary
        ops = load_kernels(text, config, dtype, device)
        self._decoder = CudaDecoder(decoder, text, ops)
        self._varlen = None if VARLEN in disabled else find_varlen(text, dtype, device)
        self._graphs: DecodeGraphs | None = None
        # the reference implementation of the attention kernel copies every context, at its longest: a graph of it would not pay
        has_attention = ops.attend_decodes is not DecoderOps().attend_decodes
        if GRAPH not in disabled and (has_attention or device.type == "cpu"):
            self._graphs = DecodeGraphs(
                self._decoder,
                pool,
                rotary,
                config.max_num_seqs,
                text.vocab_size,
            )

    def warm_up(self) -> None:
        """Capture graphs; without them, if that fails."""
        if self._graphs is not None and not self._graphs.warm_up():
            self._graphs = None

    def decode(self, items: list[ScheduledSequence]) -> RunningStep | None:
        """The next tokens on their way, if a graph can compute the step; else None. Raises: SequenceFailure."""
        if self._graphs is None or not self._graphs.can_run(items):
            return None
        return self._graphs.launch(items)

    def forward(self, embeddings: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states of all new tokens. Shapes: (N, C), (N,); returns (N, C)."""
        attend = StepAttention(self._decoder.ops, self._varlen, self._pool, plan)
        return self._decoder(embeddings, self._rotary, positions, plan.slots, self._pool, attend)


def load_kernels(
    text: TextConfig, config: TorchSettings, dtype: torch.dtype, device: torch.device
) -> DecoderOps:
    """Triton's kernels where they are there and right; their reference implementations in torch elsewhere."""
    if device.type != "cuda":
        return DecoderOps()
    try:
        module = import_module("engines.torch_backend.ops.triton.load_ops")
    except ImportError as error:
        logger.warning("no GPU kernels: %s", error)
        return DecoderOps()
    trial = module.Trial(text, config.block_size, config.kv_dtype, dtype, device)
    return module.load_ops(trial, config.disabled_gpu_kernels)
