"""`CheckpointReader`: reads experts from the checkpoint, each within a timeout.

It uses threads of its own. Reads from a disk or file server that hangs cannot be interrupted: on
the event loop's executor they would take all threads from other work, and block the exit.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from equipoise.rank.errors import TransferError
from equipoise.rank.waits import Waits
from equipoise.wire.messages import Wait
from equipoise.worker.waits import READ_TIMEOUT_S
from equipoise_model.checkpoint import CheckpointError

MAX_READS = 4
"""Reads at the same time, and threads that a hung file system can block."""


class CheckpointReader:
    """Reads on at most `MAX_READS` threads; used from one event loop."""

    def __init__(
        self,
        read: Callable[[int, int], Tensor],
        *,
        waits: Waits,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """`read` returns the payload of (layer, expert), on any thread."""
        self._read = read
        self._waits = waits
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(MAX_READS)

    async def read(self, layer: int, expert: int) -> Tensor:
        """Return an expert's payload.

        Raises:
            TransferError: it cannot be read, is damaged, or was not read in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
                return await self._begin(layer, expert)
        except TimeoutError as error:
            reason = (
                f"the checkpoint did not return expert {expert} of layer {layer} within "
                f"{self._timeout_s:g} s: its disk or file server hangs"
            )
            self._waits.note(Wait.READ, reason)
            raise TransferError(reason) from error
        except (OSError, ValueError, CheckpointError) as error:
            raise TransferError(str(error)) from error

    def _begin(self, layer: int, expert: int) -> asyncio.Future[Tensor]:
        """Read on a thread, which frees its place when it ends, however late."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Tensor] = loop.create_future()

        def settle(payload: Tensor | None, error: Exception | None) -> None:
            self._free.release()
            if future.done():
                return
            if payload is not None:
                future.set_result(payload)
            else:
                future.set_exception(error or AssertionError("a payload or an error"))

        def run() -> None:
            payload, fault = None, None
            try:
                payload = self._read(layer, expert)
            except Exception as error:  # noqa: BLE001 - raised in the task that waits
                fault = error
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle, payload, fault)

        # A daemon: the exit of the process does not wait for it.
        threading.Thread(target=run, name="checkpoint read", daemon=True).start()
        return future
