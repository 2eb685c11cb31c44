"""Workers whose checkpoints take long to read, in a process of its own: the seams stay."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.fleet import places_of
from tests.simulation.schedule import Schedule
from tests.simulation.seams import Seams

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def played():
    """What each function of `PLAYS` found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.test_slow_checkpoints"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path)))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_restarted_worker_that_loads_for_longer_than_others_wait_serves_in_the_end(played):
    assert played["restart"] == ""


def restart():
    """Why a pool that needs both its ranks does not serve a minute after one restarts."""
    world = begun(num_workers=2, meet_timeout_s=3.0, reform_timeout_s=1.0)
    # Twice that for the two layers, each of which is read at once: longer than w0 waits.
    world.disks["w1"].read_s = 2.5
    world.do_kill_worker("w1", 1.0)
    world.loop.run_until(world.loop.time() + 60.0)
    return world.unsettled()


def begun(*, num_workers, **policy):
    """A fleet that serves, whose layers do not share places."""
    seed = next(seed for seed in range(100) if not places_of(seed, "w0"))
    world = Seams().open(Schedule(seed, num_workers, ()))
    world.policy = replace(world.policy, **policy)
    world.begin()
    assert not world.unsettled()
    return world


PLAYS = (restart,)


if __name__ == "__main__":
    print(json.dumps({play.__name__: play() for play in PLAYS}))
