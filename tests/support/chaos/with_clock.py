"""Runs a Python program whose wall clock another process can set.

`python with_clock.py LIBRARY FILE PROGRAM...`: libfaketime reads FILE (for example "+3600") at
every read of the clock. The monotonic clock is unaffected, as when an operator sets the time.
"""

import os
import sys


def main(arguments: list[str]) -> None:
    """Replace this process by the program."""
    library, file, *program = arguments
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": file,
        "FAKETIME_NO_CACHE": "1",
        # Otherwise waits for a condition, of which Python's global lock is made, end at once and
        # two busy threads come to a standstill.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    os.execve(sys.executable, [sys.executable, *program], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
