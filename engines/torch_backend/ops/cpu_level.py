"""The CPU's instruction set as a level, detected once and passed to the operators.

The level determines the compiler flags of the C++ kernels, and the number of tokens up to which they are faster than
torch's kernels. Levels below the machine's can be selected, so that one machine can test several levels.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
_ARM = ("aarch64", "arm64")
_X86 = ("x86_64", "AMD64")
_ALWAYS = 1 << 30  # tokens


@dataclass(frozen=True)
class CpuLevel:
    """An instruction set, and thresholds measured with it."""

    name: str
    machines: tuple[str, ...] = ()  #: values of `platform.machine()`; empty: any
    needs: frozenset[str] = frozenset()  #: required flags of /proc/cpuinfo
    #: Compiler flags, one per instruction set, because older compilers lack flags for whole levels. None: no C++
    #: kernels.
    compiler_flags: tuple[str, ...] | None = None
    #: Up to this number of tokens, C++ kernels are faster than torch's products with float weights.
    max_float_tokens: int = _ALWAYS
    #: The same for bfloat16 weights in a bfloat16 engine; the kernels then round activations too. 0: not supported.
    max_rounded_tokens: int = 0
    #: The same for integer weights in a bfloat16 engine, where torch dequantizes them to bfloat16.
    max_integer_tokens: int = _ALWAYS
    #: From this number of new tokens, torch's fused attention in bfloat16 is faster than the kernels.
    min_fused_tokens: int = _ALWAYS
    bfloat16_flags: frozenset[str] = frozenset()  #: with any of these, torch is fast in bfloat16

    @property
    def has_fast_bfloat16(self) -> bool:
        return not self.bfloat16_flags.isdisjoint(cpu_flags())

    def lacks(self) -> str:
        """The reason why this machine does not support the level; empty if it does."""
        if self.machines and platform.machine() not in self.machines:
            return f"{self.name} is not for {platform.machine()}"
        missing = self.needs - cpu_flags()
        return f"{self.name} needs {', '.join(sorted(missing))}" if missing else ""


_V3_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_V3_NEEDS = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4_PARTS = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

_V4_VNNI = CpuLevel(
    "x86-64-v4-vnni",
    _X86,
    _V3_NEEDS | {*_V4_PARTS, "avx512_vnni"},
    (*_V3_FLAGS, *(f"-m{part}" for part in _V4_PARTS), "-mavx512vnni"),
    max_float_tokens=48,
    bfloat16_flags=frozenset({"avx512_bf16", "amx_bf16"}),
)

#: The largest first.
LEVELS = (
    replace(
        _V4_VNNI,
        name="x86-64-v4-bf16",
        needs=_V4_VNNI.needs | {"avx512_bf16"},
        compiler_flags=(*(_V4_VNNI.compiler_flags or ()), "-mavx512bf16"),
        max_rounded_tokens=_ALWAYS,
    ),
    _V4_VNNI,
    CpuLevel("x86-64-v3-vnni", _X86, _V3_NEEDS | {"avx_vnni"}, (*_V3_FLAGS, "-mavxvnni")),
    CpuLevel("x86-64-v3", _X86, _V3_NEEDS, _V3_FLAGS),
    CpuLevel(
        "armv8.2-a",
        _ARM,
        frozenset({"asimddp", "fphp"}),
        ("-march=armv8.2-a+fp16+dotprod",),
        bfloat16_flags=frozenset({"bf16"}),
    ),
    CpuLevel("armv8-a", _ARM, compiler_flags=("-march=armv8-a",)),
    CpuLevel("generic"),
)


@cache
def choose_level() -> CpuLevel:
    """The largest level that this machine supports and torch can use. ATEN_CPU_CAPABILITY limits torch and the level.

    With matrix units (AMX), torch is faster than the kernels if there are many tokens. On two cores of a Sapphire
    Rapids, 512 tokens and 2048 x 2048 bfloat16 weights took 97 ms in torch and 513 ms in the kernel. On two cores of
    another Xeon, attention of 607 tokens took 10 ms in torch and 17 ms in the kernel (equal times: 128 tokens), and a
    product of 608 tokens with int8 weights of 5632 x 2048 took 12 ms and 28 ms (equal times: 96 tokens).
    """
    capability = torch.backends.cpu.get_cpu_capability()
    allowed: Sequence[CpuLevel] = LEVELS
    if platform.machine() in _X86 and not capability.startswith("AVX512"):
        is_avx2 = capability == "AVX2"
        allowed = [x for x in LEVELS if _V4_PARTS[0] not in x.needs] if is_avx2 else LEVELS[-1:]
    level = next(level for level in allowed if not level.lacks())
    if level.max_rounded_tokens and has_matrix_units():
        most = level.max_float_tokens
        return replace(level, max_rounded_tokens=most, max_integer_tokens=127, min_fused_tokens=128)
    return level


def has_matrix_units() -> bool:
    """Whether torch can use AMX."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "amx_bf16" in cpu_flags() and capability.startswith("AVX512")


@cache
def cpu_flags() -> frozenset[str]:
    return frozenset(read_cpuinfo("flags", "Features").split())


def read_cpuinfo(*names: str) -> str:
    """The first value of one of these fields, such as `model name`, on Linux; empty on other systems."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
