"""Workers whose checkpoints take long to read, in a process of its own: the seams stay."""

import json
from dataclasses import replace

from tests.simulation.fleet import places_of
from tests.simulation.schedule import Schedule
from tests.simulation.seams import Seams
from tests.support.apart import found_apart


def test_a_restarted_worker_that_loads_for_longer_than_others_wait_serves_in_the_end():
    assert found_apart("tests.simulation.test_slow_checkpoints") == ""


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


if __name__ == "__main__":
    print(json.dumps(restart()))
