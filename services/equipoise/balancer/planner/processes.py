"""`PlannerProcesses`: makes plans in separate processes.

A plan takes milliseconds or a minute of Python and compiled code. In a separate process it does not
block the interpreter of the event loop, it can be killed when it times out, and if memory runs out
the system kills it first.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from equipoise.balancer.planner.planning import PlannerDiedError
from equipoise.balancer.planner.process import PlannerProcess, PlanningJob
from equipoise.balancer.planner.turns import MAX_AT_ONCE
from equipoise.planning.proposal import Proposal, ProposalRequest

MAX_PROCESSES = 2 * MAX_AT_ONCE
"""Most processes: plans that take longer than a turn continue while others have theirs."""

START_TIMEOUT_S = 300.0
"""Ten times what the compiler takes with an empty cache."""

NUM_AHEAD = 4
"""Plans queued in a process behind the current one, so that it need not wait for the event loop."""


class PlannerProcesses:
    """Starts processes on demand; they end with this one, however it ends.

    An asynchronous context, for one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[PlanningJob] = deque()
        self._processes: list[PlannerProcess] = []
        self._stopped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill all processes, with the plans in progress."""
        self._stopped = True
        for process in tuple(self._processes):
            await process.gone()
        for job in self._waiting:
            _fail(job, PlannerDiedError("the balancer stops"))

    async def start(self) -> None:
        """Start one process, so that the first plan does not wait for it.

        Takes half a minute with an empty compiler cache.

        Raises:
            PlannerDiedError: it ended, or was not ready within `START_TIMEOUT_S`.
            OSError: it cannot be started.
        """
        process = self._started()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.ready.wait()
        except TimeoutError:
            process.kill()
            raise PlannerDiedError(
                f"planning process {process.pid} was not ready within {START_TIMEOUT_S:g} s and "
                f"was killed; the first plan starts another one"
            ) from None
        if process.ended:
            raise process.died()

    async def propose(
        self, request: ProposalRequest, *, pool: str, begins: Callable[[], None]
    ) -> Proposal:
        """Plan and judge in a process, which is killed on cancellation.

        Raises:
            PlannerDiedError: the process ended, or none can be started.
            Exception: what the planner raised.
        """
        assert not self._stopped, f"{pool} is over"
        job = PlanningJob(
            request=request,
            begins=begins,
            answer=asyncio.get_running_loop().create_future(),
        )
        try:
            self._waiting.append(job)
            self._deal()
            return await job.answer
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def _deal(self) -> None:
        while self._waiting:
            try:
                process = self._next()
            except OSError as error:
                words = f"cannot start a planning process: {error}; the next window tries again"
                _fail(self._waiting.popleft(), PlannerDiedError(words))
                continue
            if process is None:
                return
            process.ask(self._waiting.popleft())

    def _next(self) -> PlannerProcess | None:
        """The process for the next plan; None while all are busy enough."""
        in_turn = [one for one in self._processes if one.in_turn and not one.is_ending]
        if len(in_turn) < MAX_AT_ONCE:
            idle = self._idle()
            if idle:
                return idle[0]
            return self._started() if len(self._processes) < MAX_PROCESSES else None
        least = min(in_turn, key=lambda process: len(process.jobs))
        return least if len(least.jobs) <= NUM_AHEAD else None

    def _idle(self) -> list[PlannerProcess]:
        return [one for one in self._processes if not one.jobs and not one.is_ending]

    def _started(self) -> PlannerProcess:
        process = PlannerProcess(changed=self._follow)
        self._processes.append(process)
        return process

    def _give_up(self, job: PlanningJob) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        for process in self._processes:
            if job not in process.jobs:
                continue
            if process.jobs[0] is job:
                process.kill()
            else:
                process.withdraw(job)

    def _follow(self, process: PlannerProcess) -> None:
        """A process has answered, exceeded a turn, or ended."""
        if process.ended:
            self._processes.remove(process)
            left = deque(one for one in process.jobs if not one.answer.done())
            # If it was killed, the plan in progress was cancelled.
            if left and not process.is_ending:
                _fail(left.popleft(), process.died())
            self._waiting.extendleft(reversed(left))
        elif process.jobs and not process.in_turn:
            # Plans queued behind a long one can be made elsewhere.
            self._waiting.extendleft(reversed(process.withdraw_waiting()))
        elif not process.jobs and len(self._idle()) > MAX_AT_ONCE:
            # More processes were needed while some took long.
            process.kill()
        if not self._stopped:
            self._deal()


def _fail(job: PlanningJob, error: PlannerDiedError) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
