"""`Planning`: the plans of one pool, each within a timeout."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from equipoise.planning.proposal import Proposal, ProposalRequest


class PlanTimeoutError(Exception):
    """A plan took too long and was cancelled."""


class PlannerDiedError(Exception):
    """The process that made a plan has ended."""


class Planner(Protocol):
    """Computes plans off the event loop, few at once."""

    async def propose(
        self, request: ProposalRequest, *, pool: str, begins: Callable[[], None]
    ) -> Proposal:
        """Plan and judge; cancelled when the plan times out.

        `begins` is called when the plan starts, after its wait for a turn.

        Raises:
            PlannerDiedError: the process that made the plan has ended.
            Exception: what the planner raised.
        """


class Planning:
    """Makes the plans of one pool with `planner`."""

    def __init__(self, pool: str, *, planner: Planner) -> None:
        self._pool = pool
        self._planner = planner

    async def propose(self, request: ProposalRequest) -> Proposal:
        """Plan and judge. What the planner raises is raised here.

        Raises:
            PlanTimeoutError: it took longer than the policy allows, or waited as long for its turn.
            PlannerDiedError: the process that made it has ended.
        """
        timeout_s = request.policy.plan_timeout_s
        limit = asyncio.timeout(timeout_s)
        loop = asyncio.get_running_loop()

        def begins() -> None:
            # When many pools are due at once, the last one gets the same time for its plan.
            limit.reschedule(loop.time() + timeout_s)

        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with limit:
                return await self._planner.propose(request, pool=self._pool, begins=begins)
        except TimeoutError:
            raise PlanTimeoutError(
                f"planning timed out after {timeout_s:g} s; the next window tries again"
            ) from None
