"""`Answers`: whoever waits for what becomes of a request, by ticket."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from equipoise.balancer.errors import UnansweredError
from equipoise.pool.requests import Answer


class Answers:
    """Used from one event loop; a ticket is forgotten when its block is left."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    @asynccontextmanager
    async def asked(self, *, timeout_s: float) -> AsyncIterator[tuple[int, asyncio.Future[Answer]]]:
        """A ticket and the answer to it, to be awaited inside the block.

        Raises:
            UnansweredError: there was none within `timeout_s`, or there will be none.
        """
        ticket = next(self._tickets)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        try:
            async with asyncio.timeout(timeout_s):
                yield ticket, answer
        except TimeoutError:
            raise UnansweredError(
                f"no answer within {timeout_s:g} s: ask for the status before you repeat it"
            ) from None
        finally:
            del self._waiting[ticket]
            answer.cancel()

    def give(self, ticket: int, outcome: Answer) -> None:
        """Answer; harmless if nobody waits any more."""
        answer = self._waiting.get(ticket)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def fail(self, ticket: int, reason: str) -> None:
        """There will be no answer."""
        answer = self._waiting.get(ticket)
        if answer is not None and not answer.done():
            answer.set_exception(UnansweredError(reason))

    def fail_all(self, reason: str) -> None:
        """There will be no answer to anybody."""
        for ticket in tuple(self._waiting):
            self.fail(ticket, reason)
