"""`in_daemon_thread`: work that blocks, on a thread for which the process does not wait at its end.

Executors join their threads when Python ends, so one piece of work that hangs would hang the stop.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def in_daemon_thread(work: Callable[[], _Result], *, name: str) -> _Result:
    """What `work` returns or raises. Who stops waiting leaves it to end by itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(how: Callable[[Any], None], value: object) -> None:
        if not future.done():
            how(value)

    def run() -> None:
        how, value = future.set_result, None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            how, value = future.set_exception, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, how, value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
