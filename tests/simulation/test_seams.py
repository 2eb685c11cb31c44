"""Every seam still replaces something of the product that a schedule reaches."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from tests.simulation import seams
from tests.simulation.schedule import Action, Schedule
from tests.support.apart import found_apart

EVENTFUL = Schedule(
    0,
    3,
    (
        Action(3.0, "shift", (3,)),
        Action(8.0, "stop_worker", ("w1", 0.5)),
        Action(12.0, "kill_worker", ("w2", 0.5)),
        Action(15.0, "unreachable_rank", ("w0", 0.5)),
    ),
)


CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time", "time_ns")


def place_of(target, name):
    return f"{getattr(target, '__module__', '')} {target.__name__}.{name}".strip()


PLACES = [place_of(target, name) for target, name, _value in seams._REPLACED]


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, name, _ in seams._REPLACED], ids=PLACES
)
def test_a_replaced_name_is_there(target, name):
    assert name in vars(target)


def test_a_short_schedule_reaches_every_replaced_name():
    # In a process of its own, because the seams stay until it ends.
    violation, reached, clocks = found_apart("tests.simulation.test_seams")
    assert violation == ""
    assert reached == sorted(PLACES)
    assert clocks == [], "the machine's clocks are not those of the schedule"


def reach():
    """Play a schedule.

    Returns what it violated, the replaced names that were used, and which of the machine's clocks
    the product read.
    """
    reached, clocks = set(), set()
    for name in CLOCKS:
        setattr(time, name, noting_clock(getattr(time, name), clocks))
    seams._REPLACED[:] = [
        (target, name, noting(value, place_of(target, name), reached))
        for target, name, value in seams._REPLACED
    ]
    world = seams.Seams().play(EVENTFUL)
    return str(world.observer.violation or ""), sorted(reached), sorted(clocks)


def noting_clock(clock, clocks):
    """A clock of the machine that notes which modules of the product read it."""

    def read():
        module = sys._getframe(1).f_globals.get("__name__", "")
        if module.startswith("equipoise"):
            clocks.add(f"{module}: {clock.__name__}")
        return clock()

    return read


def noting(value, place, reached):
    """What stands in for a replacement, and notes that it is used."""
    if isinstance(value, SimpleNamespace):
        return NotingNamespace(value, place, reached)
    if isinstance(value, float):
        return NotingFloat(value, place, reached)

    def noted(*args, **about):
        reached.add(place)
        return value(*args, **about)

    return noted


class NotingNamespace:
    def __init__(self, value, place, reached):
        self._value, self._place, self._reached = value, place, reached

    def __getattr__(self, name):
        self._reached.add(self._place)
        return getattr(self._value, name)


class NotingFloat(float):
    def __new__(cls, value, _place, _reached):
        return super().__new__(cls, value)

    def __init__(self, _value, place, reached):
        self._place, self._reached = place, reached

    def __radd__(self, other):
        self._reached.add(self._place)
        return float(other) + float(self)


if __name__ == "__main__":
    print(json.dumps(reach()))
