"""`make soak`: one fleet of real processes under faults for a long time: does anything grow?

All processes but one worker live through the whole soak, while links, stores, transfers and peers
fail around them. After every run of faults the invariants are checked as `make chaos` does, and
what each process holds is sampled. Growth is judged between the second and the last quarter, when
caches are full.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import redis
from rich.console import Console
from rich.table import Table

from equipoise.planning.warm_up import warm_up
from tests.support.chaos.arena import WORKERS, Arena
from tests.support.chaos.campaign import perform, undisturbed_answers
from tests.support.chaos.plan import NUM_WORKERS, Ground, Kind, Run, plan_run

MORTAL = NUM_WORKERS - 1
"""The worker that is killed; the others see its end and its return."""

_MORTAL_KINDS = {Kind.WORKER_KILLED, Kind.WORKER_STOPPED}
_ENDING_KINDS = frozenset({Kind.BALANCER_KILLED, Kind.FOLLOWER_KILLED, Kind.CLOCK_JUMPS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process or the store holds at a moment."""

    name: str
    """A process of the fleet, or `redis`."""
    pid: int
    at_s: float
    """Seconds since the soak began."""
    resident_mib: float
    descriptors: int
    threads: int
    children: int


_MAY_GROW = {"resident_mib": 16.0, "descriptors": 8, "threads": 4, "children": 1}
"""How much the median may differ between the second and the last quarter of the soak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One figure of one process: at the start, and as the median of two quarters."""

    name: str
    figure: str
    first: float
    second_quarter: float
    last_quarter: float

    @property
    def grew(self) -> bool:
        """Whether it grew more than it may, and by more than a tenth."""
        more = self.last_quarter - self.second_quarter
        return more > _MAY_GROW[self.figure] and more > 0.1 * self.second_quarter


def growths(samples: Sequence[Sample]) -> Iterator[Growth]:
    """Judge the processes that lived through the whole soak, from samples in their order.

    Raises:
        ValueError: a process has fewer than eight samples.
    """
    for name in dict.fromkeys(one.name for one in samples):
        own = [one for one in samples if one.name == name]
        if own[0].pid != own[-1].pid:
            continue
        if len(own) < 8:
            raise ValueError(f"{len(own)} samples of {name} are too few to judge: soak for longer")
        quarter = len(own) // 4
        for figure in _MAY_GROW:
            values = [getattr(one, figure) for one in own]
            yield Growth(
                name=name,
                figure=figure,
                first=values[0],
                second_quarter=statistics.median(values[quarter : 2 * quarter]),
                last_quarter=statistics.median(values[-quarter:]),
            )


def run_of(seed: int) -> Run:
    """Plan a run whose faults kill at most the mortal worker."""
    run = plan_run(seed, ground=Ground.REDIS, without=_ENDING_KINDS)
    faults = tuple(
        replace(fault, victim=MORTAL) if fault.kind in _MORTAL_KINDS else fault
        for fault in run.faults
    )
    return replace(run, faults=faults)


def main() -> int:
    """Soak for the given time; 1 if anything was violated or grew."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run of faults")
    parser.add_argument("--json", type=Path, help="file for samples and totals, as they come")
    options = parser.parse_args()
    return asyncio.run(_soak(options, Console()))


async def _soak(options: argparse.Namespace, console: Console) -> int:
    folder = Path(tempfile.mkdtemp(prefix="equipoise-soak-"))
    console.print(f"the processes' logs: {folder}")
    await asyncio.to_thread(warm_up)
    answers = await asyncio.to_thread(undisturbed_answers)
    samples: list[Sample] = []
    totals = {"runs": 0, "faults": 0, "answers": 0, "rejected": 0, "violated": 0}
    async with Arena(folder, ground=Ground.REDIS, answers=answers) as arena:
        began_s = time.monotonic()
        while (elapsed_s := time.monotonic() - began_s) < options.hours * 3600:
            result = await perform(arena, run_of(options.seed + totals["runs"]))
            totals["runs"] += 1
            totals["faults"] += len(result.run.faults)
            totals["answers"] += result.num_answers
            totals["rejected"] += result.num_rejected
            totals["violated"] += bool(result.violations)
            for violation in result.violations:
                console.print(f"{violation.what}: {violation.message}", style="red", markup=False)
            samples += _sample(arena, at_s=time.monotonic() - began_s)
            kinds = ", ".join(fault.kind for fault in result.run.faults)
            console.print(f"{elapsed_s / 60:5.1f} min, run {totals['runs']}: {kinds}")
            if options.json:
                record = {"totals": totals, "samples": [asdict(one) for one in samples]}
                options.json.write_text(json.dumps(record))
        statuses = await arena.statuses()
    console.print(totals)
    for status in statuses:
        console.print(f"epoch {status.epoch}, generation {status.generation}")
    try:
        judged = list(growths(samples))
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(_table(judged))
    return int(any(one.grew for one in judged) or totals["violated"] > 0)


def _sample(arena: Arena, *, at_s: float) -> Iterator[Sample]:
    for name in (*arena.balancers, *WORKERS, "gateway"):
        process = psutil.Process(arena.fleet.pid(name))
        with process.oneshot():
            yield Sample(
                name=name,
                pid=process.pid,
                at_s=at_s,
                resident_mib=process.memory_info().rss / 2**20,
                descriptors=process.num_fds(),
                threads=process.num_threads(),
                children=len(process.children(recursive=True)),
            )
    if arena.redis is not None:
        with redis.Redis.from_url(arena.redis.url) as store:
            held = store.info("memory")
            yield Sample(
                name="redis",
                pid=0,
                at_s=at_s,
                resident_mib=held["used_memory"] / 2**20,
                descriptors=store.info("clients")["connected_clients"],
                threads=0,
                children=store.dbsize(),
            )


def _table(judged: Sequence[Growth]) -> Table:
    table = Table(title="growth between the second and the last quarter")
    for heading in ("process", "figure"):
        table.add_column(heading)
    for heading in ("first", "second quarter", "last quarter", "flat"):
        table.add_column(heading, justify="right")
    for one in judged:
        values = (f"{value:.1f}" for value in (one.first, one.second_quarter, one.last_quarter))
        table.add_row(one.name, one.figure, *values, "[red]no[/red]" if one.grew else "yes")
    return table


if __name__ == "__main__":
    sys.exit(main())
