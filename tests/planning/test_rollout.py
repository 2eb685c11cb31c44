import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import (
    TABLE,
    DeadlineCheck,
    Event,
    PersistCommitted,
    Persisted,
    RankLost,
    RankRejected,
    RankRuns,
    RankStaged,
    RankSwitched,
    SendAbort,
    SendStage,
    State,
    Wave,
)

LONG_AFTER_S = 1000.0
BASE = Layout(
    generation=7,
    num_experts=2,
    num_ranks=2,
    expert_of_slot=np.array([[0, 1]], dtype=np.int32),
)
TARGET = BASE.with_placement(np.array([[1, 0]], dtype=np.int32), generation=8)


def ready():
    """A wave of two ranks that has just begun."""
    wave, _ = Wave.begin(base=BASE, target=TARGET, num_ranks=2, policy=Policy(), now=0.0)
    return wave


def test_every_event_in_every_state_is_in_the_table():
    assert set(TABLE) == set(itertools.product(State, Event.__args__))


def test_a_silent_store_never_lets_a_rank_stage():
    wave = ready()
    for now in range(200):
        wave, commands = wave.step(DeadlineCheck(), now=float(now))
        assert not any(isinstance(command, SendStage) for command in commands)
    assert wave.state is State.ABORTED


def test_the_worst_stall_is_kept():
    wave = ready()
    events = [
        Persisted(generation=8),
        *(RankStaged(rank=rank, generation=8) for rank in (0, 1)),
        RankSwitched(rank=0, generation=8, step=3, stall_us=900),
        RankSwitched(rank=1, generation=8, step=3, stall_us=20),
    ]
    for event in events:
        wave, _ = wave.step(event, now=1.0)
    assert (wave.switch_step, wave.worst_stall_us) == (3, 900)


STAGED = (
    Persisted(generation=8),
    RankStaged(rank=0, generation=8),
    RankStaged(rank=1, generation=8),
    RankSwitched(rank=0, generation=8, step=3, stall_us=1),
)
LATE = RankSwitched(rank=1, generation=8, step=4, stall_us=1)


def after(*events):
    """A wave of two ranks after these events."""
    wave = ready()
    for event in events:
        wave, _ = wave.step(event, now=1.0)
    return wave


def test_ranks_that_contradict_each_other_before_the_commit_fault_a_wave():
    wave = after(*STAGED, LATE)
    assert wave.is_faulted
    assert "at step 4" in wave.reason
    assert "at step 3" in wave.reason


@pytest.mark.parametrize("state", [State.SWITCHED, State.ACTIVE])
def test_a_contradiction_after_the_commit_does_not_change_the_wave(state):
    confirmed = RankSwitched(rank=1, generation=8, step=3, stall_us=1)
    wave = after(*STAGED, confirmed, *[Persisted(generation=8)] * (state is State.ACTIVE))
    assert wave.state is state
    assert wave.step(LATE, now=2.0) == (wave, ())


RANKS = st.integers(0, 1)
EVENTS = st.one_of(
    st.builds(Persisted, generation=st.just(8)),
    st.builds(RankStaged, rank=RANKS, generation=st.just(8)),
    st.builds(RankRejected, rank=RANKS, generation=st.just(8), reason=st.just("no")),
    st.builds(
        RankSwitched,
        rank=RANKS,
        generation=st.just(8),
        step=st.just(40),
        stall_us=st.integers(0, 10),
    ),
    st.builds(RankLost, rank=RANKS, reason=st.just("gone")),
    st.just(DeadlineCheck()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 40.0)), max_size=25))
