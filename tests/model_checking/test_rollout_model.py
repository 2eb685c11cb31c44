"""Ranks run one layout, and what is committed is what they run, in every order of events."""

from dataclasses import replace

import pytest

from equipoise.planning import reconcile as reconciling
from equipoise.planning.rollout import (
    TABLE,
    DeadlineCheck,
    PersistCommitted,
    RankStaged,
    RankSwitched,
    State,
    Wave,
)
from tests.model_checking import rollout_balancer as balancer
from tests.model_checking import rollout_model as model
from tests.model_checking import rollout_world as world
from tests.model_checking.explorer import MAX_STATES, ViolationError, explore


@pytest.fixture(autouse=True)
def nothing_remembered():
    """A planted fault changes what the model has cached."""
    yield
    for cached in (model._header, world.layout_of, world.wave_of):
        cached.cache_clear()


@pytest.mark.parametrize(
    "faults",
    [
        {"plans": 1, "crashes": 1, "breaks": 1},
        {"plans": 1, "crashes": 1, "breaks": 0, "forgets": 1},
        {"plans": 1, "crashes": 0, "breaks": 2},
        {"plans": 1, "crashes": 0, "breaks": 0, "lies": 1},
    ],
)
def test_one_plan_ends_well_in_every_order_of_events(faults):
    explored = explore(model.rollout_model(**faults), max_states=100_000, converge_every=20)
    assert explored.complete


@pytest.mark.parametrize("faults", [{"crashes": 0, "breaks": 0}, {"crashes": 1, "breaks": 1}])
def test_a_second_plan_does_not_meet_the_remains_of_the_first(faults):
    two = model.rollout_model(plans=2, **faults)
    explored = explore(two, max_states=MAX_STATES // 2, converge_every=100)
    assert explored.states == MAX_STATES // 2


def agree_on_the_highest(monkeypatch):
    """Switch to the highest generation that a rank has staged, if all have staged something."""

    def highest(headers):
        staged = {header.staged_generation for header in headers}
        return None if 0 in staged else max(staged)

    monkeypatch.setattr(model, "agreed_generation", highest)


def ignore_a_late_switch(monkeypatch):
    """Let an abort stand although the ranks had switched before it arrived."""
    monkeypatch.setitem(TABLE, (State.ABORTED, RankSwitched), lambda wave, *_: (wave, ()))
    for module in (balancer, model):
        monkeypatch.setattr(module, "settled", lambda state: state)


def commit_at_once(monkeypatch):
    """Commit as soon as one rank has staged."""
    note_staged = TABLE[State.STAGING, RankStaged]

    def noted(wave, event, now):
        after, commands = note_staged(wave, event, now)
        return after, (*commands, PersistCommitted(layout=wave.target))

    monkeypatch.setitem(TABLE, (State.STAGING, RankStaged), noted)


def reuse_a_generation(monkeypatch):
    """Number plans from what is committed, not from the highest generation ever used."""
    begin = Wave.begin

    def reused(*, base, target, **others):
        return begin(base=base, target=replace(target, generation=base.generation + 1), **others)

    monkeypatch.setattr(Wave, "begin", reused)


def resume_what_one_rank_staged(monkeypatch):
    """Take a wave for staged after a restart although a rank has not staged it."""

    def resumed(_staged, committed, wave):
        return reconciling.Reconciliation(
            generation=committed.generation, wave=wave, commands=(), reason=""
        )

    monkeypatch.setattr(reconciling, "_before_a_switch", resumed)
    monkeypatch.setitem(TABLE, (State.STAGED, DeadlineCheck), lambda wave, *_: (wave, ()))


@pytest.mark.parametrize(
    "plant",
    [
        agree_on_the_highest,
        ignore_a_late_switch,
        commit_at_once,
        reuse_a_generation,
        resume_what_one_rank_staged,
    ],
)
def test_a_planted_fault_of_the_rollout_is_found(plant, monkeypatch):
    plant(monkeypatch)
    faulty = model.rollout_model(plans=2, crashes=1, breaks=0)
    with pytest.raises(ViolationError):
        explore(faulty, max_states=200_000, converge_every=3)
