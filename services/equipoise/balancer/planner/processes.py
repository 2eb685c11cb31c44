"""`PlannerProcesses`: plans in processes of their own.

A plan takes milliseconds or a minute of Python and compiled code. In a process of its own it takes
no interpreter away from the event loop that hears the workers, it can be ended when it is given up,
and one that runs out of memory takes nothing else with it.
"""

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from equipoise.balancer.planner.planning import PlannerDiedError
from equipoise.balancer.planner.proposal import Proposal, ProposalRequest
from equipoise.balancer.planner.turns import MAX_AT_ONCE

PROGRAM = "equipoise.balancer.planner"

_MAX_ASKED = 32
"""Plans under way at most, those included that take longer than a turn; others wait within their
bound."""

_END_TIMEOUT_S = 1.0
"""A killed process ends at once, unless the system is in trouble."""


class PlannerProcesses:
    """A process makes one plan at a time; those that are idle wait for the next one.

    They are started when they are needed, and end with this process whatever becomes of it.
    """

    def __init__(self) -> None:
        self._idle: list[_PlannerProcess] = []
        self._busy: set[_PlannerProcess] = set()
        # Each waits for a process, and no longer than it lives.
        self._threads = ThreadPoolExecutor(max_workers=_MAX_ASKED, thread_name_prefix="planner")

    async def propose(self, request: ProposalRequest, *, pool: str) -> Proposal:  # noqa: ARG002
        """Plan and judge in a process that has nothing else to do; cancelled, it is ended.

        Raises:
            PlannerDiedError: the process ended.
            Exception: what the planner raised.
        """
        process = self._idle_one() or _PlannerProcess()
        self._busy.add(process)
        try:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, process.ask, request)
        except BaseException:
            process.end()
            raise
        finally:
            self._busy.discard(process)
        # More of them were needed while some took long.
        if len(self._idle) < MAX_AT_ONCE:
            self._idle.append(process)
        else:
            process.end()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End them all, plans under way included."""
        for process in (*self._idle, *self._busy):
            process.end()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _idle_one(self) -> "_PlannerProcess | None":
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
        return None


class _PlannerProcess:
    """One process, and the connection on which it is asked."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked, as far as the system knows."""
        return self._process.poll() is None

    def ask(self, request: ProposalRequest) -> Proposal | Exception:
        """Have a proposal made, or hear why not. Blocks.

        Raises:
            PlannerDiedError: the process ended.
        """
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise PlannerDiedError(
                f"process {self._process.pid} ended while it planned, perhaps for want of memory; "
                "the next window tries again"
            ) from None
        if isinstance(answer, Exception):
            return answer
        plan, verdict, waves = answer
        return Proposal(request=request, plan=plan, verdict=verdict, waves=waves)

    def end(self) -> None:
        """End it, whatever it does; whoever waits for its answer hears of that."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_TIMEOUT_S)