@settings(max_examples=300, deadline=None)
def test_every_sequence_of_events_keeps_the_invariants_of_a_rollout(events):
    wave, now = ready(), 0.0
    persisted = switched = False
    for event, passed_s in events:
        now += passed_s
        before = wave
        wave, commands = wave.step(event, now=now)
        persisted |= isinstance(event, Persisted)
        switched |= isinstance(event, RankSwitched)
        for command in commands:
            if isinstance(command, SendStage):
                assert persisted, "nothing is staged that is not persisted"
            if isinstance(command, SendAbort):
                assert not switched, "what a rank runs is not aborted"
            if isinstance(command, PersistCommitted):
                assert switched, "nothing is committed that no rank runs"
        assert wave.state is not State.ACTIVE or switched
        assert not wave.is_faulted
        assert wave.reason
        assert before.state is wave.state or wave.entered_s == now
    # Every wait has a bound: time and a store that answers end any wave.
    for _ in range(4):
        now += LONG_AFTER_S
        wave, commands = wave.step(DeadlineCheck(), now=now)
        if any(isinstance(command, PersistCommitted) for command in commands):
            wave, _ = wave.step(Persisted(generation=8), now=now)
    assert wave.state is (State.ACTIVE if switched else State.ABORTED)


LIE = st.one_of(
    st.builds(RankStaged, rank=st.just(2), generation=st.just(8)),
    st.builds(RankRejected, rank=st.just(2), generation=st.just(8), reason=st.just("no")),
    st.builds(
        RankSwitched, rank=st.just(2), generation=st.just(8), step=st.just(40), stall_us=st.just(1)
    ),
    st.builds(RankRuns, rank=st.just(2), running=st.sampled_from([7, 8])),
)
NEWS = st.one_of(
    LIE, st.sampled_from(["persist", ("stage", 0), ("stage", 1), "switch"]), st.floats(0, 9)
)


class Honest:
    """A wave, ranks 0 and 1 that tell the truth, and time."""

    def __init__(self):
        base = Layout(
            generation=7, num_experts=3, num_ranks=3, expert_of_slot=np.array([[0, 1, 2]], np.int32)
        )
        target = base.with_placement(base.expert_of_slot[:, ::-1], generation=8)
        self.wave, _ = Wave.begin(base=base, target=target, num_ranks=3, policy=Policy(), now=0.0)
        self.alive, self.running, self.staged, self.now = [0, 1], 7, set(), 0.0

    def hear(self, event):
        self.wave, commands = self.wave.step(event, now=self.now)
        for command in commands:
            assert not isinstance(command, PersistCommitted) or self.running == 8
            if isinstance(command, SendAbort):
                self.staged.clear()

    def wait(self, seconds):
        self.now += seconds
        for rank in self.alive:
            self.hear(RankRuns(rank=rank, running=self.running))
        self.hear(DeadlineCheck())

    def persist(self):
        if self.wave.state in {State.PLANNED, State.SWITCHED}:
            self.hear(Persisted(generation=8))

    def stage(self, rank):
        if self.wave.state is State.STAGING and rank in self.alive:
            self.staged.add(rank)
            self.hear(RankStaged(rank=rank, generation=8))

    def switch(self):
        if self.staged == {0, 1} and self.alive == [0, 1] and self.running == 7:
            self.running = 8
            for rank in self.alive:
                self.hear(RankSwitched(rank=rank, generation=8, step=40, stall_us=1))

    def die(self, rank):
        self.alive.remove(rank)
        self.hear(RankLost(rank=rank, reason="gone"))


@given(st.lists(NEWS, max_size=40), st.sampled_from([None, 0, 1]))
@settings(max_examples=500, deadline=None)
def test_one_lying_rank_never_commits_what_nobody_runs(news, dies):
    """Rank 2 says anything; of the other two, one may die in the middle."""
    honest = Honest()
    for place, one in enumerate(news):
        match one:
            case float():
                honest.wait(one)
            case ("persist" | "switch") as what:
                getattr(honest, what)()
            case ("stage", rank):
                honest.stage(rank)
            case _:
                honest.hear(one)
        if place == len(news) // 2 and dies is not None:
            honest.die(dies)
    for _ in range(8):
        honest.wait(10.0)
        honest.persist()
    assert honest.wave.is_over
    assert honest.wave.state is State.ACTIVE or honest.running == 7 or dies is not None
