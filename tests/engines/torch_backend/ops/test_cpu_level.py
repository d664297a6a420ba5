"""The CPU level is the highest one that the processor supports and torch is allowed to use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.torch_backend.ops import cpu_level as module
from engines.torch_backend.ops.cpu_level import choose_level

V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    probes = module.choose_level, module.cpu_flags
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "capability", "name", "is_bfloat16_fast", "max_rounded_tokens"),
    [
        ("x86_64", f"flags : {V4} avx512_vnni", "AVX512", "x86-64-v4-vnni", False, 0),
        ("x86_64", f"flags : {V4} avx512_vnni avx512_bf16", "AVX512", "x86-64-v4-bf16", True, 1 << 30),
        # large batches are computed by the matrix units
        ("x86_64", f"flags : {V4} avx512_vnni avx512_bf16 amx_bf16", "AVX512", "x86-64-v4-bf16", True, 48),
        ("x86_64", f"flags : {V4} avx512_vnni avx512_bf16", "AVX2", "x86-64-v3", False, 0),
        ("x86_64", f"flags : {V4} avx512_vnni amx_bf16", "AVX512", "x86-64-v4-vnni", True, 0),
        ("x86_64", f"flags : {V4} avx512_vnni avx_vnni", "AVX2", "x86-64-v3-vnni", False, 0),
        ("x86_64", f"flags : {V4} avx512_vnni", "DEFAULT", "generic", False, 0),
        ("x86_64", f"flags : {V4}", "AVX512", "x86-64-v3", False, 0),
        ("x86_64", f"model name : {V3}", "AVX2", "generic", False, 0),
        ("aarch64", "Features : fp asimd asimddp fphp bf16", "DEFAULT", "armv8.2-a", True, 0),
        ("aarch64", "Features : fp asimd asimddp fphp", "DEFAULT", "armv8.2-a", False, 0),
        ("arm64", "", "DEFAULT", "armv8-a", False, 0),
        ("riscv64", "", "DEFAULT", "generic", False, 0),
    ],
)  # fmt: skip
def test_the_highest_level_of_processor_and_torch_is_chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    cpuinfo: str,
    capability: str,
    name: str,
    is_bfloat16_fast: bool,
    max_rounded_tokens: int,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{cpuinfo}\n")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    level = choose_level()

    assert (level.name, level.has_fast_bfloat16) == (name, is_bfloat16_fast)
    assert level.max_rounded_tokens == max_rounded_tokens
    limits = (127, 128) if max_rounded_tokens == 48 else (1 << 30, 1 << 30)
    assert (level.max_integer_tokens, level.min_fused_tokens) == limits
