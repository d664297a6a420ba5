"""Tuning of glibc's malloc; no effect with other C libraries."""

import ctypes

#: Largest allocation that the heap serves, and maximum number of free bytes kept at its end.
LARGEST_KEPT = 2**28
MOST_KEPT = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def use_one_heap() -> None:
    """Use one malloc arena for all threads that start from now on.

    By default each thread has its own arena. Allocations above 64 MiB then come from the kernel each time, and free
    memory of one arena is not available to the others.
    """
    _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed memory for later allocations, so that pages are zeroed once.

    Useful in processes that reuse large buffers, after their permanent allocations. No effect before glibc 2.35.
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
