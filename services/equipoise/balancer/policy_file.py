"""`PolicyFile`: reads a policy file again and again, and offers new contents to the book.

A mounted ConfigMap changes when a link in its folder is swapped: a watch on the file would see the
first change only (and with `subPath` none). Polling the path works for any file, and needs no
permission in the cluster.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from equipoise.balancer.readiness import Readiness
from equipoise.daemon_thread import in_daemon_thread
from equipoise.policy.book import PolicyBook
from equipoise.policy.reading import MAX_BYTES

POLL_S = 1.0
"""Seconds between two reads."""

SETTLE_S = 0.2
"""Seconds for which a changed file must stay the same: editors write in pieces."""

READ_TIMEOUT_S = 5.0
"""Timeout of a read; a network mount can hang."""

_log = logging.getLogger(__name__)


class PolicyFile:
    """The file at `path`. `on_rejection` gets the reason of each rejection; it must not hang."""

    def __init__(
        self,
        path: Path,
        *,
        book: PolicyBook,
        readiness: Readiness,
        clock: Callable[[], float],
        on_rejection: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._path = path
        self._book = book
        self._readiness = readiness
        self._clock = clock
        self._on_rejection = on_rejection
        self._known: bytes | str | None = None
        self._reading: asyncio.Task[bytes] | None = None

    async def run(self) -> None:
        """Poll, until cancelled."""
        while True:
            try:
                await self._look_once_settled()
            except Exception:  # noqa: BLE001 - a bug must not end the polling
                _log.exception("reading the policy file failed")
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Offer the file's contents, if they are new."""
        await self._offer(await self._contents())

    async def _look_once_settled(self) -> None:
        found = await self._contents()
        if found == self._known:
            return
        await asyncio.sleep(SETTLE_S)
        if await self._contents() == found:
            await self._offer(found)

    async def _offer(self, found: bytes | str) -> None:
        if found == self._known:
            return
        self._known, source, now = found, str(self._path), self._clock()
        num_rejected = self._book.num_rejected
        if isinstance(found, str):
            self._book.reject(f"policy {source}: {found}", now=now)
        else:
            # Invalid UTF-8 becomes a character that no policy has, in the line where it is.
            text = found.decode(errors="replace")
            try:
                self._book.offer(text, source=source, now=now)
            except Exception as error:  # noqa: BLE001 - the policy in force stays, and says why
                _log.exception("reading the policy file failed")
                reason = f"cannot be read because of a bug: {type(error).__name__}: {error}"
                self._book.reject(f"policy {source}: {reason}", now=now)
        self._readiness.note("policy", self._book.missing)
        rejection = self._book.latest_rejection
        if self._on_rejection and rejection is not None and self._book.num_rejected > num_rejected:
            await self._on_rejection(rejection.reason)

    async def _contents(self) -> bytes | str:
        """The file's bytes, or a message why they cannot be read.

        A read that hangs is waited for again, because each would keep a thread.
        """
        if self._reading is None:
            read = in_daemon_thread(self._read, name="policy file")
            self._reading = asyncio.create_task(read)
        reading = self._reading
        await asyncio.wait({reading}, timeout=READ_TIMEOUT_S)
        if not reading.done():
            return f"cannot be read within {READ_TIMEOUT_S:g} s"
        self._reading = None
        try:
            return reading.result()
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
