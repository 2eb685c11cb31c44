"""The program that a planner's process runs: reads requests from a socket, answers with proposals.

    python -m equipoise.balancer.planner FD

Both sides are of one release and on one machine, so that they speak in pickles.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from equipoise.balancer.planner.proposal import ProposalRequest, propose

NICENESS = 5
"""Workers are heard before plans are made."""


def main() -> None:
    """Answer until the balancer that asks is gone."""
    # Ctrl-C in a terminal reaches the whole group: the balancer says when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    connection = Connection(int(sys.argv[1]))
    requests: SimpleQueue[ProposalRequest] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            made = propose(request)
        except Exception as error:  # noqa: BLE001 - it is raised where the plan was asked for
            connection.send(error)
        else:
            connection.send((made.plan, made.verdict, made.waves))


def _read(connection: Connection, requests: "SimpleQueue[ProposalRequest]") -> None:
    """Hear the balancer's end too, in the midst of a plan that nobody waits for any more."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    main()
