"""Set up the process that runs the tests, and the processes that it starts."""

import os
import signal

import pytest

# Triton decides at its first import whether it interprets kernels, and tests of other packages
# import it with torch before the kernel tests are collected.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def children_get_default_signals():
    """Start processes with default signal handling, whatever this process inherited.

    `nohup` and a shell's `&` start a process with SIGHUP or SIGINT ignored, and a process passes
    ignored signals on to its children. A handler is not passed on: children get the default, while
    this process still ignores the signal.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
