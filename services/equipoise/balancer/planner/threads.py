"""`PlannerThreads`: plans on threads of this process, for a balancer inside another program."""

from collections import Counter
from collections.abc import Callable

from equipoise.balancer.daemon_thread import in_daemon_thread
from equipoise.balancer.planner.planning import PlanTimeoutError
from equipoise.balancer.planner.turns import PlanningTurns
from equipoise.planning.proposal import Proposal, ProposalRequest, propose

MAX_RUNNING = 4
"""Plans of a pool that run at once, at most: threads of those that were given up go on."""


class PlannerThreads:
    """A thread a plan. They share one interpreter with the event loop, and cannot be ended."""

    def __init__(self) -> None:
        self._num_running: Counter[str] = Counter()
        self._turns = PlanningTurns()

    async def propose(
        self, request: ProposalRequest, *, pool: str, begins: Callable[[], None]
    ) -> Proposal:
        """Plan and judge on a new thread, in turn with other pools.

        Raises:
            PlanTimeoutError: too many plans of `pool` that were given up run still.
        """

        def work() -> Proposal:
            try:
                return propose(request)
            finally:
                self._num_running[pool] -= 1

        async with self._turns.taken():
            if self._num_running[pool] >= MAX_RUNNING:
                raise PlanTimeoutError(
                    f"{self._num_running[pool]} plans of the pool run still, given up or not: "
                    "nothing is planned until one of them ends"
                )
            begins()
            self._num_running[pool] += 1
            return await in_daemon_thread(work, name=f"planner of {pool}")
