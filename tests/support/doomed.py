"""Runs `equipoise`, and kills it with SIGKILL when a rollout reaches the state that a file names.

`python doomed.py FILE ARGUMENTS...`: while FILE is empty or missing nothing changes. With
"aborted" a rank's Staged is handled as a rejection, because nothing else aborts on demand. An event
may follow the state: with "staged RankSwitched" it dies at the first rank's report of the switch.
"""

import os
import signal
import sys
from pathlib import Path

from equipoise.cli.main import main
from equipoise.planning.rollout import RankRejected, RankStaged, State, Wave

_ON_ENTERING = {State.ABORTED, State.SWITCHED, State.ACTIVE}
"""States on whose entry it dies, before their commands; in the others it dies at the next event."""


def doom(file: Path) -> None:
    """Make the rollout table read the file at every event."""
    step = Wave.step

    def doomed_step(wave, event, *, now):
        state, _, wanted = (file.read_text() if file.exists() else "").partition(" ")
        if state == State.ABORTED and isinstance(event, RankStaged):
            event = RankRejected(rank=event.rank, generation=event.generation, reason="doomed")
        after, commands = step(wave, event, now=now)
        looked_at = after if state in _ON_ENTERING else wave
        is_new = after is not wave or state not in _ON_ENTERING
        if looked_at.state == state and is_new and wanted in {"", type(event).__name__}:
            os.kill(os.getpid(), signal.SIGKILL)
        return after, commands

    Wave.step = doomed_step


if __name__ == "__main__":
    doom(Path(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    main()
