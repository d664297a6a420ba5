"""The result of a future that its caller may have cancelled."""

import asyncio
from typing import Any


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Set the result, or raise an exception that is the result; nothing if the future is done."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
