"""`soak`: one fleet for a long simulated time: does anything grow that should not?

Workers die and return, leaders die, traffic shifts and operators have it rebalanced, for thousands
of epochs, rollouts and terms.
"""

import asyncio
import gc
import resource
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.schedule import Schedule
from tests.simulation.seams import Seams

ROUND_S = 5.0
WORKER_DIES_EVERY, LEADER_DIES_EVERY = 2, 10
"""Rounds."""

KINDS = frozenset({"shift", "kill_worker", "kill_leader", "operator"})
"""Kinds of faults that happen."""

_MAY_GROW_BY = {"resident_mib": 0.05, "objects": 0.1, "tasks": 0.1}
"""Share by which the median may grow between the second and the last quarter of a soak."""

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What happened so far, and what is in memory."""

    epochs: int
    switches: int
    terms: int
    virtual_s: float
    resident_mib: float
    objects: int
    """Python objects that the garbage collector knows, without those from before the start."""
    tasks: int
    """Unfinished tasks, also of dead processes until they are collected."""
    violation: str


def soak(seams: Seams, *, epochs: int, switches: int, terms: int, every: int) -> Iterator[Soaked]:
    """Run until so many epochs, switches and terms have passed; yields totals every few rounds."""
    world = seams.open(Schedule(0, 4, ()))
    observer = world.observer
    world.begin()
    world.kinds.update(KINDS)
    rounds = 0
    while True:
        rounds += 1
        world.do_shift(rounds % 7)
        if rounds % WORKER_DIES_EVERY == 0:
            world.do_kill_worker(f"w{rounds // WORKER_DIES_EVERY % 4}", 0.3)
        if rounds % LEADER_DIES_EVERY == 0:
            world.do_kill_leader(0.3)
        world.loop.run_until(world.loop.time() + ROUND_S)
        world.operators.ask("TriggerRebalance")
        enough = (
            observer.num_epochs >= epochs
            and observer.num_switches >= switches
            and observer.num_terms >= terms
        )
        if rounds % every == 0 or enough or observer.violation is not None:
            observer.log.clear()
            world.operators.forget_answered()
            gc.collect()
            objects, tasks = _counted()
            yield Soaked(
                epochs=observer.num_epochs,
                switches=observer.num_switches,
                terms=observer.num_terms,
                virtual_s=world.elapsed_s,
                resident_mib=_resident_mib(),
                objects=objects,
                tasks=tasks,
                violation=str(observer.violation or ""),
            )
        if enough or observer.violation is not None:
            return


def grown(samples: Sequence[Soaked]) -> str:
    """What grew although caches and histories were full after a quarter; empty if nothing did.

    Fewer than 40 samples are too few to judge.
    """
    if len(samples) < 40:
        return ""
    quarter, found = len(samples) // 4, []
    for figure, may_grow_by in _MAY_GROW_BY.items():
        values = [getattr(one, figure) for one in samples]
        before = statistics.median(values[quarter : 2 * quarter])
        after = statistics.median(values[-quarter:])
        if after > before * (1 + may_grow_by):
            found.append(f"{figure} grew from {before:g} to {after:g}")
    return "; ".join(found)


def _counted() -> tuple[int, int]:
    """Return how many objects and unfinished tasks there are. The list of them is not kept."""
    found = gc.get_objects()
    return len(found), sum(isinstance(one, asyncio.Task) and not one.done() for one in found)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * _PAGE_BYTES / 2**20
