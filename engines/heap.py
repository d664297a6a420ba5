"""Tuning of glibc's malloc; no effect with other C libraries."""

import ctypes

#: Largest allocation from the heap, and most bytes that are kept at its free end.
LARGEST_KEPT = 2**28
MOST_KEPT = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def use_one_heap() -> None:
    """Use one malloc arena for all threads that start from now on.

    By default each thread has its own; allocations above 64 MiB then come from the kernel each time, and free memory of
    one arena is not available to others.
    """
    _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed memory for later allocations, so that pages are zeroed once.

    For a process that reuses large buffers; call it after its permanent allocations. No effect before glibc 2.35.
    """
    if _mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT):
        _mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - other C libraries number parameters differently
        return library.mallopt(parameter, value) == 1
    except (AttributeError, OSError):
        return False
