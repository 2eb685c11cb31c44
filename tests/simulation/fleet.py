"""What a simulated fleet is: its model and policy, and what the seed of a schedule decides."""

import random
from functools import lru_cache

import numpy as np

from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape
from equipoise.trust.settings import Tls
from equipoise.worker.settings import WorkerSettings
from tests.simulation.experts import EXPERT_BYTES

POOL = "main"
SLOTS = 3
PLACES = 6
"""Of ranks whose layers share them: as many as others have slots in both layers."""

SCRUB_S = 2.0
"""Seconds in which a rank verifies a slot (`WorkerSettings.scrub_mib_per_s` of the simulation)."""

ROOMY = "w1"
"""The worker that has more places than others, if one has."""

SHAPE = ModelShape(num_layers=2, num_experts=6, num_groups=2, expert_bytes=EXPERT_BYTES)
POLICY = Policy(
    interval_s=3.0,
    report_interval_s=2.0,
    heartbeat_interval_s=2.0,
    slow_half_life_s=12.0,
    fast_half_life_s=2.0,
    min_assignments=50.0,
    min_gain=0.01,
    cooldown_s=0.0,
    rollback_cooldown_s=5.0,
    max_wave_moves=1,
    plan_timeout_s=3.0,
    stage_timeout_s=4.0,
    switch_timeout_s=4.0,
    report_timeout_s=4.5,
    reform_timeout_s=3.0,
    meet_timeout_s=6.0,
    start_timeout_s=6.0,
)


@lru_cache
def traffic(pattern: int) -> np.ndarray:
    """Skewed assignments of a step, [layers, experts]."""
    generator = np.random.default_rng(pattern)
    load = generator.gamma(0.6, size=(SHAPE.num_layers, SHAPE.num_experts)) + 0.02
    return load / load.sum(axis=1, keepdims=True) * 200.0


def places_of(seed: int, name: str) -> int:
    """A worker's places in the schedule of a seed; 0 where layers do not share them.

    They do in a quarter of the schedules. A rank then has as many places as the others have slots,
    and one slot more in each layer. In half of these, one worker has two places more.
    """
    chance = random.Random(f"places {seed}").random()
    if chance >= 0.25:
        return 0
    return PLACES + 2 * (name == ROOMY and chance < 0.125)


def keeps_lease_apart(seed: int) -> bool:
    """Whether the lease of a schedule is in a register of its own, as in Kubernetes.

    It is in a third of the schedules. That register loses nothing, and faults of the store leave it
    alone; in the others, it is in the store.
    """
    return random.Random(f"lease {seed}").random() < 1 / 3


def phase_of(seed: int) -> Phase:
    """The phase of the pool in the schedule of a seed: mixed in half of them."""
    phases = (Phase.MIXED, Phase.DECODE, Phase.MIXED, Phase.PREFILL)
    return random.Random(f"phase {seed}").choice(phases)


@lru_cache
def settings_of(
    name: str, num_workers: int, addresses: tuple[str, ...], phase: Phase, places: int
) -> WorkerSettings:
    """A worker's settings; validating them takes as long as a simulated second."""
    return WorkerSettings(
        balancer=",".join(addresses),
        pool=POOL,
        phase=phase,
        worker=name,
        node=f"node-{int(name[1:]) % 2}",
        host=name,
        num_ranks=num_workers,
        slots_per_rank=SLOTS + (places > 0),
        places=places,
        step_timeout_s=3.0,
        outage_timeout_s=15.0,
        drain_timeout_s=1.0,
        scrub_mib_per_s=EXPERT_BYTES / SCRUB_S / 2**20,
        tls=Tls(insecure=True),
    )
