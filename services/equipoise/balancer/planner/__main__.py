"""The planning process: reads requests from a socket and answers with proposals.

    python -m equipoise.balancer.planner FD

An answer carries the number of its request. Requests may arrive before they can start; an empty
request with the same number withdraws one. A frame that cannot be read ends the process.
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
from equipoise.planning.redundancy import judge_redundancy
from equipoise.planning.warm_up import warm_up

NICENESS = 5
"""Makes planning yield the CPU to the balancer, which serves the workers."""

OOM_SCORE = "500"
"""Makes this process the first one killed if memory runs out and it uses half of it."""


def main() -> None:
    """Answer requests until the balancer disconnects."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # The balancer ends this process.
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    requests, answers = RequestQueue(), SimpleQueue[bytes]()
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as file:
        for work in (lambda: _read(file, requests), lambda: _write(connection, answers)):
            threading.Thread(target=work, daemon=True).start()
        warm_up()
        answers.put(frame((READY, None)))
        while True:
            number, request = requests.next()
            answers.put(frame((number, _answer(request))))


class RequestQueue:
    """The queue of requests, without those that were withdrawn. Used by two threads."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[int, ProposalRequest]] = SimpleQueue()
        self._withdrawn: set[int] = set()
        self._begun = 0

    def take(self, number: int, request: ProposalRequest | None) -> None:
        """Add a request; None withdraws the request of that number."""
        if request is not None:
            self._waiting.put((number, request))
        elif number > self._begun:  # Else it has started.
            self._withdrawn.add(number)

    def next(self) -> tuple[int, ProposalRequest]:
        """Wait for the next request."""
        while True:
            self._begun, request = self._waiting.get()
            if self._begun not in self._withdrawn:
                return self._begun, request
            self._withdrawn.discard(self._begun)


def _read(file: BinaryIO, requests: RequestQueue) -> None:
    """Read requests; exit when the balancer disconnects, even during a plan."""
    while True:
        try:
            requests.take(*read_frame(file))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)


def _write(connection: socket.socket, answers: "SimpleQueue[bytes]") -> None:
    """Send answers while the next plan is computed; `_read` notices a disconnect."""
    with suppress(OSError):
        while True:
            connection.sendall(answers.get())


def _answer(request: ProposalRequest) -> object:
    try:
        return _made(request)
    except Exception as error:  # noqa: BLE001 - the balancer raises it for the requester
        return _portable(error)


def _made(request: ProposalRequest) -> object:
    made = propose(request)
    redundancy = judge_redundancy(
        request.average,
        samples=request.samples,
        model=request.model,
        topology=request.topology,
        policy=request.policy,
    )
    return made.plan, made.verdict, made.waves, redundancy


def _portable(error: Exception) -> Exception:
    """Return `error` with its traceback as a note; as a RuntimeError if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
    except Exception:  # noqa: BLE001
        substitute = RuntimeError(repr(error))
        substitute.__notes__ = error.__notes__
        return substitute
    return error


if __name__ == "__main__":
    main()
