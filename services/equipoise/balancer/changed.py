"""`Changed`: wakes all tasks that wait for the next change. For one event loop."""

import asyncio


class Changed:
    """`wait` returns at the next `notify` after its call."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None  # Only while a task waits.

    def notify(self) -> None:
        """Wake all waiting tasks."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next change."""
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()
