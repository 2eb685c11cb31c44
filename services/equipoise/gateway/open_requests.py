"""`OpenRequests`: every request in flight, and the three ways it can end.

A request ends when its response is complete, when its client hangs up, or when the grace period of
the gateway's shutdown is over.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from starlette.types import Receive

from equipoise.gateway.errors import ClientGoneError, StoppingError, TooManyRequestsError
from equipoise.gateway.metrics import Outcome, RequestTally

LONG_BODY_BYTES = 2**16
"""Longer bodies are parsed one at a time."""

_Parsed = TypeVar("_Parsed")


class OpenRequests:
    """At most `max_open` at a time; used from one event loop only."""

    def __init__(self, *, max_open: int, tally: RequestTally) -> None:
        self.stopping = False
        self._max_open = max_open
        self._tally = tally
        self._num_admitted = 0
        self._long_turn = asyncio.Semaphore(1)
        # The timeouts of bodies that are arriving, the oldest first.
        self._arriving: dict[asyncio.Timeout, None] = {}
        self.num_open = 0
        """Requests in flight."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether the grace period is over: requests that are still open are ended."""
        return self._ending.done()

    @contextmanager
    def arriving(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count a request whose body is being read under a timeout.

        If more than `max_open` are arriving, the timeout of the oldest ends at once: clients that
        send their bodies slowly keep out no others.

        Raises:
            StoppingError: the gateway is stopping.
        """
        self._check_stopping()
        self._arriving[timeout] = None
        try:
            if len(self._arriving) > self._max_open:
                oldest = next(iter(self._arriving))
                del self._arriving[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
            yield
        finally:
            self._arriving.pop(timeout, None)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request whose body has arrived, until it ends.

        Raises:
            StoppingError: the gateway is stopping.
            TooManyRequestsError: as many as allowed are open.
        """
        self._check_stopping()
        if self._num_admitted >= self._max_open:
            self._tally.outcomes[Outcome.NOT_ADMITTED] += 1
            raise TooManyRequestsError(
                f"{self._num_admitted} requests are open, which is this gateway's limit: "
                f"try again later"
            )
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    async def parsed(self, body: bytes, parse: Callable[[bytes], _Parsed]) -> _Parsed:
        """Parse a body in a thread, because a long text takes time to tokenize.

        Long ones of all paths take turns, so that there are threads for short ones.
        """
        async with self._long_turn if len(body) > LONG_BODY_BYTES else nullcontext():
            return await asyncio.to_thread(parse, body)

    def _check_stopping(self) -> None:
        if self.stopping:
            self._tally.outcomes[Outcome.NOT_ADMITTED] += 1
            raise StoppingError("this gateway is stopping: use another one")

    async def run(self, work: Coroutine[Any, Any, None], *, receive: Receive) -> None:
        """Run `work` unless the client or the shutdown ends it first; then cancel and await it.

        `receive` is that of the request, after its body was read.

        Raises:
            ClientGoneError: the client hung up.
            StoppingError: the grace period is over.
        """
        working = asyncio.create_task(work)
        gone = asyncio.create_task(_hung_up(receive))
        self.num_open += 1
        self._idle.clear()
        try:
            await asyncio.wait({working, gone, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.done():
                raise ClientGoneError("the client hung up")
            raise StoppingError("this gateway stopped before the response was complete")
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.gather(working, gone, return_exceptions=True)
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, wait up to `timeout_s` seconds for open ones, and end the rest."""
        self.stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        if not self._ending.done():
            self._ending.set_result(None)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
