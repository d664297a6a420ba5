"""The level is the largest that the processor has and torch may use; nothing else chooses a path."""

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
    ("machine", "cpuinfo", "capability", "name", "is_bfloat16_fast"),
    [
        ("x86_64", f"flags : {V4} avx512_vnni", "AVX512", "x86-64-v4-vnni", False),
        ("x86_64", f"flags : {V4} avx512_vnni avx512_bf16", "AVX512", "x86-64-v4-bf16", True),
        ("x86_64", f"flags : {V4} avx512_vnni avx512_bf16", "AVX2", "x86-64-v3", False),
        ("x86_64", f"flags : {V4} avx512_vnni amx_bf16", "AVX512", "x86-64-v4-vnni", True),
        ("aarch64", "Features : fp asimd asimddp fphp bf16", "DEFAULT", "armv8.2-a", True),
        ("x86_64", f"flags : {V4} avx512_vnni", "AVX2", "x86-64-v3", False),
        ("x86_64", f"flags : {V4} avx512_vnni avx_vnni", "AVX2", "x86-64-v3-vnni", False),
        ("x86_64", f"flags : {V4} avx512_vnni", "DEFAULT", "generic", False),
        ("x86_64", f"flags : {V4}", "AVX512", "x86-64-v3", False),
        ("x86_64", f"flags : {V3} avx_vnni", "AVX2", "x86-64-v3-vnni", False),
        ("x86_64", f"flags : {V3}", "AVX2", "x86-64-v3", False),
        ("x86_64", "flags : sse4_2 avx", "DEFAULT", "generic", False),
        ("x86_64", f"model name : {V3}", "AVX2", "generic", False),
        ("aarch64", "Features : fp asimd asimddp fphp", "DEFAULT", "armv8.2-a", False),
        ("aarch64", "Features : fp asimd", "DEFAULT", "armv8-a", False),
        ("arm64", "", "DEFAULT", "armv8-a", False),
        ("riscv64", "", "DEFAULT", "generic", False),
    ],
)
def test_the_largest_level_that_processor_and_torch_allow_is_chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    cpuinfo: str,
    capability: str,
    name: str,
    is_bfloat16_fast: bool,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{cpuinfo}\n")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    level = choose_level()

    assert (level.name, level.has_fast_bfloat16) == (name, is_bfloat16_fast)


@pytest.mark.parametrize(("unit", "max_rounded_tokens"), [("", 1 << 30), (" amx_bf16", 48)])
def test_many_tokens_are_left_to_matrix_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, max_rounded_tokens: int
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {V4} avx512_vnni avx512_bf16{unit}\n")
    monkeypatch.setattr(module, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")

    assert choose_level().max_rounded_tokens == max_rounded_tokens
