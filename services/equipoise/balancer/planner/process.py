"""`PlannerProcess`: one process that plans, its connection, and its queued plans."""

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from equipoise.balancer.planner.frames import frame, receive_frame
from equipoise.balancer.planner.planning import PlannerDiedError
from equipoise.balancer.planner.turns import TURN_S
from equipoise.planning.proposal import Proposal, ProposalRequest

PROGRAM = "equipoise.balancer.planner"

READY = 0
"""Sent instead of a number: the process has compiled, or loaded, all that plans need."""

END_TIMEOUT_S = 1.0
"""A killed process ends at once, unless the system is in trouble."""

_BUFFER_BYTES = 2**20

_log = logging.getLogger(__name__)


def execute(connection: int) -> "subprocess.Popen[bytes]":
    """Start a process that plans for the other end of `connection`, a file descriptor.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        # -P: nothing is imported from the folder where the balancer was started.
        [sys.executable, "-P", "-m", PROGRAM, str(connection)],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection],
        process_group=0,  # Ctrl-C in a terminal is for the balancer, which ends this one.
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningJob:
    """A requested plan; `begins` is called when a process starts it."""

    request: ProposalRequest
    begins: Callable[[], None]
    answer: "asyncio.Future[Proposal]"


class PlannerProcess:
    """Makes the plans it is asked for, one after the other, from the first of `jobs` on.

    `changed` is called when it has answered, has ended, or is longer than a turn at a plan. Used
    from one event loop.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, *, changed: Callable[["PlannerProcess"], None]) -> None:
        self.jobs: deque[PlanningJob] = deque()
        # Of each asking, because one that was withdrawn may be asked for here once more.
        self._numbers = itertools.count(READY + 1)
        self._number_of: dict[PlanningJob, int] = {}
        self.in_turn = False
        """Whether it plans, and not for longer than a turn."""
        self.is_ending = self.ended = False
        self.ready = asyncio.Event()
        self._changed = changed
        self._turn_ends: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as opened:
            opened.push(ours)
            self._process = execute(theirs.fileno())
            opened.pop_all()
        self._early: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._talking = asyncio.create_task(self._talk(ours), name=f"planner {self.pid}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, job: PlanningJob) -> None:
        """Queue a plan."""
        number = self._number_of[job] = next(self._numbers)
        self.jobs.append(job)
        self._send(number, job.request)
        if len(self.jobs) == 1:
            self._begin()

    def withdraw(self, job: PlanningJob) -> None:
        """Remove a plan that has not started."""
        self.jobs.remove(job)
        self._send(self._number_of.pop(job), None)

    def withdraw_waiting(self) -> list[PlanningJob]:
        """Remove all plans that have not started; returns them."""
        waiting = list(self.jobs)[1:]
        for job in waiting:
            self.withdraw(job)
        return waiting

    def kill(self) -> None:
        """Kill it; its end is handled like any other."""
        self.is_ending = True
        self._process.kill()

    async def gone(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        with suppress(asyncio.CancelledError):
            await self._talking

    def died(self) -> PlannerDiedError:
        """The error for the plan that it was making when it ended."""
        return PlannerDiedError(
            f"planning process {self.pid} exited with status {self._process.returncode}: see its "
            "messages in the log, and whether the balancer has enough memory; the next window "
            "tries again"
        )

    def _begin(self) -> None:
        """The first of `jobs` is what it makes now, or as soon as it is ready."""
        loop = asyncio.get_running_loop()
        self.in_turn = True
        self._turn_ends = loop.call_later(TURN_S, self._turn_over)
        if self.ready.is_set():
            self._tell_begin()

    def _tell_begin(self) -> None:
        # The caller may have cancelled in the meantime.
        if not self.jobs[0].answer.done():
            self.jobs[0].begins()

    def _turn_over(self) -> None:
        self.in_turn = False
        self._changed(self)

    def _send(self, number: int, request: ProposalRequest | None) -> None:
        data = frame((number, request))
        if self._writer is None:
            self._early.append(data)
        else:
            self._writer.write(data)

    async def _talk(self, connection: socket.socket) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(
                sock=connection, limit=_BUFFER_BYTES
            )
            self._writer.writelines(self._early)
            while True:
                self._hear(*await receive_frame(reader))
        except (asyncio.IncompleteReadError, OSError):
            pass  # The process has ended.
        except Exception:  # noqa: BLE001 - another process takes over
            _log.exception("undecodable message from planning process %d", self.pid)
        finally:
            self._end()

    def _hear(self, number: int, answer: Any) -> None:
        if number == READY:
            self.ready.set()
            if self.jobs:
                self._tell_begin()
        elif self.jobs and self._number_of[self.jobs[0]] == number:
            job = self.jobs.popleft()
            del self._number_of[job]
            self._settle(job, answer)
            self._end_turn()
            if self.jobs and not self.is_ending:
                self._begin()
            self._changed(self)

    def _settle(self, job: PlanningJob, answer: Any) -> None:
        if job.answer.done():
            return
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            plan, verdict, waves, redundancy = answer
            made = Proposal(
                request=job.request,
                plan=plan,
                verdict=verdict,
                waves=waves,
                redundancy=redundancy,
            )
            job.answer.set_result(made)

    def _end_turn(self) -> None:
        self.in_turn = False
        if self._turn_ends is not None:
            self._turn_ends.cancel()

    def _end(self) -> None:
        """It sends nothing more: make sure that it has ended."""
        self.ended = True
        self._end_turn()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_TIMEOUT_S)
        if self._writer is not None:
            self._writer.close()
        self.ready.set()
        self._changed(self)
