"""The faults of a run: drawn from a seed, replayable, data only."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NUM_WORKERS = 4
DOMAINS = ("code", "arithmetic", "english")


class Ground(StrEnum):
    """The ways to run a fleet; each has faults that the others cannot have."""

    REDIS = "redis"
    """Two balancers, one of them the leader, with state in Redis."""
    SQLITE = "sqlite"
    """One balancer and its state in a file."""
    POOLS = "pools"
    """The same with two pools: two workers read prompts, two generate."""


class Kind(StrEnum):
    """What can go wrong."""

    WORKER_KILLED = "worker killed"
    WORKER_HANGS = "worker hangs"
    WORKER_STOPPED = "worker asked to stop"
    WORKER_STUTTERS = "worker stutters"
    BALANCER_KILLED = "balancer killed"
    BALANCER_HANGS = "balancer hangs"
    FOLLOWER_KILLED = "follower killed"
    PLANNER_KILLED = "planner killed"
    PLANNER_HANGS = "planner hangs"
    LINK_CUT = "links cut"
    LINK_PARTED = "network parted"
    LINK_LOSSY = "messages dropped"
    LINK_SLOW = "messages delayed"
    LINK_ECHOES = "messages duplicated"
    LINK_SHUFFLED = "messages reordered"
    LINK_GARBLED = "messages garbled"
    EXPERTS_CORRUPTED = "expert bytes corrupted"
    TRANSFER_STALLS = "transfers stall"
    STRANGER = "stranger of another version"
    CLOCK_JUMPS = "clock jumps"
    REDIS_KILLED = "Redis killed"
    REDIS_HANGS = "Redis hangs"
    REDIS_FULL = "Redis full"
    REDIS_EMPTIED = "Redis restarted empty"
    DISK_FULL = "disk full"
    LATENTS_CORRUPTED = "latent bytes corrupted"
    LATENTS_STALL = "latents stall"
    LATENTS_CUT = "fetches of latents cut"
    HANDOVER_KILLED = "worker killed during a handover"
    HANDOVER_HANGS = "worker hangs during a handover"


_ONLY: Mapping[Ground, frozenset[Kind]] = {
    Ground.REDIS: frozenset(
        {
            Kind.FOLLOWER_KILLED,
            Kind.REDIS_KILLED,
            Kind.REDIS_HANGS,
            Kind.REDIS_FULL,
            Kind.REDIS_EMPTIED,
        }
    ),
    Ground.SQLITE: frozenset({Kind.DISK_FULL}),
    Ground.POOLS: frozenset(
        {
            Kind.LATENTS_CORRUPTED,
            Kind.LATENTS_STALL,
            Kind.LATENTS_CUT,
            Kind.HANDOVER_KILLED,
            Kind.HANDOVER_HANGS,
        }
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: when it begins, how long it lasts, and whom it hits.

    `victim` is a number of a worker where the kind is about one. `draw` is what the fault draws
    from, so that it does the same whatever happened before.
    """

    kind: Kind
    at_s: float
    lasts_s: float
    victim: int
    draw: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a seed means."""

    seed: int
    ground: Ground
    domain: str
    faults: tuple[Fault, ...]


def plan_run(seed: int, *, ground: Ground, without: frozenset[Kind] = frozenset()) -> Run:
    """One to three faults within some seconds, in traffic that shifts when the run begins.

    Kinds that this machine lacks are dropped after they were drawn: a seed means the same
    everywhere otherwise.

    The shift makes the balancer roll layouts out, so that faults meet rollouts in every state.
    """
    rng = random.Random(f"{ground}/{seed}")
    kinds = kinds_of(ground)
    faults = [
        Fault(
            kind=rng.choice(kinds),
            at_s=rng.uniform(0.2, 6.0),
            lasts_s=rng.uniform(0.3, 7.0),
            victim=rng.randrange(NUM_WORKERS),
            draw=rng.randrange(2**32),
        )
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    return Run(
        seed=seed,
        ground=ground,
        domain=DOMAINS[seed % len(DOMAINS)],
        faults=tuple(
            sorted(
                (fault for fault in faults if fault.kind not in without),
                key=lambda fault: fault.at_s,
            )
        ),
    )


def kinds_of(ground: Ground) -> tuple[Kind, ...]:
    """The kinds that a ground can have, in their order."""
    foreign = frozenset().union(*(kinds for other, kinds in _ONLY.items() if other is not ground))
    return tuple(kind for kind in Kind if kind not in foreign)
