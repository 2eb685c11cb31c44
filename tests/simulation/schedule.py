"""`Schedule`: what happens to a fleet, and when. A seed makes one; shrinking drops its actions."""

import random
from dataclasses import dataclass
from typing import Any

FAULT_S = 16.0
"""Faults begin within these seconds; the last has ended `MAX_FAULT_S` later."""

MAX_FAULT_S = 7.0

GAP_S = (40.0, 120.0)
"""How long reports are lost: longer than other faults, because their loads add up."""

LONE_GAP_S = (14.0, 20.0)
"""When the first of gaps begins if there are no other faults: not before the pool is balanced."""

LATER_GAPS_S = 60.0
"""Seconds within which the other gaps begin after that."""

GAP_SHARE, LONE_GAP_SHARE = 0.1, 0.01
"""Shares of the schedules with gaps among other faults, of those that could have them, and of
schedules with gaps only. They take several times as long as others."""

BROKEN_S = (5.0, 40.0)
"""How long no group works: longer than other faults, because retries must become seldom."""

RESTART_SHARE = 0.5
"""Share of faults of a disk with which all workers restart: otherwise experts come from peers."""

GAP = "report_gap"

LOSSES = ("emptied first", "emptied")

LIES = ("leap", "shape", "alone", "loses", "phase", "checkpoint", "kernels")

CLOCKS_S = (-1.7e9, -86_400.0, -60.0, 60.0, 86_400.0, 3e8)
"""How wrong a clock may be: as after a start without a battery, or by a minute, a day or years."""

WORKERS = ("w0", "w1", "w2", "w3")
BALANCERS = ("b0", "b1")

OPERATIONS = ("Pause", "Resume", "Pin", "Unpin", "TriggerRebalance", "Rollback")

SECOND_S = 4.0
"""Seconds within which an operator may follow up a request, perhaps before its answer."""

