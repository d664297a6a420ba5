"""Memory that a process frees and uses again. Where the C library is not glibc, nothing happens."""

import ctypes

#: Bytes of one allocation that returns to the process's heap, not to the kernel, and bytes of the
#: heap's free end.
LARGEST_KEPT = 2**28
MOST_KEPT = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def use_one_heap() -> None:
    """Have threads that start from now on allocate from one heap, whatever they give back to it.

    With heaps of their own, as glibc has them, what is larger than 64 MiB comes from the kernel
    each time, and what is free in one heap is of no use to the others.
    """
    _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of what is freed, for allocations to come: pages are zeroed only once.

    More than the process has held at once is not kept. For a process that does the same again and
    again in large buffers, once what it holds for good is there. Before glibc 2.35 nothing happens.
    """
    if _mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT):
        _mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - others number parameters otherwise
        return library.mallopt(parameter, value) == 1
    except (AttributeError, OSError):
        return False
