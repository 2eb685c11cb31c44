"""What a balancer still knows of a pool whose store has lost it."""

from dataclasses import replace

import pytest

from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.journal import Journal
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import Hold, PoolMemory
from tests.support.store_records import A_DECISION, AN_ORDER

PAUSED = Hold(paused="ann")


def orders(*numbers, at=100.0):
    """Audit records, newest first."""
    return tuple(
        replace(AN_ORDER, sequence=number, time_unix_s=at + number) for number in reversed(numbers)
    )


def memory(*numbers, hold=PAUSED, **changes):
    return PoolMemory(audit=orders(*numbers), hold=hold, **changes)


@pytest.fixture
def known():
    """A balancer that knows three audit records, the last of which paused the pool."""
    book = PolicyBook(Policy())
    latest = replace(A_DECISION, sequence=9, time_unix_s=100.0)
    return Journal(PoolPolicy("p", book, recorded=""), memory(1, 2, 3, last_decision=latest))


def test_an_empty_store_lost_everything(known):
    lost = known.forgotten_by(PoolMemory())
    assert [record.sequence for record in lost.audit] == [1, 2, 3]
    assert lost.hold is PAUSED
    assert lost.decision.sequence == 9
    restored = lost.added_to(PoolMemory())
    assert restored.audit == tuple(known.audit)
    assert (restored.hold, restored.last_decision) == (PAUSED, known.last_decision)


def test_a_store_that_lost_its_last_writes_lost_the_hold_with_them(known):
    stored = memory(1, 2, hold=Hold(), last_decision=known.last_decision)
    lost = known.forgotten_by(stored)
    assert [record.sequence for record in lost.audit] == [3]
    assert (lost.hold, lost.decision) == (PAUSED, None)
    assert lost.added_to(stored).audit == tuple(known.audit)


def test_a_store_that_is_ahead_lost_nothing(known):
    ahead = replace(A_DECISION, sequence=10, time_unix_s=200.0)
    assert known.forgotten_by(memory(1, 2, 3, 4, hold=Hold(), last_decision=ahead)) is None
    assert known.forgotten_by(memory(1, 2, 3, last_decision=known.last_decision)) is None


def test_newer_records_of_a_balancer_that_led_an_empty_store_are_not_overruled(known):
    newer = replace(known.last_decision, sequence=1, time_unix_s=500.0)
    stored = PoolMemory(audit=orders(1, at=500.0), hold=Hold(), last_decision=newer)
    assert known.forgotten_by(stored) is None
