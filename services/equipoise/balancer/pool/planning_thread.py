"""`PlanningThread`: the plans of one pool, away from the event loop and from other pools' plans."""

import asyncio

from equipoise.balancer.daemon_thread import in_daemon_thread
from equipoise.balancer.pool.planning_turns import PlanningTurns
from equipoise.balancer.pool.proposal import Proposal, ProposalRequest, propose

MAX_RUNNING = 4
"""Plans of a pool that run at once, at most: threads of those that were given up go on."""


class PlanTimeoutError(Exception):
    """A plan took too long and was given up, or earlier ones that were still run."""


class PlanningThread:
    """Plans on threads of their own, each within a bound, in turn with those of other pools."""

    def __init__(self, pool: str, *, turns: PlanningTurns) -> None:
        self._name = f"planner of {pool}"
        self._turns = turns
        self._num_running = 0

    async def propose(self, request: ProposalRequest) -> Proposal:
        """Plan and judge. What the planner raises is raised here.

        Raises:
            PlanTimeoutError: it took longer than the policy allows, or waited as long for its turn.
        """
        if self._num_running >= MAX_RUNNING:
            raise PlanTimeoutError(
                f"{self._num_running} plans of the pool run still, given up or not: nothing is "
                "planned until one of them ends"
            )

        def work() -> Proposal:
            self._num_running += 1
            try:
                return propose(request)
            finally:
                self._num_running -= 1

        timeout_s = request.policy.plan_timeout_s
        bound = asyncio.timeout(timeout_s)
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with bound, self._turns.taken():
                # When many pools are due at once, the last one has the same time for its plan.
                bound.reschedule(asyncio.get_running_loop().time() + timeout_s)
                return await in_daemon_thread(work, name=self._name)
        except TimeoutError:
            raise PlanTimeoutError(
                f"a plan was given up after {timeout_s:g} s; the next window tries again"
            ) from None
