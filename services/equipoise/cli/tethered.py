"""`tethered`: start a child process that the kernel kills when its parent ends. Linux only.

This file runs as a script, `python tethered.py PARENT_PID COMMAND...`, and then becomes the
command: `PR_SET_PDEATHSIG` of prctl(2) survives exec, and works even if the parent is killed with
SIGKILL. It imports nothing of this package, so that it starts as fast as the interpreter.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """The command, wrapped so that it ends with this process.

    The kernel ties it to the thread that starts it: use one that lives as long as the process.
    """
    return [sys.executable, "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Replace this process by the command, tied to the parent with the given process id."""
    parent, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        # The parent ended before prctl, so no signal will come.
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
