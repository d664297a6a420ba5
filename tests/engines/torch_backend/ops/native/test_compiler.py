"""Kernel libraries are compiled once, by the first process, and the error names the reason if that is impossible."""

import fcntl
import platform
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest

from engines.torch_backend.ops.cpu_level import LEVELS, CpuLevel
from engines.torch_backend.ops.native import compiler
from engines.torch_backend.ops.native.compiler import CannotCompile, compile_library
from engines.torch_backend.ops.registry import cpu_ops

PLAIN = CpuLevel("plain", compiler_flags=())
KERNELS = Path(compiler.__file__).parent
X86_LEVELS_ELSEWHERE = [level for level in LEVELS if level.name.startswith("x86") and level.lacks()]
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int ANSWER = 42;\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    return folder


@pytest.fixture
def num_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that counts the compiled libraries, without those found in the cache."""
    links, wrapper = tmp_path / "links", tmp_path / "c++"
    note = f'case "$*" in *-shared*) echo >> {links};; esac'
    wrapper.write_text(f'#!/bin/sh\n{note}\nexec {shutil.which("c++")} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return lambda: len(links.read_text().splitlines()) if links.exists() else 0


@needs_compiler
def test_concurrent_processes_compile_once_and_later_ones_do_not_wait(
    sources: Path, tmp_path: Path, num_compiled: Callable[[], int]
):
    def compile_it(_: object = None) -> Path:
        return compile_library(sources, PLAIN, tmp_path / "cache")

    with ThreadPoolExecutor(4) as pool:
        [found] = set(pool.map(compile_it, range(4)))
        assert num_compiled() == 1
        assert CDLL(str(found)).answer() == 42
        with open(found.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            again = pool.submit(compile_it)
            try:
                assert again.result(timeout=20) == found
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)


@needs_compiler
def test_a_changed_header_or_another_level_needs_another_library(
    sources: Path, tmp_path: Path, num_compiled: Callable[[], int]
):
    """On one machine, or in a cache shared by machines with different levels."""
    before, other = (
        compile_library(sources, level, tmp_path / "cache")
        for level in (PLAIN, CpuLevel("other", compiler_flags=()))
    )
    assert (before.name.split("-")[0], other.name.split("-")[0]) == ("plain", "other")
    (sources / "answer.h").write_text("constexpr int ANSWER = 43;\n")

    after = compile_library(sources, PLAIN, tmp_path / "cache")

    assert before != after
    assert num_compiled() == 3
    assert CDLL(str(after)).answer() == 43


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize("level", X86_LEVELS_ELSEWHERE, ids=lambda level: level.name)
def test_integer_products_compile_for_levels_that_this_machine_cannot_run(
    tmp_path: Path, level: CpuLevel
):
    for file in ("integer_linear.cpp", "abi.h", "linear.h", "vectors.h"):
        shutil.copy(KERNELS / file, tmp_path)

    quickly = replace(level, compiler_flags=(*(level.compiler_flags or ()), "-O0"))
    library = compile_library(tmp_path, quickly, tmp_path / "cache")

    assert library.is_file()


@needs_compiler
def test_a_damaged_library_is_compiled_again(
    sources: Path, tmp_path: Path, num_compiled: Callable[[], int]
):
    found = compile_library(sources, PLAIN, tmp_path / "cache")
    whole = found.read_bytes()
    half = whole[: len(whole) // 2]
    for number, content in enumerate((half, half + bytes(len(half)), b""), start=2):
        found.write_bytes(content)
        assert compile_library(sources, PLAIN, tmp_path / "cache") == found
        assert num_compiled() == number
    assert CDLL(str(found)).answer() == 42


@needs_compiler
def test_a_failed_compilation_leaves_no_files(sources: Path, tmp_path: Path):
    (sources / "answer.cpp").write_text("no C++")

    with pytest.raises(CannotCompile, match=r"answer\.cpp"):
        compile_library(sources, PLAIN, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_the_engine_warns_and_runs_without_kernels(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cpu_ops.cache_clear()
    assert not cpu_ops("fast", LEVELS[-1]).is_native
    assert "instruction set" in caplog.text
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotCompile, match="no C\\+\\+ compiler"):
        compile_library(sources, PLAIN, tmp_path / "cache")
    assert not cpu_ops("fast", CpuLevel("without", compiler_flags=())).is_native
    assert "no C++ compiler" in caplog.text


@needs_compiler
def test_the_error_names_a_cache_with_wrong_permissions(sources: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CannotCompile, match="cannot write compiled kernels"):
        compile_library(sources, PLAIN, tmp_path / "file" / "cache")
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(CannotCompile, match="other users can write to"):
        compile_library(sources, PLAIN, cache)
    assert not list(cache.iterdir())
