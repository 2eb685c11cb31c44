"""`Planning`: the plans of one pool, each within a bound and in turn with those of other pools."""

import asyncio
from typing import Protocol

from equipoise.balancer.planner.proposal import Proposal, ProposalRequest
from equipoise.balancer.planner.turns import PlanningTurns


class PlanTimeoutError(Exception):
    """A plan took too long and was given up, or earlier ones that were still run."""


class PlannerDiedError(Exception):
    """What made a plan is no more."""


class Planner(Protocol):
    """Computes, somewhere else than on the event loop."""

    async def propose(self, request: ProposalRequest, *, pool: str) -> Proposal:
        """Plan and judge; cancelled when the plan is given up.

        Raises:
            PlanTimeoutError: too many plans of `pool` that were given up run still.
            PlannerDiedError: what made the plan is no more.
            Exception: what the planner raised.
        """


class Planning:
    """Has the plans of one pool made by `planner`."""

    def __init__(self, pool: str, *, planner: Planner, turns: PlanningTurns) -> None:
        self._pool = pool
        self._planner = planner
        self._turns = turns

    async def propose(self, request: ProposalRequest) -> Proposal:
        """Plan and judge. What the planner raises is raised here.

        Raises:
            PlanTimeoutError: it took longer than the policy allows, or waited as long for its turn.
            PlannerDiedError: what made it is no more.
        """
        timeout_s = request.policy.plan_timeout_s
        bound = asyncio.timeout(timeout_s)
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with bound, self._turns.taken():
                # When many pools are due at once, the last one has the same time for its plan.
                bound.reschedule(asyncio.get_running_loop().time() + timeout_s)
                return await self._planner.propose(request, pool=self._pool)
        except TimeoutError:
            raise PlanTimeoutError(
                f"a plan was given up after {timeout_s:g} s; the next window tries again"
            ) from None
