"""The short form of `make simulate`: schedules hold, replay exactly, and notice planted faults."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.plants import PLANTS
from tests.simulation.schedule import MAKERS, USUAL, make_schedule
from tests.simulation.soak import Soaked, grown
from tests.simulation.world import World
from tests.support.forked_commands import ForkedProcess

ROOT = Path(__file__).parents[2]
BOUND_S = 300.0


@pytest.fixture
def executed(tmp_path):
    """Run the command; its processes are its own, because it replaces parts of the product."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
        "PYTHONHASHSEED": "0",  # Else the command executes itself again, and imports all twice.
    }

    def run(*args):
        with (tmp_path / "executed").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.simulation", "--jobs", "1", *args],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=environment,
            )
            return process.wait(), Path(output.name).read_text()

    return run


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """The same in a process forked from one that has imported everything."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), *filter(None, sys.path))))
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def run(*args):
        with (tmp_path / "forked").open("wb") as output:
            process = ForkedProcess(
                ["-m", "tests.simulation", "--jobs", "1", *args],
                output=output,
                modules=["tests.simulation.__main__"],
            )
            return process.wait(BOUND_S), Path(output.name).read_text()

    return run


def digests_of(output):
    return dict(re.findall(r"^seed (\d+): ([0-9a-f]{16})$", output, re.MULTILINE))


def test_every_invariant_holds_in_some_schedules_which_replay_to_the_last_event(executed, forked):
    status, output = executed("--schedules", "40", "--digests")
    assert status == 0, output
    totals = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", output)}
    assert min(totals["plans"], totals["switches"], totals["epochs"]) > 30
    first = digests_of(output)
    assert len(first) == 40
    # Objects are elsewhere in its memory.
    _, output = forked("--first", "30", "--schedules", "5", "--digests")
    assert digests_of(output) == {seed: first[seed] for seed in map(str, range(30, 35))}


def test_a_soak_survives_deaths_of_workers(forked):
    status, output = forked("--soak", "5")
    assert status == 0, output
    epochs = [int(line.split()[0]) for line in output.splitlines() if line[:7].strip().isdigit()]
    assert epochs[-1] >= 5


def test_a_planted_fault_is_found_shrunk_and_reported_with_the_command_that_replays_it(
    forked,
):
    status, output = forked(
        "--plant", "digests-ignored", "--kinds", "wrong_layout,stop_worker,shift"
    )
    assert status == 1, output
    assert "VIOLATION layouts-differ-in-a-step" in output
    command = re.search(r'ARGS="--seed (\d+) --keep ([\d,]+) --plant digests-ignored', output)
    assert command is not None, output
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


def test_a_soak_reports_what_grows_all_the_time_and_no_warm_up():
    def samples(objects):
        return [
            Soaked(
                epochs=number,
                switches=number,
                terms=number,
                virtual_s=float(number),
                resident_mib=400.0,
                objects=num_objects,
                tasks=9,
                violation="",
            )
            for number, num_objects in enumerate(objects)
        ]

    assert grown(samples(range(1000, 1400, 5))) == "objects grew from 1147.5 to 1347.5"
    assert not grown(samples([*range(1000, 1020), *[1020] * 60]))
    assert not grown(samples(range(10)))
