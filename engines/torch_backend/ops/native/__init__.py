"""The library of all operators' C++ kernels for CPUs, compiled on first use. This folder also has shared sources."""

from functools import cache
from pathlib import Path

from engines.torch_backend.ops.cpu_level import CpuLevel
from engines.torch_backend.ops.native.compiler import CannotCompile, compile_library
from engines.torch_backend.ops.native.library import Library
from engines.torch_backend.ops.registry import Site

SOURCES = Path(__file__).parents[1]


def load(level: CpuLevel) -> Library:
    """The library of a level. Raises: CannotCompile."""
    library, reason = _find(level)
    if library is None:
        raise CannotCompile(reason)
    return library


def lacks(site: Site) -> str:
    """The reason why there are no C++ kernels; empty if there are."""
    if site.device.type != "cpu":
        return "C++ kernels are for CPUs"
    if site.cpu_kernels == "off":
        return "C++ kernels are off"
    return _find(site.level)[1]


@cache
def _find(level: CpuLevel) -> tuple[Library | None, str]:
    try:
        return Library(compile_library(SOURCES, level)), ""
    except (CannotCompile, OSError) as error:
        return None, str(error)
