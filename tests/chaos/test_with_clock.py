"""A process whose clock can be set otherwise runs unchanged."""

import subprocess
import sys

import pytest

from tests.support.chaos import with_clock
from tests.support.chaos.__main__ import clock_library

PROGRAM = """
import sys, threading, time
turns, done = 0, threading.Event()
def work():
    global turns
    while not done.is_set():
        turns += 1
thread = threading.Thread(target=work)
thread.start()
began_s = time.monotonic()
while time.monotonic() < began_s + 0.5:
    pass
done.set()
thread.join()
print(time.time(), turns)
"""


@pytest.fixture
def run(tmp_path):
    library = clock_library()
    if library is None:
        pytest.skip("no libfaketime here: apt-get install faketime")

    def run_at(offset):
        file = tmp_path / "clock"
        file.write_text(offset)
        command = [sys.executable, with_clock.__file__, str(library), str(file), "-c", PROGRAM]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        time_s, turns = printed.stdout.split()
        return float(time_s), int(turns)

    return run_at


def test_an_hour_is_added_to_the_wall_clock_only(run):
    now_s, _ = run("+0")
    later_s, _ = run("+3600")
    assert 3600 <= later_s - now_s < 3600 + 60


def test_two_busy_threads_share_the_interpreter(run):
    # When waits for the global lock end at once, the other thread makes some thousand turns.
    _, turns = run("+0")
    assert turns > 10_000
