"""Which kernels serve on this device: those that are there, right, and not switched off.

Called by the runner. Each is compared with its reference implementation on shapes of the model; what fails, in whatever way, leaves
the reference implementation in its place and a line in the log.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.kv_int8 import Int8KVCachePool
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops import decoder_ops
from engines.torch_backend.ops.decoder_ops import DecoderOps
from engines.torch_backend.ops.triton import (
    decode_attention,
    gate,
    multiply,
    rms_norm,
    rotate_keep,
)

logger = logging.getLogger(__name__)

KERNELS = DecoderOps(
    add_norm=rms_norm.add_norm,
    rotate_keep=rotate_keep.rotate_keep,
    gate=gate.gate,
    attend_decodes=decode_attention.attend_decodes,
    multiply_int8=multiply.multiply_int8,
    multiply_int4=multiply.multiply_int4,
)
NAMES = tuple(field.name for field in fields(DecoderOps))


@dataclass(frozen=True, slots=True)
class Trial:
    """What kernels are tried on: the shapes and precision in which they will serve."""

    text: TextConfig
    block_size: int
    kv_dtype: str
    dtype: torch.dtype
    device: torch.device

    def compute(self, name: str, ops: DecoderOps) -> list[Tensor]:
        """What one of the functions gives for fixed inputs."""
        return _TRIALS[name](self, ops)

    @property
    def tolerance(self) -> float:
        """Difference allowed, as a share of the largest number; an 8-bit step more or less is no error."""
        rounding = 16 * torch.finfo(self.dtype).eps
        return max(rounding, 2 / 127) if self.kv_dtype == "int8" else rounding

    def numbers(self, *shape: int, seed: int = 1) -> Tensor:
        """Within -1..1, without touching the random state."""
        count = torch.Size(shape).numel()
        values = torch.sin(torch.arange(count, dtype=torch.float64) * (0.7 + seed))
        return values.view(shape).to(self.device, self.dtype)

    def pool(self) -> KVCachePool:
        """A written layer of 8 blocks."""
        text = replace(self.text, num_layers=1)
        create_pool = Int8KVCachePool if self.kv_dtype == "int8" else KVCachePool
        pool = create_pool(text, 8, self.block_size, self.dtype, self.device)
        num_slots = 8 * self.block_size
        heads = (num_slots, text.num_kv_heads, text.head_dim)
        slots = torch.arange(num_slots, device=self.device)
        pool.write(0, slots, self.numbers(*heads), self.numbers(*heads, seed=2))
        return pool


def load_ops(trial: Trial, disabled: Iterable[str]) -> DecoderOps:
    """Kernels where they are right, their reference implementations elsewhere."""
    ops = DecoderOps()
    for name in sorted(set(NAMES) - set(disabled)):
        complaint = find_complaint(name, trial)
        if complaint is None:
            ops = replace(ops, **{name: getattr(KERNELS, name)})
        else:
            logger.warning("kernel %s is not used: %s", name, complaint)
    return ops


def find_complaint(name: str, trial: Trial) -> str | None:
    """What is wrong with a kernel on this device; None: nothing."""
    expected = trial.compute(name, decoder_ops.DecoderOps())
    try:
        found = trial.compute(name, KERNELS)
    except Exception as error:  # compilers and drivers raise whatever they like
        return f"{type(error).__name__}: {error}"[:500]
    for a, b in zip(found, expected, strict=True):
        difference = (a.float() - b.float()).abs().max().item()
        if not difference <= trial.tolerance * b.float().abs().max().item():
            return f"it is off by {difference:.3g}"
    return None


def _try_add_norm(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    width = trial.text.hidden_size
    x, delta, gain = (trial.numbers(rows, width, seed=rows) for rows in (3, 3, 1))
    _, first = ops.add_norm(x, None, gain[0], 1e-5)
    return [first, *ops.add_norm(x, delta, gain[0], 1e-5)]


def _try_gate(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    return [ops.gate(3 * trial.numbers(3, 2 * trial.text.intermediate_size))]


def _try_rotate_keep(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    text, pool = trial.text, trial.pool()
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    slots = torch.tensor([5, trial.block_size, 2], device=trial.device)
    positions = torch.tensor([0, 3, 1], device=trial.device)
    rotary = RotaryTable(text, 4, trial.dtype, trial.device)
    turned = ops.rotate_keep(trial.numbers(3, width), rotary, positions, slots, pool, 0)
    return [*turned, *pool.read(0, torch.arange(2, device=trial.device))]


def _try_attend_decodes(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    text, size = trial.text, trial.block_size
    query = 4 * trial.numbers(4, text.num_heads, text.head_dim)
    tables = torch.tensor([[3, 1, 0], [7, 6, 5], [2, 0, 0], [0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([size + 1, 3 * size, 1, 0])
    return [
        ops.attend_decodes(
            trial.pool(), 0, query, tables.to(trial.device), lengths.to(trial.device)
        )
    ]


def _try_multiply_int8(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    integers = (trial.numbers(48, 320).float() * 127).to(torch.int8)
    scale = trial.numbers(1, 48, seed=3)[0]
    return [ops.multiply_int8(trial.numbers(rows, 320), integers, scale) for rows in (1, 64)]


def _try_multiply_int4(trial: Trial, ops: DecoderOps) -> list[Tensor]:
    pairs = (trial.numbers(48, 160).float().abs() * 255).to(torch.uint8)
    scale_zero = trial.numbers(5, 48, 2, seed=3)
    return [ops.multiply_int4(trial.numbers(rows, 320), pairs, scale_zero) for rows in (1, 64)]


_TRIALS: dict[str, Callable[[Trial, DecoderOps], list[Tensor]]] = {
    "add_norm": _try_add_norm,
    "gate": _try_gate,
    "rotate_keep": _try_rotate_keep,
    "attend_decodes": _try_attend_decodes,
    "multiply_int8": _try_multiply_int8,
    "multiply_int4": _try_multiply_int4,
}
