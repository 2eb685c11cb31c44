"""`in_daemon_thread`: runs blocking work on a thread that the process does not wait for at exit.

Executors join their threads when Python exits, so work that hangs would hang the shutdown.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def in_daemon_thread(work: Callable[[], _Result], *, name: str) -> _Result:
    """Return or raise what `work` does. Cancellation leaves the work to end by itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(how: Callable[[Any], None], value: object) -> None:
        if not future.done():
            how(value)

    def run() -> None:
        how, value = future.set_result, None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - raised in the task that waits
            how, value = future.set_exception, error  # type: ignore[assignment]
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(settle, how, value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
