"""What a balancer still knows of a pool whose store has lost it."""

from dataclasses import replace

import pytest

from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.pool.effects import WriteAdopted, WriteAudit, WriteMembership, WriteProposed
from equipoise.pool.journal import Journal
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import EpochMembers, Hold, PoolMemory
from tests.support.store_records import A_DECISION, AN_ORDER, layout_of

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


@pytest.fixture
def request_write():
    """The write of an audit record that leaves the hold as it is."""

    def write(record):
        return WriteAudit(record=record, hold=None, hold_before=PAUSED, request=None, answer=None)

    return write


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


def test_a_lost_record_whose_number_was_taken_is_restored_under_the_next(known, request_write):
    # The store lost the pause, and gives its number to the next request, which changes no hold.
    latest = replace(AN_ORDER, sequence=3, what="rebalance", time_unix_s=200.0)
    (pause, *_) = known.audit
    known.note_audit(request_write(latest))
    stored = replace(
        memory(1, 2, hold=Hold(), last_decision=known.last_decision),
        audit=(latest, *orders(1, 2)),
    )
    lost = known.forgotten_by(stored)
    assert (lost.audit, lost.hold) == ((replace(pause, sequence=4),), PAUSED)
    restored = lost.added_to(stored)
    assert [record.sequence for record in restored.audit] == [4, 3, 2, 1]
    assert restored.hold is PAUSED
    assert known.forgotten_by(restored) is None, "the same record, whatever its number"
    assert known.note_stored(restored)
    assert tuple(known.audit) == restored.audit


def test_all_lost_records_are_restored_in_their_order(known, request_write):
    latest = replace(AN_ORDER, sequence=2, what="rebalance", time_unix_s=200.0)
    known.note_audit(request_write(latest))
    stored = memory(1, hold=Hold(), last_decision=known.last_decision)
    lost = known.forgotten_by(replace(stored, audit=(latest, *stored.audit)))
    assert [(one.sequence, one.time_unix_s) for one in lost.audit] == [(3, 102.0), (4, 103.0)]


def test_a_record_that_the_store_dropped_for_newer_ones_is_not_lost(request_write):
    # The store has one that this balancer does not know: its confirmation came too late.
    book = PolicyBook(Policy())
    known = Journal(PoolPolicy("p", book, recorded=""), memory(*range(1, 17)))
    latest = replace(AN_ORDER, sequence=18, what="rebalance", time_unix_s=200.0)
    known.note_audit(request_write(latest))
    stored = replace(memory(*range(4, 18)), audit=(latest, *orders(*range(3, 18))))
    assert known.audit[-1].sequence < stored.audit[-1].sequence
    assert known.forgotten_by(stored) is None


def test_a_store_that_is_ahead_lost_nothing(known):
    ahead = replace(A_DECISION, sequence=10, time_unix_s=200.0)
    assert known.forgotten_by(memory(1, 2, 3, 4, hold=Hold(), last_decision=ahead)) is None
    assert known.forgotten_by(memory(1, 2, 3, last_decision=known.last_decision)) is None


def test_a_request_that_the_store_confirmed_too_late_counts(known):
    stored = memory(1, 2, 3, 4, hold=Hold())
    assert known.note_stored(stored)
    assert [record.sequence for record in known.audit] == [4, 3, 2, 1]
    assert not known.note_stored(stored)
    assert not known.note_stored(memory(1, 2, hold=PAUSED))
    assert known.hold is stored.hold


def test_newer_records_of_a_balancer_that_led_an_empty_store_are_not_overruled(known):
    newer = replace(known.last_decision, sequence=1, time_unix_s=500.0)
    stored = PoolMemory(audit=orders(1, at=500.0), hold=Hold(), last_decision=newer)
    lost = known.forgotten_by(stored)
    assert (lost.hold, lost.decision) == (None, None)
    merged = lost.added_to(stored)
    assert [(one.sequence, one.time_unix_s) for one in merged.audit] == [
        (4, 103.0),
        (3, 102.0),
        (2, 101.0),
        (1, 501.0),
    ]
    assert merged.hold is stored.hold


MEMBERS = EpochMembers(epoch=57, workers=("a", "b"))


@pytest.fixture
def numbered():
    """A balancer that knows epoch 57 and generation 9."""
    book = PolicyBook(Policy())
    return Journal(
        PoolPolicy("p", book, recorded=""), PoolMemory(members=MEMBERS, next_generation=10)
    )


def test_an_empty_store_lost_the_numbers_that_were_issued(numbered):
    lost = numbered.forgotten_by(PoolMemory())
    assert (lost.members, lost.next_generation) == (MEMBERS, 10)
    restored = lost.added_to(PoolMemory())
    assert (restored.members, restored.next_generation) == (MEMBERS, 10)
    assert numbered.forgotten_by(restored) is None


@pytest.mark.parametrize("write", [WriteProposed, WriteAdopted])
def test_numbers_count_once_the_store_has_them(numbered, write):
    numbered.note_written(write(layout=layout_of(12)))
    numbered.note_written(write(layout=layout_of(11)))
    numbered.note_written(WriteMembership(members=replace(MEMBERS, epoch=58)))
    lost = numbered.forgotten_by(PoolMemory(members=MEMBERS, next_generation=12))
    assert (lost.members.epoch, lost.next_generation) == (58, 13)


