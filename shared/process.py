"""Process helpers: restart backoff, termination with the parent, directory locks, and the end of startup
(types of messages, GC freeze, huge pages).
"""

import asyncio
import ctypes
import fcntl
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

PR_SET_PDEATHSIG = 1
MADV_COLLAPSE = 25
_M_MMAP_THRESHOLD = -3  # malloc.h
HUGE_PAGE = 2 << 20
#: Maximum size of a mapping that is moved into huge pages; larger mappings are weights or caches.
MAX_COLLAPSED = 64 << 20
POLL_S = 0.5
FIRST_PAUSE_S = 0.5
#: Garbage collection threshold, in objects. A few requests already create 700 objects, Python's default.
COLLECT_EVERY = 10_000

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
#: Looked up in the parent, because nothing may be imported or loaded between fork and exec.
_prctl = _libc and _libc.prctl


def end_startup() -> None:
    """Exclude the current objects from garbage collection, and collect less often from now on.

    On Linux 6.1 or newer, a thread also moves the heap into huge pages, which reduces TLB misses of a
    process that wakes up for each request.
    """
    resolve_structs()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
    if _libc is not None:  # in a thread, because this takes up to a second if memory is fragmented
        threading.Thread(target=_collapse_heaps, name="huge pages", daemon=True).start()


def resolve_structs() -> None:
    """Resolve the field types of all imported structs.

    msgspec 0.22 resolves a type when it is first decoded, and crashes if two threads resolve it concurrently.
    """
    types: list[type] = [msgspec.Struct]
    for each in types:
        types += each.__subclasses__()
        with suppress(TypeError, NameError):  # the struct is never decoded
            msgspec.json.Decoder(each)


def return_large_buffers() -> None:
    """Have glibc return freed allocations above 1 MiB to the system, such as parts of uploads to a bucket.

    By default, freeing a large allocation raises this limit; later ones come from heaps, which keep freed memory.
    """
    with suppress(AttributeError):  # other C libraries
        if _libc is not None and _libc.gnu_get_libc_version:
            _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


async def wait_for(event: asyncio.Event, within_s: float) -> None:
    """Wait until the event is set, or the time has passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _collapse_heaps() -> None:
    assert _libc is not None
    with suppress(OSError):
        for start, size in _heaps():  # the kernel may refuse; the process is only slower then
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE)


def _heaps() -> Iterator[tuple[int, int]]:
    """Address and length of each range of whole huge pages in this process's private memory."""
    guarded_at = 0  # end of the guard page below a thread's stack
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "---p":
            guarded_at = end
        elif rights == "rw-p" and name in ([], ["[heap]"]) and start != guarded_at:
            start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if 0 < end - start <= MAX_COLLAPSED:
                yield start, end - start


def lock_directory(directory: Path) -> IO[bytes]:
    """Create and lock a directory. Closing the file unlocks it. Raises: BlockingIOError if it is locked; OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (directory / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def die_with_parent(parent: int) -> None:
    """Kill this process when the process `parent` ends. Call it in the child.

    On Linux the kernel sends the signal; on other systems a thread checks the parent's id.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent has already ended
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


@dataclass(slots=True)
class Pauses:
    """Backoff between the starts of a process, or before the probes of a server."""

    longest_s: float = 30.0
    stable_after_s: float = 60.0
    started_at: float = field(default_factory=time.monotonic)
    pause_s: float = FIRST_PAUSE_S

    def next_s(self) -> float:
        """The next pause: twice the previous pause, or `FIRST_PAUSE_S` after a run of `stable_after_s`."""
        if time.monotonic() - self.started_at > self.stable_after_s:
            self.pause_s = FIRST_PAUSE_S
        pause_s, self.pause_s = self.pause_s, min(self.pause_s * 2, self.longest_s)
        return pause_s

    def started(self) -> None:
        self.started_at = time.monotonic()


def on_stop_signal(act: Callable[[], None]) -> None:
    """Call `act` in the running event loop at each SIGINT and SIGTERM, instead of terminating the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, act)


def request_parent_death_signal() -> None:
    """Request SIGTERM when the parent dies. Safe as a `preexec_fn`; no-op outside Linux."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