NUM_PATTERNS = 5
"""Kinds of traffic."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens."""

    at_s: float
    """Seconds after the start."""

    kind: str
    """Name of a method `do_...` of the world."""

    args: tuple[Any, ...] = ()
    """Its arguments."""

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(_short, self.args))})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A seed, which also decides every delay, and the actions."""

    seed: int
    num_workers: int
    actions: tuple[Action, ...]
    kept: tuple[int, ...] = ()
    """Places of the actions among those that the seed made."""

    def without(self, place: int) -> "Schedule":
        """The schedule without one of its actions."""
        return self.keeping(self.kept[:place] + self.kept[place + 1 :], of=self)

    def keeping(self, kept: tuple[int, ...], *, of: "Schedule") -> "Schedule":
        """The schedule with some of the actions of `of`."""
        by_place = dict(zip(of.kept, of.actions, strict=True))
        actions = tuple(by_place[place] for place in kept)
        return Schedule(self.seed, self.num_workers, actions, tuple(kept))


def _duration(rng: random.Random) -> float:
    return round(rng.choice((0.3, 1.0, 2.5, 4.0, MAX_FAULT_S)) * rng.uniform(0.5, 1.0), 2)


def _worker(rng: random.Random) -> str:
    return rng.choice(WORKERS)


def _lie(how: str, for_s: float, stays: bool) -> tuple[str, float, bool]:
    # A pool of one that serves keeps out workers that do not fit it.
    return how, for_s, stays and how != "alone"


def _two(rng: random.Random) -> tuple[str, str]:
    everyone = (*WORKERS, *BALANCERS, "store")
    while True:
        one, other = rng.sample(everyone, 2)
        # Workers do not use the store.
        if "store" not in {one, other} or {one, other} & set(BALANCERS):
            return one, other


MAKERS: dict[str, Any] = {
    "kill_worker": lambda r: (_worker(r), _duration(r)),
    "pause_worker": lambda r: (_worker(r), _duration(r)),
    "stop_worker": lambda r: (_worker(r), _duration(r)),
    "kill_balancer": lambda r: (r.choice(BALANCERS), _duration(r)),
    "pause_balancer": lambda r: (r.choice(BALANCERS), _duration(r)),
    "kill_leader": lambda r: (_duration(r),),
    "pause_leader": lambda r: (_duration(r),),
    "suspend_leader": lambda r: (round(r.uniform(4.0, MAX_FAULT_S), 2), _duration(r)),
    "lose_machine": lambda r: (r.choice((*WORKERS, *BALANCERS)), _duration(r)),
    "restart_everything": lambda r: (_duration(r),),
    "cut": lambda r: (*_two(r), _duration(r)),
    "cut_both": lambda r: (*_two(r), _duration(r)),
    "isolate": lambda r: (r.choice((*WORKERS, *BALANCERS)), _duration(r)),
    "reset": _two,
    "slow_network": lambda r: (r.choice((5, 20, 60)), _duration(r)),
    "flaky_network": lambda r: (r.choice((0.02, 0.1, 0.3)), _duration(r)),
    "lossy_network": lambda r: (r.choice((0.02, 0.1, 0.3)), _duration(r)),
    "store_down": lambda r: (_duration(r),),
    "store_hangs": lambda r: (_duration(r),),
    "store_full": lambda r: (_duration(r),),
    "store_forgets": lambda _r: (),
    "store_goes_back": lambda r: (r.randint(1, 6),),
    "disk_hangs": lambda r: (_worker(r), _duration(r), r.random() < RESTART_SHARE),
    "disk_gone": lambda r: (_worker(r), _duration(r), r.random() < RESTART_SHARE),
    "disk_damaged": lambda r: (_worker(r), r.randrange(2), r.randrange(6)),
    "bit_rot": lambda r: (_worker(r), r.randrange(2), r.randrange(3)),
    "corrupt_transfers": lambda r: (_duration(r),),
    "slow_worker": lambda r: (_worker(r), _duration(r)),
    "shift": lambda r: (r.randrange(NUM_PATTERNS),),
    "report_gap": lambda r: (_worker(r), round(r.uniform(*GAP_S), 2)),
    "idle": lambda r: (_duration(r),),
    "planner_hangs": lambda r: (_duration(r),),
    "operator": lambda r: (
        r.choice(OPERATIONS),
        r.choice(("", *OPERATIONS)),
        round(r.uniform(0.0, SECOND_S), 2),
    ),
    "edit_policy": lambda r: (r.randrange(4),),
    "byzantine_term": lambda r: (r.choice(("next", "huge", "lease", "leap")),),
    "byzantine_noise": lambda r: (r.randrange(1 << 30),),
    "lie": lambda r: _lie(r.choice(LIES), _duration(r), r.random() < 0.5),
    "join_worker": lambda r: (_duration(r),),
    "wrong_layout": lambda r: (_worker(r),),
    "old_leader": lambda r: (_worker(r),),
    "unreachable_host": lambda r: (_worker(r), _duration(r)),
    "unreachable_rank": lambda r: (_worker(r), _duration(r)),
    "false_loss": lambda r: (_worker(r), _duration(r), r.random() < 0.7),
    "false_generation": lambda r: (
        _worker(r),
        _duration(r),
        r.random() < 0.7,
        r.choice(("far above", "below", "the first")),
    ),
    "store_answers_late": lambda r: (_duration(r),),
    "other_step": lambda r: (_worker(r), _duration(r), r.random() < 0.7),
    "lose_store_behind_leader": lambda r: (
        r.choice(LOSSES),
        round(r.uniform(0.0, 8.0), 2),
        round(r.uniform(0.0, 3.0), 2),
    ),
    "set_store_back_behind_leader": lambda r: (
        round(r.uniform(0.0, 8.0), 2),
        round(r.uniform(0.0, 3.0), 2),
    ),
    "set_store_back_behind_split": lambda r: (
        *r.sample(WORKERS, 2),
        round(r.uniform(0.0, 1.0), 2),
        round(r.uniform(0.0, 0.5), 2),
    ),
    "set_store_back_behind_epoch": lambda r: (*r.sample(WORKERS, 2), _duration(r)),
    "set_store_back_behind_group": lambda r: (*r.sample(WORKERS, 2), _duration(r)),
    "lose_control_plane": lambda r: (_duration(r),),
    "broken_groups": lambda r: (round(r.uniform(*BROKEN_S), 2),),
    "wrong_clock": lambda r: (r.choice(BALANCERS), r.choice(CLOCKS_S), _duration(r)),
    "retire_worker": lambda r: (_worker(r),),
    "crash_loop": lambda r: (_worker(r), round(r.uniform(1.0, 5.0), 2)),
    "namesake": lambda r: (_worker(r), _duration(r)),
}
"""What may happen: arguments of each kind from a random source."""

UNUSUAL = frozenset({"lossy_network"})
"""Kinds of faults that the product need not survive: docs/simulation.md."""

USUAL = tuple(kind for kind in MAKERS if kind not in UNUSUAL)
"""Kinds of faults that the product must survive."""

LATER = (
    "unreachable_host",
    "unreachable_rank",
    "false_loss",
    "false_generation",
    "store_answers_late",
    "other_step",
    "lose_store_behind_leader",
    "set_store_back_behind_leader",
    "lose_control_plane",
    "broken_groups",
    "wrong_clock",
    "retire_worker",
    "crash_loop",
    "set_store_back_behind_split",
    "set_store_back_behind_epoch",
    "set_store_back_behind_group",
    "namesake",
)
"""Kinds that were added to others: the schedules of the others are as they were without them."""

LATER_SHARE = 4.0
"""A schedule has later kinds with this probability for each, divided by the number of kinds."""

WEIGHTS = {"disk_damaged": 0.3, "wrong_layout": 0.3, "byzantine_term": 0.5, "operator": 2.0,
           "shift": 2.0, "report_gap": 0.3, "lie": 0.5, "join_worker": 0.5}  # fmt: skip


def _lone_gaps(rng: random.Random) -> list[Action]:
    """Gaps in the reports of ranks to which nothing else happens."""
    first_s = rng.uniform(*LONE_GAP_S)
    later_s = (rng.uniform(0.0, LATER_GAPS_S) for _ in range(rng.randint(0, 2)))
    return [
        Action(round(first_s + after_s, 2), GAP, MAKERS[GAP](rng)) for after_s in (0.0, *later_s)
    ]


def _actions(rng: random.Random, kinds: list[str]) -> list[Action]:
    weights = [WEIGHTS.get(kind, 1.0) for kind in kinds]
    bursts = [rng.uniform(0.0, FAULT_S) for _ in range(rng.randint(1, 3))]
    actions = []
    for _ in range(rng.randint(2, 12)):
        at_s = rng.uniform(0.0, FAULT_S)
        if rng.random() < 0.6:  # Faults that come together find more.
            at_s = min(FAULT_S, rng.choice(bursts) + rng.expovariate(1.0))
        kind = rng.choices(kinds, weights)[0]
        actions.append(Action(round(at_s, 2), kind, MAKERS[kind](rng)))
    return actions


def make_schedule(seed: int, kinds: tuple[str, ...] = USUAL) -> Schedule:
    """Return the schedule of a seed.

    Each uses a few of the kinds only, but often ("swarm testing", Groce et al. 2012): faults of one
    kind then meet in ways that they would not among thirty others.
    """
    rng = random.Random(seed)
    all_kinds, kinds = kinds, tuple(kind for kind in kinds if kind not in LATER) or kinds
    chosen = rng.sample(kinds, min(len(kinds), rng.randint(2, 6)))
    if GAP in chosen and rng.random() >= GAP_SHARE:
        chosen = [kind for kind in chosen if kind != GAP] or [GAP]
    if GAP in kinds and rng.random() < LONE_GAP_SHARE:
        chosen = [GAP]
    actions = _lone_gaps(rng) if chosen == [GAP] else _actions(rng, chosen)
    actions.sort(key=lambda action: action.at_s)
    num_workers = rng.choice((3, 4, 4))
    if chosen != [GAP]:
        actions += _later_actions(seed, all_kinds)
    # Places of actions stay what they were without later kinds.
    placed = sorted(enumerate(actions), key=lambda one: one[1].at_s)
    places, actions = zip(*placed, strict=True)
    return Schedule(seed, num_workers, actions, places)


def _later_actions(seed: int, kinds: tuple[str, ...]) -> list[Action]:
    """Return what later kinds add to the schedule of a seed."""
    rng = random.Random(f"later {seed}")
    later = [kind for kind in kinds if kind in LATER]
    share = LATER_SHARE / len(kinds)
    chosen = [kind for kind in later if len(later) < len(kinds) and rng.random() < share]
    return [Action(round(rng.uniform(0.0, FAULT_S), 2), kind, MAKERS[kind](rng)) for kind in chosen]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
