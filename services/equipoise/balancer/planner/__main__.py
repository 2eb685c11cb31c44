"""The program that a planner's process runs: reads requests from a socket, answers with proposals.

    python -m equipoise.balancer.planner FD

Requests come with a number, which their answers have too, and some before they can be begun. One
that came again without anything in it is not wanted any more. What cannot be read ends the process,
with a word in the log.
"""

import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from equipoise.balancer.planner.frames import frame, read_frame
from equipoise.balancer.planner.process import READY
from equipoise.planning.proposal import ProposalRequest, propose
from equipoise.planning.warm_up import warm_up

NICENESS = 5
"""Workers are heard before plans are made."""

OOM_SCORE = "500"
"""If memory runs out, half of it taken by this process makes it the first to go."""


def main() -> None:
    """Answer until the balancer that asks is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # The balancer says when it ends.
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    requests, answers = Requests(), SimpleQueue[bytes]()
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as file:
        for work in (lambda: _read(file, requests), lambda: _write(connection, answers)):
            threading.Thread(target=work, daemon=True).start()
        warm_up()
        answers.put(frame((READY, None)))
        while True:
            number, request = requests.next()
            answers.put(frame((number, _answer(request))))


class Requests:
    """Requests that wait, in order, without those that were withdrawn. For two threads."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[int, ProposalRequest]] = SimpleQueue()
        self._withdrawn: set[int] = set()
        self._begun = 0

    def take(self, number: int, request: ProposalRequest | None) -> None:
        """One that came, or None if that number is not wanted any more."""
        if request is not None:
            self._waiting.put((number, request))
        elif number > self._begun:  # Else it is too late.
            self._withdrawn.add(number)

    def next(self) -> tuple[int, ProposalRequest]:
        """Wait for the next one."""
        while True:
            self._begun, request = self._waiting.get()
            if self._begun not in self._withdrawn:
                return self._begun, request
            self._withdrawn.discard(self._begun)


def _read(file: BinaryIO, requests: Requests) -> None:
    """Hear the balancer's end too, in the midst of a plan that nobody waits for any more."""
    while True:
        try:
            requests.take(*read_frame(file))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)


def _write(connection: socket.socket, answers: "SimpleQueue[bytes]") -> None:
    """Answers leave while the next plan is made; that the balancer is gone its reader hears."""
    with suppress(OSError):
        while True:
            connection.sendall(answers.get())


def _answer(request: ProposalRequest) -> object:
    try:
        made = propose(request)
    except Exception as error:  # noqa: BLE001 - it is raised where the plan was asked for
        return _portable(error)
    return made.plan, made.verdict, made.waves


def _portable(error: Exception) -> Exception:
    """The same, with where it was raised, or its words if it cannot be sent."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001
        words = RuntimeError(repr(error))
        words.__notes__ = error.__notes__
        return words
    return error


if __name__ == "__main__":
    main()
