"""The values of the rollout model: layouts, ranks, messages, the balancer's memory, the store."""

from functools import cache
from typing import NamedTuple

import numpy as np

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import (
    PersistCommitted,
    PersistProposed,
    State,
    Wave,
)

NUM_RANKS = 2
NAMES = ("rank 0", "rank 1")
TOO_LATE_S = 1e6
"""A time at which every timeout of a wave has passed."""

POLICY = Policy()
TABLES = ([[0, 1, 0, 1]], [[0, 1, 1, 0]], [[1, 0, 0, 1]])


class Content(NamedTuple):
    """A layout: its number, and which table it has."""

    generation: int
    table: int


class Staged(NamedTuple):
    """A rank staged a layout."""

    generation: int


class Rejected(NamedTuple):
    """A rank cannot stage a layout."""

    generation: int


class Switched(NamedTuple):
    """A rank switched at a step."""

    generation: int
    step: int


class Stage(NamedTuple):
    """Stage a layout on top of a generation."""

    layout: Content
    base: int


class Abort(NamedTuple):
    """Drop what is staged of a generation."""

    generation: int


class Rank(NamedTuple):
    """A rank that serves, and its stream."""

    running: Content
    staged: Content | None = None
    header: tuple[Content, Content | None] | None = None
    """What its header of the coming step says it runs and has staged; None before it is sent."""
    connected: bool = True
    inbox: tuple[Stage | Abort, ...] = ()
    outbox: tuple[Staged | Rejected | Switched, ...] = ()
    latest: Switched | None = None
    """Its latest switch, which it repeats after it reconnected."""


class WaveKey(NamedTuple):
    """A wave, without its texts and times."""

    base: Content
    target: Content
    state: State
    staged_ranks: frozenset[int]
    switched_ranks: frozenset[int]
    denying_ranks: frozenset[int]
    disproved_ranks: frozenset[int]
    lost_ranks: frozenset[int]
    switch_step: int | None


class Balancer(NamedTuple):
    """The balancer's memory; it loses all of it in a crash."""

    current: Content | None
    """What its ranks run, as it knows."""
    next_generation: int
    wave: WaveKey | None = None
    writes: tuple[PersistProposed | PersistCommitted, ...] = ()
    """Writes that the store has not answered, first in, first out."""
    heard: tuple[tuple[Content, Content | None] | None, ...] = (None,) * NUM_RANKS
    """What each rank last reported to run and to have staged; None while it is not connected."""
    must_reconcile: bool = False
    """Whether ranks served without this balancer, and it has not compared them with the store."""


class Store(NamedTuple):
    """The records of the pool."""

    committed: Content | None
    proposed: Content | None
    highest: int


class World(NamedTuple):
    """A state of the model."""

    balancer: Balancer | None
    """None while no balancer leads."""
    store: Store
    ranks: tuple[Rank, ...]
    plans_left: int
    crashes_left: int
    breaks_left: int
    forgets_left: int
    lies_left: int
    """How often a rank may report a switch that did not happen."""
    believes_a_liar: bool = False
    """Whether a rank may report a false switch that no other rank is connected to deny: what is
    committed may then be wrong until the ranks' heartbeats correct it."""
    steps: int = 0
    """Switches so far: the step at which the next one happens."""
    broken: str = ""


def put(world: World, index: int, rank: Rank) -> World:
    ranks = world.ranks
    return world._replace(ranks=(*ranks[:index], rank, *ranks[index + 1 :]))


@cache
def layout_of(content: Content) -> Layout:
    return Layout(
        generation=content.generation,
        num_experts=2,
        num_ranks=NUM_RANKS,
        expert_of_slot=np.array(TABLES[content.table], dtype=np.int32),
    )


def content_of(layout: Layout) -> Content:
    return Content(layout.generation, TABLES.index(layout.expert_of_slot.tolist()))


def key_of(wave: Wave) -> WaveKey:
    return WaveKey(
        content_of(wave.base),
        content_of(wave.target),
        wave.state,
        wave.staged_ranks,
        wave.switched_ranks,
        wave.denying_ranks,
        wave.disproved_ranks,
        wave.lost_ranks,
        wave.switch_step,
    )


@cache
def wave_of(key: WaveKey) -> Wave:
    return Wave(
        base=layout_of(key.base),
        target=layout_of(key.target),
        num_ranks=NUM_RANKS,
        policy=POLICY,
        state=key.state,
        entered_s=0.0,
        staged_ranks=key.staged_ranks,
        switched_ranks=key.switched_ranks,
        denying_ranks=key.denying_ranks,
        disproved_ranks=key.disproved_ranks,
        lost_ranks=key.lost_ranks,
        switch_step=key.switch_step,
        reason="",
    )
