"""Which C++ kernels this process has: compiled or found, probed, and put together in one value.

Called by the loader. A machine without a compiler, or with a kernel that computes something else than its slow
reference implementation, loses speed and nothing else; one line in the log says which there are. Knows no models.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from engines.torch_backend.ops.cpu.compiler import CannotCompile, compile_library
from engines.torch_backend.ops.cpu.library import FLOAT_KINDS, Kind, Library
from engines.torch_backend.ops.cpu.probe import (
    attention_is_right,
    full_attention_is_right,
    layers_are_right,
    right_kinds,
)
from engines.torch_backend.ops.cpu_level import CpuLevel, choose_level

logger = logging.getLogger(__name__)

#: `fast` rounds activations that meet int8 and int4 weights to 8 bits, `exact` to 16.
Mode = Literal["fast", "exact", "off"]
_BITS = {"fast": 8, "exact": 16}


@dataclass(frozen=True)
class CpuKernels:
    """A library, the forms of weights and of attention for which it was found right."""

    library: Library
    level: CpuLevel
    kinds: frozenset[Kind]
    has_attention: bool
    has_full_attention: bool  #: that of images
    bits: int  #: of activations that meet integer weights
    has_layers: bool  #: all layers of a decoder in one call

    @property
    def float_dtypes(self) -> frozenset[torch.dtype]:
        """Types of weights that are computed with as they are stored."""
        return frozenset(dtype for dtype, kind in FLOAT_KINDS.items() if kind in self.kinds)


def load_kernels(mode: Mode, level: CpuLevel | None = None) -> CpuKernels | None:
    """The kernels of a level, that of this machine if none is given; None without a compiler, or when switched off.

    Raises: AbiMismatch.
    """
    return None if mode == "off" else _load(mode, level or choose_level())


@cache
def _load(mode: Mode, level: CpuLevel) -> CpuKernels | None:
    try:
        library = Library(compile_library(Path(__file__).parent, level))
    except (CannotCompile, OSError) as error:
        logger.warning("no CPU kernels, torch computes instead: %s", error)
        return None
    bits = _BITS[mode]
    kernels = CpuKernels(
        library,
        level,
        right_kinds(library, bits),
        attention_is_right(library),
        full_attention_is_right(library),
        bits,
        layers_are_right(library, bits),
    )
    is_right = {kind.name.lower(): kind in kernels.kinds for kind in Kind}
    is_right["attention"] = kernels.has_attention
    is_right["layers"] = kernels.has_layers
    is_right["full attention"] = kernels.has_full_attention
    right = ", ".join(name for name in is_right if is_right[name])
    logger.info("CPU kernels (%s, %s): %s", mode, library.level, right)
    wrong = [name for name in is_right if not is_right[name]]
    if wrong:
        logger.warning("CPU kernels that compute wrong are left out: %s", ", ".join(wrong))
    return kernels
