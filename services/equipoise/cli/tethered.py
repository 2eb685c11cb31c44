"""`tethered`: a process that ends when its parent ends, however that ends. Linux only.

Run as a script, `python tethered.py PARENT_PID COMMAND...`, before the real program: the tie is
made by the kernel (`PR_SET_PDEATHSIG` of prctl(2), which outlives exec), so that it holds when the
parent is killed with SIGKILL and can do nothing for its children any more. Imports nothing of
ours: it must cost no more than the start of an interpreter.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """The command, led by this script, which ties it to this process.

    A process is let go with the thread that starts it: start it from one that stays.
    """
    return [sys.executable, "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Replace this process by the command, tied to the parent named by its process id."""
    parent, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        # The parent ended before the tie was made, so no signal will come.
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
