"""The program that a planner's process runs: reads requests from a socket, answers with proposals.

    python -m equipoise.balancer.planner FD

Both sides are on one machine and of one release, unless somebody upgrades below a balancer that
runs, so that they speak in pickles. What cannot be read ends the process, with a word in the log.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from equipoise.balancer.planner.processes import READY
from equipoise.balancer.planner.proposal import ProposalRequest, propose
from equipoise.planning.warm_up import warm_up

NICENESS = 5
"""Workers are heard before plans are made."""

OOM_SCORE = "500"
"""If memory runs out, half of it taken by this process makes it the first to go."""


def main() -> None:
    """Answer until the balancer that asks is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The balancer says when it ends.
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    connection = Connection(int(sys.argv[1]))
    requests: SimpleQueue[ProposalRequest] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    warm_up()
    connection.send(READY)
    while True:
        request = requests.get()
        try:
            made = propose(request)
        except Exception as error:  # noqa: BLE001 - it is raised where the plan was asked for
            connection.send(_portable(error))
        else:
            connection.send((made.plan, made.verdict, made.waves))


def _read(connection: Connection, requests: "SimpleQueue[ProposalRequest]") -> None:
    """Hear the balancer's end too, in the midst of a plan that nobody waits for any more."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)


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