def test_a_store_that_another_balancer_led_since_gets_the_higher_numbers(numbered):
    stored = PoolMemory(members=EpochMembers(epoch=2, workers=("c",)), next_generation=40)
    lost = numbered.forgotten_by(stored)
    assert lost.members == MEMBERS
    restored = lost.added_to(stored)
    assert (restored.members, restored.next_generation) == (lost.members, 40)
    ahead = PoolMemory(members=EpochMembers(epoch=58, workers=("c",)), next_generation=40)
    assert numbered.forgotten_by(ahead) is None


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 3600.0])
def test_a_later_balancers_hold_is_kept_whatever_the_clocks_say(known, ahead_s):
    """It led the store after that was emptied, while this one was suspended."""
    pinned = Hold(pinned="bob", pin=layout_of(1))
    stored = memory(1, hold=pinned, last_decision=known.last_decision)
    record = replace(stored.audit[0], who="bob", time_unix_s=130.0 - ahead_s)
    stored = replace(stored, audit=(record,))
    lost = known.forgotten_by(stored)
    assert lost.hold is None
    assert len(lost.audit) == 3, "the audit has the records of both"
    assert known.dropped_by(stored) == "paused by ann"
    # Once merged, the hold in the store stays.
    merged = Journal(known._policy, lost.added_to(stored))
    assert merged.forgotten_by(lost.added_to(stored)) is None
    assert merged.forgotten_by(stored).hold is pinned


def test_a_rejected_request_overrules_no_hold(known):
    """The store went back to what it had before this balancer led."""
    earlier = replace(AN_ORDER, sequence=1, what="rebalance", time_unix_s=50.0, accepted=False)
    stored = PoolMemory(audit=(earlier,), last_decision=known.last_decision)
    lost = known.forgotten_by(stored)
    assert lost.hold is PAUSED
    assert known.dropped_by(stored) == ""
    assert [one.what for one in lost.added_to(stored).audit] == [
        *(one.what for one in known.audit),
        "rebalance",
    ]


def test_rejected_requests_do_not_hide_the_accepted_one_that_another_balancer_recorded(known):
    """The store reads the latest records only, and a resume came before these."""
    rejected = replace(AN_ORDER, what="pin", accepted=False, time_unix_s=200.0)
    audit = tuple(replace(rejected, sequence=number) for number in range(20, 4, -1))
    assert known.forgotten_by(PoolMemory(audit=audit)).hold is None
    assert known.forgotten_by(PoolMemory(audit=(*audit, *orders(1, 2, 3)))).hold is PAUSED


def test_no_hold_is_dropped_within_one_history(known):
    ended = Hold()
    assert known.dropped_by(memory(1, 2, 3, 4, hold=ended)) == ""
    assert known.dropped_by(memory(1, 2, hold=ended)) == ""
    assert known.dropped_by(memory(*range(30, 46), hold=ended)) == ""
    assert known.dropped_by(PoolMemory()) == ""


def test_a_hold_that_two_balancers_merged_is_not_overruled_by_a_third(known):
    """The store lost the pause; bob pinned; a balancer that knew the pause wrote that back."""
    (pause, second, first), pinned = known.audit, Hold(pinned="bob", pin=layout_of(1))
    pin = replace(AN_ORDER, sequence=3, who="bob", what="pin", time_unix_s=200.0)
    merged = PoolMemory(audit=(replace(pause, sequence=4), pin, second, first), hold=pinned)
    assert known.is_explained_by(merged.audit)
    lost = known.forgotten_by(replace(merged, last_decision=known.last_decision))
    assert lost is None
    assert known.dropped_by(merged) == "paused by ann"


def test_records_are_lost_however_many_others_came_since(known):
    """As long as the store still has all of those."""
    others = [
        replace(AN_ORDER, sequence=number, who="bob", accepted=False, time_unix_s=200.0 + number)
        for number in range(19, 0, -1)
    ]
    lost = known.forgotten_by(PoolMemory(audit=tuple(others), last_decision=known.last_decision))
    assert [one.sequence for one in lost.audit] == [20, 21, 22]
    assert (lost.after, lost.hold) == (19, PAUSED)


def test_records_are_restored_above_the_highest_number_that_was_ever_used(known):
    """The latest ones are gone, and perhaps others that nobody knows."""
    lost = known.forgotten_by(replace(memory(1, 2), last_audit=7))
    assert (lost.after, [one.sequence for one in lost.audit]) == (2, [8])


def test_all_records_are_read_only_if_the_latest_do_not_explain_those_that_are_known(known):
    assert known.is_explained_by(())
    assert known.is_explained_by(orders(*range(3, 19)))
    assert known.is_explained_by((*orders(3, at=500.0), *orders(1, 2)))
    assert not known.is_explained_by(orders(*range(5, 21)))
    assert not known.is_explained_by(orders(*range(1, 17), at=500.0))
