"""`PlannerProcesses`: plans in processes of their own.

A plan takes milliseconds or a minute of Python and compiled code. In a process of its own it takes
no interpreter away from the event loop that hears the workers, and it can be ended when it is given
up. One that wants too much memory is what the system takes first.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from equipoise.balancer.daemon_thread import in_daemon_thread
from equipoise.balancer.planner.planning import PlannerDiedError
from equipoise.balancer.planner.proposal import Proposal, ProposalRequest
from equipoise.balancer.planner.turns import MAX_AT_ONCE

PROGRAM = "equipoise.balancer.planner"

READY = "ready"
"""What a process says once it has compiled, or loaded, all that plans need."""

MAX_PROCESSES = 2 * MAX_AT_ONCE
"""Processes at most: those whose plans take longer than a turn go on while others have theirs."""

_END_TIMEOUT_S = 1.0
"""A killed process ends at once, unless the system is in trouble."""


class PlannerProcesses:
    """A process makes one plan at a time; those that are idle wait for the next one.

    They are started when they are needed, and end with this process whatever becomes of it.
    """

    def __init__(self) -> None:
        self._idle: list[_PlannerProcess] = []
        self._busy: set[_PlannerProcess] = set()
        self._free = asyncio.Semaphore(MAX_PROCESSES)

    def start(self, *, meanwhile: Callable[[], None]) -> None:
        """Have one ready, so that the first plan does not wait for it. Blocks.

        `meanwhile` is done in this process. Takes half a minute where nothing was compiled before.

        Raises:
            PlannerDiedError: it ended.
        """
        process = _PlannerProcess()
        self._busy.add(process)
        try:
            meanwhile()
            process.until_ready()
            self._idle.append(process)
        finally:
            self._busy.discard(process)

    async def propose(self, request: ProposalRequest, *, pool: str) -> Proposal:
        """Plan and judge in a process that has nothing else to do; cancelled, it is ended.

        Raises:
            PlannerDiedError: the process ended.
            Exception: what the planner raised.
        """
        async with self._free:
            process = self._idle_one() or _PlannerProcess()
            self._busy.add(process)
            try:
                ask = partial(process.ask, request)
                answer = await in_daemon_thread(ask, name=f"planner of {pool}")
            except BaseException:
                process.kill()
                raise
            finally:
                self._busy.discard(process)
            # More of them were needed while some took long.
            if len(self._idle) < MAX_AT_ONCE:
                self._idle.append(process)
            else:
                process.kill()
                process.reap()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End them all, plans under way included."""
        processes = (*self._idle, *self._busy)
        for process in processes:
            process.kill()
        for process in processes:
            process.reap()
        self._idle.clear()

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
            # -P: nothing is imported from the folder where the balancer was started.
            command = [sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in a terminal is for the balancer, which ends this one.
            )
        self._connection = Connection(ours.detach())
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked, as far as the system knows."""
        return self._process.poll() is None

    def until_ready(self) -> None:
        """Wait until it can plan at once. Blocks.

        Raises:
            PlannerDiedError: it ended.
        """
        try:
            self._is_ready = self._is_ready or self._connection.recv() == READY
        except (EOFError, OSError):
            raise self._died() from None

    def ask(self, request: ProposalRequest) -> Proposal | Exception:
        """Have a proposal made, or hear why not. Blocks.

        Raises:
            PlannerDiedError: it ended.
        """
        self.until_ready()
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, Exception):
            return answer
        plan, verdict, waves = answer
        return Proposal(request=request, plan=plan, verdict=verdict, waves=waves)

    def kill(self) -> None:
        """End it, whatever it does; whoever waits for its answer hears of that."""
        self._process.kill()

    def reap(self) -> None:
        """Leave nothing of one that ends."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_TIMEOUT_S)

    def _died(self) -> PlannerDiedError:
        self.reap()
        return PlannerDiedError(
            f"process {self._process.pid}, which planned, ended with status "
            f"{self._process.returncode}: see its last words in the log, and whether the balancer "
            "has memory enough; the next window tries again"
        )
