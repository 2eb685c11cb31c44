"""Plays many schedules in parallel, shrinks those that fail, and tells them as short stories.

Schedules are played in batches, each in a forked process of its own that ends without cleaning up:
that costs less than freeing what dead processes leave, and a leak in one batch cannot reach the
next.
"""

import gc
import hashlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from tests.simulation.plants import planted
from tests.simulation.schedule import USUAL, Schedule, make_schedule
from tests.simulation.seams import Seams

BATCH = 20
MAX_REPLAYS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How one schedule went."""

    schedule: Schedule
    kinds: tuple[str, ...]
    effects: tuple[str, ...]
    """Those of `kinds` that took effect."""
    violation: str
    """Empty if every invariant held."""
    text: str
    events: int
    virtual_s: float
    cpu_s: float
    counts: tuple[int, int, int, int]
    """Steps, plans, switches, epochs."""
    digest: str
    """Of the story and the number of events: the same for every play."""
    story: tuple[str, ...]


def play(seams: Seams, schedule: Schedule) -> Played:
    """Play one schedule."""
    began_s = time.process_time()
    world = seams.play(schedule)
    observer = world.observer
    story = tuple(f"{at_s:8.3f} s  {text}" for at_s, text in observer.log)
    violation = observer.violation
    text = "\n".join((*story, str(world.loop.num_events), str(observer.num_steps)))
    return Played(
        schedule=schedule,
        kinds=tuple(sorted(world.kinds)),
        effects=tuple(sorted(world.kinds & world.effects)),
        violation=violation.kind if violation is not None else "",
        text=str(violation or ""),
        events=world.loop.num_events,
        virtual_s=world.elapsed_s,
        cpu_s=time.process_time() - began_s,
        counts=(observer.num_steps, observer.num_plans, observer.num_switches, observer.num_epochs),
        digest=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        story=story if violation is not None else (),
    )


@dataclass(slots=True)
class Campaign:
    """Totals of many schedules."""

    schedules: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    plans: int = 0
    switches: int = 0
    epochs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Schedules with each kind of fault."""
    effects: Counter[str] = field(default_factory=Counter)
    """Those of them in which it took effect."""
    failed_kinds: Counter[str] = field(default_factory=Counter)
    """Those of them that broke an invariant."""
    failures: dict[str, list[Played]] = field(default_factory=dict)

    def add(self, played: Played) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.events += played.events
        self.virtual_s += played.virtual_s
        self.cpu_s += played.cpu_s
        steps, plans, switches, epochs = played.counts
        self.steps, self.plans = self.steps + steps, self.plans + plans
        self.switches, self.epochs = self.switches + switches, self.epochs + epochs
        self.kinds.update(played.kinds)
        self.effects.update(played.effects)
        if played.violation:
            self.failed_kinds.update(played.kinds)
            self.failures.setdefault(played.violation, []).append(played)


def play_all(
    seeds: Iterable[int],
    *,
    jobs: int,
    plant: str = "",
    kinds: tuple[str, ...] = USUAL,
    batch: int = BATCH,
) -> Iterator[Played]:
    """Play the schedules of some seeds, in their order, `batch` in each process."""
    warm_up()
    batches = ((some, plant, kinds) for some in _batched(seeds, batch))
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for results in pool.imap(_play_batch, batches):
            yield from results


def warm_up() -> None:
    """Play one schedule, so that forked processes have compiled and imported everything."""
    seams = Seams()
    play(seams, make_schedule(0))
    seams.clean_up()
    gc.freeze()


def shrink(schedule: Schedule, violation: str, *, plant: str = "") -> Played:
    """Return the smallest schedule found that breaks the same invariant, as it was played."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(_shrink, (schedule, violation, plant))


def replay(schedule: Schedule, *, plant: str = "") -> Played:
    """Play one schedule in a process of its own."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(_replay, (schedule, plant))


def command(played: Played, *, plant: str = "", kinds: str = "") -> str:
    """The shell command that plays a schedule again, which was made of `kinds`."""
    kept = ",".join(map(str, played.schedule.kept)) or "none"
    planted_with = f" --plant {plant}" if plant else ""
    made_of = f" --kinds={kinds}" if kinds else ""
    return (
        f'make simulate ARGS="--seed {played.schedule.seed} --keep {kept}{planted_with}{made_of}"'
    )


def chosen(seed: int, keep: str | None, kinds: tuple[str, ...] = USUAL) -> Schedule:
    """The schedule of a seed, or the part of it that `keep` names."""
    schedule = make_schedule(seed, kinds)
    if keep is None:
        return schedule
    places = () if keep == "none" else tuple(int(place) for place in keep.split(","))
    return schedule.keeping(places, of=schedule)


def _batched(seeds: Iterable[int], size: int) -> Iterator[list[int]]:
    rest = iter(seeds)
    while batch := list(islice(rest, size)):
        yield batch


def _play_batch(task: tuple[list[int], str, tuple[str, ...]]) -> list[Played]:
    seeds, plant, kinds = task
    seams = Seams()
    with planted(plant):
        return [play(seams, make_schedule(seed, kinds)) for seed in seeds]


def _replay(schedule: Schedule, plant: str) -> Played:
    seams = Seams()
    with planted(plant):
        return play(seams, schedule)


def _shrink(schedule: Schedule, violation: str, plant: str) -> Played:
    seams = Seams()
    with planted(plant):
        best = play(seams, schedule)
        replays, size = 0, max(1, len(schedule.kept) // 2)
        while replays < MAX_REPLAYS:
            smaller = None
            kept = best.schedule.kept
            for start in range(0, len(kept), size):
                attempt = best.schedule.keeping(
                    kept[:start] + kept[start + size :], of=best.schedule
                )
                replays += 1
                played = play(seams, attempt)
                seams.clean_up()
                if played.violation == violation:
                    smaller = played
                    break
            if smaller is not None:
                best, size = smaller, max(1, min(size, len(smaller.schedule.kept) // 2))
            elif size > 1:
                size = max(1, size // 2)
            else:
                break
        return best
