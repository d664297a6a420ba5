"""Threads that serve tenants in turn, so that one tenant's slow work delays another's by one piece of it."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class FairThreads:
    """Runs `num_threads` pieces of work at a time; the tenants whose work waits take turns. Used by one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Do a tenant's work in a thread. Raises: what `work` raises."""
        await self._acquire(tenant)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            self._release()
            raise
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)  # whoever leaves, the thread goes on

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self._release()
            raise

    def _ended(self, running: "asyncio.Future[Result]") -> None:
        if not running.cancelled():
            running.exception()  # nobody may wait for it any more; asyncio would complain
        self._release()

    def _release(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
