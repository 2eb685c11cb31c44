"""The short form of `make simulate`: schedules hold, replay exactly, and notice planted faults."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.plants import PLANTS
from tests.simulation.schedule import MAKERS, USUAL, make_schedule
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]


def simulate(*args):
    """Run the command; its processes are its own, because it replaces parts of the product."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--jobs", "1", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def digests_of(done):
    return dict(re.findall(r"^seed (\d+): ([0-9a-f]{16})$", done.stdout, re.MULTILINE))


def test_every_invariant_holds_in_some_schedules_which_replay_to_the_last_event():
    done = simulate("--schedules", "40", "--digests")
    assert done.returncode == 0, done.stdout + done.stderr
    totals = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", done.stdout)}
    assert min(totals["plans"], totals["switches"], totals["epochs"]) > 40
    again = digests_of(simulate("--first", "30", "--schedules", "5", "--digests"))
    first = digests_of(done)
    assert len(first) == 40
    assert again == {seed: first[seed] for seed in map(str, range(30, 35))}


def test_a_soak_survives_deaths_of_workers():
    done = simulate("--soak", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = [
        int(line.split()[0]) for line in done.stdout.splitlines() if line[:7].strip().isdigit()
    ]
    assert epochs[-1] >= 5


def test_a_planted_fault_is_found_shrunk_and_reported_with_the_command_that_replays_it():
    done = simulate("--plant", "digests-ignored", "--kinds", "wrong_layout,stop_worker,shift")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION layouts-differ-in-a-step" in done.stdout
    command = re.search(r'ARGS="--seed (\d+) --keep ([\d,]+) --plant digests-ignored', done.stdout)
    assert command is not None, done.stdout
    assert len(command[2].split(",")) <= 3


@pytest.mark.parametrize("name", PLANTS)
def test_what_a_plant_replaces_is_there(name):
    for target, attribute, value in PLANTS[name].patches():
        assert getattr(target, attribute) != value


def test_a_schedule_is_a_function_of_its_seed():
    assert make_schedule(7) == make_schedule(7)
    assert make_schedule(7) != make_schedule(8)
    assert {action.kind for seed in range(300) for action in make_schedule(seed).actions} == set(
        USUAL
    )


def test_every_kind_of_fault_can_happen():
    assert {f"do_{kind}" for kind in MAKERS} == {name for name in dir(World) if name[:3] == "do_"}
