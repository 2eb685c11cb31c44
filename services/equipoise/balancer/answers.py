"""`Answers`: callers that wait for the answer to a request, by ticket."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from equipoise.balancer.errors import UnansweredError
from equipoise.pool.requests import Answer


class Answers:
    """For one event loop; a ticket is valid inside its block."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    @asynccontextmanager
    async def asked(self, *, timeout_s: float) -> AsyncIterator[tuple[int, asyncio.Future[Answer]]]:
        """Open a ticket; its answer is to be awaited inside the block.

        Raises:
            UnansweredError: there was no answer within `timeout_s`, or there will be none.
        """
        ticket = next(self._tickets)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        try:
            async with asyncio.timeout(timeout_s):
                yield ticket, answer
        except TimeoutError:
            raise UnansweredError(
                f"no answer within {timeout_s:g} s: check the status before you retry"
            ) from None
        finally:
            del self._waiting[ticket]
            answer.cancel()

    def give(self, ticket: int, outcome: Answer) -> None:
        """Answer; does nothing if the caller has stopped waiting."""
        answer = self._waiting.get(ticket)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def fail(self, ticket: int, reason: str) -> None:
        """Report that there will be no answer."""
        answer = self._waiting.get(ticket)
        if answer is not None and not answer.done():
            answer.set_exception(UnansweredError(reason))

    def fail_all(self, reason: str) -> None:
        """Report to all callers that there will be no answer."""
        for ticket in tuple(self._waiting):
            self.fail(ticket, reason)
