"""`Planning`: the plans of one pool, each within a bound."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from equipoise.planning.proposal import Proposal, ProposalRequest


class PlanTimeoutError(Exception):
    """A plan took too long and was given up, or earlier ones that were still run."""


class PlannerDiedError(Exception):
    """What made a plan is no more."""


class Planner(Protocol):
    """Computes, somewhere else than on the event loop, and few plans at once."""

    async def propose(
        self, request: ProposalRequest, *, pool: str, begins: Callable[[], None]
    ) -> Proposal:
        """Plan and judge; cancelled when the plan is given up.

        `begins` is called when the plan is begun, once it had its turn.

        Raises:
            PlanTimeoutError: too many plans of `pool` that were given up run still.
            PlannerDiedError: what made the plan is no more.
            Exception: what the planner raised.
        """


class Planning:
    """Has the plans of one pool made by `planner`."""

    def __init__(self, pool: str, *, planner: Planner) -> None:
        self._pool = pool
        self._planner = planner

    async def propose(self, request: ProposalRequest) -> Proposal:
        """Plan and judge. What the planner raises is raised here.

        Raises:
            PlanTimeoutError: it took longer than the policy allows, or waited as long for its turn.
            PlannerDiedError: what made it is no more.
        """
        timeout_s = request.policy.plan_timeout_s
        bound = asyncio.timeout(timeout_s)
        loop = asyncio.get_running_loop()

        def begins() -> None:
            # When many pools are due at once, the last one has the same time for its plan.
            bound.reschedule(loop.time() + timeout_s)

        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with bound:
                return await self._planner.propose(request, pool=self._pool, begins=begins)
        except TimeoutError:
            raise PlanTimeoutError(
                f"a plan was given up after {timeout_s:g} s; the next window tries again"
            ) from None
