"""At most one balancer leads, and each term has one leader, however requests and clocks behave."""

from dataclasses import replace

import pytest

from equipoise.balancer.leadership import leader_state
from equipoise.wire.checks import MAX_TERM
from tests.model_checking import lease_model as model
from tests.model_checking.explorer import MAX_STATES, ViolationError, explore


@pytest.fixture(autouse=True)
def nothing_remembered():
    """A planted fault changes what the model has cached."""
    yield
    for name in ("process", "unique", "started", "stepped", "older", "outdated"):
        getattr(model, f"_{name}").cache_clear()
    model._mirrored.cache_clear()


def test_the_lease_admits_one_leader_and_recovers_in_every_order_of_events():
    lease = model.lease_model(candidates=2, max_terms=2, faults=0)
    explored = explore(lease, max_states=100_000, converge_every=100)
    assert explored.complete


def test_the_lease_admits_one_leader_and_recovers_from_a_fault():
    lease = model.lease_model(candidates=2, max_terms=2, faults=1)
    explored = explore(lease, max_states=MAX_STATES, converge_every=100)
    assert explored.states == MAX_STATES or explored.complete


def test_a_register_that_went_back_admits_one_leader_and_no_term_twice():
    lease = model.takeover_model(max_terms=4, faults=2)
    explored = explore(lease, max_states=MAX_STATES, converge_every=100)
    assert explored.states == MAX_STATES


def test_a_suspended_leader_does_not_continue_its_term_in_a_register_that_went_back():
    lease = model.woken_model(max_terms=4, faults=1)
    explored = explore(lease, max_states=MAX_STATES, converge_every=100)
    assert explored.states == MAX_STATES or explored.complete


def test_no_term_follows_the_last_one():
    lease = model.lease_model(candidates=2, max_terms=2, faults=1, first_term=MAX_TERM - 1)
    # Nobody leads once the terms are used up, so only invariants are checked.
    explored = explore(lease, max_states=MAX_STATES // 2, converge_every=10**9)
    assert explored.states == MAX_STATES // 2


def campaign_at_once(monkeypatch):
    """Take a lease without waiting for it to expire."""
    monkeypatch.setattr(leader_state, "_is_free", lambda _state, _record: True)


def take_a_lost_lease(monkeypatch):
    """Take the place of a lost lease without waiting for its leader."""
    is_free = leader_state._is_free
    eager = lambda state, seen: seen.record.is_vacancy or is_free(state, seen)  # noqa: E731
    monkeypatch.setattr(leader_state, "_is_free", eager)


def repeat_the_term(monkeypatch):
    """Campaign with the term of the leader before."""
    consider = leader_state._consider

    def considered(state, event, now):
        after, request = consider(state, event, now)
        if isinstance(request, leader_state.WriteRegister) and request.replacing is not None:
            record = replace(request.record, term=max(request.record.term - 1, 1))
            request = replace(request, record=record)
        return after, request

    role, saw = leader_state.LeaderRole.FOLLOWING, leader_state.Saw
    monkeypatch.setitem(leader_state.TABLE, (role, saw), considered)
    # A leader in a repeated term is let through: only the term is to be wrong.
    monkeypatch.setitem(
        leader_state.TABLE,
        (leader_state.LeaderRole.CAMPAIGNING, leader_state.Wrote),
        lambda state, event, now: leader_state._win(replace(state, highest_term=0), event, now),
    )


def lead_for_ever(monkeypatch):
    """Count a lease from when its renewal was answered, however late that was."""
    extend = leader_state._extend
    late = lambda state, event, now: extend(state, replace(event, sent_s=now), now)  # noqa: E731
    monkeypatch.setattr(leader_state, "_extend", late)
    monkeypatch.setattr(leader_state.LeaderState, "has_run_out", lambda _state, *, now: now < 0)


def trust_any_record(monkeypatch):
    """Take one's own lease, or a released one, at once although the register failed over."""
    is_free = leader_state._is_free
    trusting = lambda state, seen: is_free(state, replace(seen, is_latest=True))  # noqa: E731
    monkeypatch.setattr(leader_state, "_is_free", trusting)


def skip_no_terms(monkeypatch):
    """Lead in the next term although the register may have lost the one who used it."""
    monkeypatch.setattr(leader_state, "SKIPPED_TERMS", 0)


def continue_after_a_failover(monkeypatch):
    """Recognise one's own lease in a register that failed over."""
    place = leader_state.LeaderRole.LEADING, leader_state.Saw
    recognise = leader_state.TABLE[place]

    def trusting(state, event, now):
        sighting = event.sighting and replace(event.sighting, is_latest=True)
        return recognise(state, replace(event, sighting=sighting), now)

    monkeypatch.setitem(leader_state.TABLE, place, trusting)


def test_a_suspended_leader_that_continues_its_term_is_found(monkeypatch):
    continue_after_a_failover(monkeypatch)
    lease = model.woken_model(max_terms=4, faults=1)
    with pytest.raises(ViolationError, match="no term continues after a later one"):
        explore(lease, max_states=200_000, converge_every=10_000_000)


@pytest.mark.parametrize(
    ("plant", "match"),
    [(trust_any_record, "one balancer leads"), (skip_no_terms, "a term has one leader")],
)
def test_a_planted_fault_of_a_register_that_goes_back_is_found(plant, match, monkeypatch):
    plant(monkeypatch)
    lease = model.takeover_model(max_terms=4, faults=1)
    with pytest.raises(ViolationError, match=match):
        explore(lease, max_states=200_000, converge_every=10_000_000)


@pytest.mark.parametrize(
    ("plant", "faults"),
    [(campaign_at_once, 0), (take_a_lost_lease, 1), (repeat_the_term, 0), (lead_for_ever, 0)],
)
def test_a_planted_fault_of_the_lease_is_found(plant, faults, monkeypatch):
    plant(monkeypatch)
    lease = model.lease_model(candidates=2, max_terms=2, faults=faults)
    with pytest.raises(ViolationError, match=r"leader|leads|term"):
        explore(lease, max_states=200_000, converge_every=10_000_000)
