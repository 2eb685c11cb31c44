"""The store's promise, kept by each store in `open_store`.

Another store joins by one more parameter of the fixture, which opens it as a new process would.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.store import redis_scripts
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.sqlite_file import SqliteFile
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    MAX_LAYOUTS,
    StoreAheadError,
    StoreConflictError,
    StoreFault,
    TermOverError,
)
from equipoise.pool.records import AverageRecord, EpochMembers, ForgottenRecords, Hold
from equipoise.wire.checks import MAX_COUNT, MAX_TERM
from tests.simulation.store import SimStore, StoreServer
from tests.support.store_records import A_DECISION, AN_ORDER, ONES, layout_of, same, weighted

TERM = 1
PAUSED = Hold(paused="ann")


@pytest.fixture(params=["sqlite", "redis", "simulated"])
def open_store(request, tmp_path):
    """Opens the same store again and again; close what you opened."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state")
    if request.param == "simulated":
        server = StoreServer()
        return lambda: SimStore(server)
    url = request.getfixturevalue("redis_url")
    return lambda: RedisStore(url, timeout_s=20.0)


@pytest.fixture
async def store(open_store):
    opened = open_store()
    await opened.fence(term=TERM)
    yield opened
    await opened.close()


async def test_a_new_store_knows_nothing_and_starts_at_generation_1(store):
    assert await store.pools() == ()
    assert (await store.recall("p")).committed is None
    assert (await store.recall("p")).proposed is None
    assert await store.layout("p", 1) is None
    assert (await store.recall("p")).members is None
    assert (await store.recall("p")).averages.get("slow") is None
    assert await store.decisions("p", limit=9) == ()
    assert (await store.recall("p")).next_generation == 1


async def test_everything_put_is_there_after_a_restart(open_store):
    first = open_store()
    await first.fence(term=TERM)
    layout = layout_of(1, shift=2)
    record = AverageRecord(
        half_life_s=60.0,
        time_unix_s=1.5e9,
        weight_s=3.25,
        decayed_load=np.arange(12.0).reshape(2, 6) / 7,
    )
    await first.put_proposed("p", layout, term=TERM)
    await first.commit("p", 1, previous=None, term=TERM)
    await first.put_proposed("p", layout_of(2), term=TERM)
    await first.put_membership("p", EpochMembers(epoch=4, workers=("w-1", "w-0")), term=TERM)
    await first.put_average("p", "slow", record, term=TERM)
    await first.add_decision("p", A_DECISION, term=TERM)
    await first.close()

    second = open_store()
    assert await second.pools() == ("p",)
    assert same((await second.recall("p")).committed, layout)
    assert same((await second.recall("p")).proposed, layout_of(2))
    assert (await second.recall("p")).members == EpochMembers(epoch=4, workers=("w-1", "w-0"))
    average = (await second.recall("p")).averages.get("slow")
    assert (average.half_life_s, average.time_unix_s, average.weight_s) == (60.0, 1.5e9, 3.25)
    np.testing.assert_array_equal(average.decayed_load, record.decayed_load)
    assert average.decayed_load.dtype == np.float64
    assert await second.decisions("p", limit=9) == (replace(A_DECISION, sequence=1),)
    assert (await second.recall("p")).next_generation == 3
    await second.close()


async def test_shares_are_kept_to_the_last_unit(open_store):
    first = open_store()
    await first.fence(term=TERM)
    await first.adopt("p", weighted(layout_of(1)), term=TERM)
    await first.put_proposed("p", layout_of(2), term=TERM)
    await first.put_proposed("p", weighted(layout_of(3)), term=TERM)
    await first.put_proposed("p", weighted(layout_of(3)), term=TERM)
    with pytest.raises(StoreConflictError, match="generation 3 was used before"):
        await first.put_proposed("p", layout_of(3), term=TERM)
    await first.close()
    second = open_store()
    assert same((await second.recall("p")).committed, weighted(layout_of(1)))
    assert same(await second.layout("p", 2), layout_of(2))
    assert same((await second.recall("p")).proposed, weighted(layout_of(3)))
    await second.close()


async def test_a_generation_is_never_used_again(store):
    await store.put_proposed("p", layout_of(5), term=TERM)
    with pytest.raises(StoreConflictError, match="generation 5 was used before, the next is 6"):
        await store.put_proposed("p", layout_of(5, shift=1), term=TERM)
    with pytest.raises(StoreConflictError, match="generation 4"):
        await store.put_proposed("p", layout_of(4), term=TERM)
    assert same(await store.layout("p", 5), layout_of(5))


async def test_saying_the_same_proposal_or_commit_again_is_no_conflict(store):
    for _ in range(2):
        await store.put_proposed("p", layout_of(1), term=TERM)
    for _ in range(2):
        await store.commit("p", 1, previous=None, term=TERM)
    assert same((await store.recall("p")).committed, layout_of(1))


async def test_audit_records_and_holds_survive_a_restart(open_store):
    first = open_store()
    await first.fence(term=TERM)
    assert await first.audit("p", limit=9) == ()
    assert (await first.recall("p")).hold.reason == ""
    pin = Hold(paused="ann", pinned="bob: a test", pin=layout_of(4, shift=1), pinned_generation=4)
    entry = await first.add_audit("p", AN_ORDER, hold=pin, after=0, term=TERM)
    assert entry == replace(AN_ORDER, sequence=1)
    await first.add_audit("p", replace(AN_ORDER, what="look"), hold=None, after=1, term=TERM)
    await first.close()

    second = open_store()
    assert await second.pools() == ("p",)
    assert [(one.sequence, one.what) for one in await second.audit("p", limit=9)] == [
        (2, "look"),
        (1, "pause (for the night)"),
    ]
    hold = (await second.recall("p")).hold
    assert (hold.paused, hold.pinned, hold.pinned_generation) == ("ann", "bob: a test", 4)
    assert hold.pin.same_placement(pin.pin)
    await second.add_audit("p", AN_ORDER, hold=Hold(), after=2, term=TERM)
    assert not (await second.recall("p")).hold.reason
    with pytest.raises(TermOverError):
        await second.add_audit("p", AN_ORDER, hold=pin, after=3, term=TERM - 1)
    assert not (await second.recall("p")).hold.reason
    await second.close()


async def test_an_audit_record_that_does_not_follow_the_latest_changes_nothing(store):
    """A request whose answer was late, or that arrives when its balancer has given up waiting."""
    await store.add_audit("p", AN_ORDER, hold=Hold(paused="ann"), after=0, term=TERM)
    lost = ForgottenRecords(audit=(replace(AN_ORDER, sequence=5),), hold=Hold(), next_generation=9)
    for after in (0, 2):
        with pytest.raises(StoreAheadError, match="pool p"):
            await store.add_audit("p", AN_ORDER, hold=Hold(), after=after, term=TERM)
        with pytest.raises(StoreAheadError, match="pool p"):
            await store.restore("p", replace(lost, after=after), term=TERM)
    memory = await store.recall("p")
    assert (memory.hold.paused, memory.next_generation) == ("ann", 1)
    assert memory.audit == (replace(AN_ORDER, sequence=1),)


async def test_what_it_lost_is_written_back_under_the_same_numbers(open_store):
    store = open_store()
    await store.fence(term=TERM)
    kept = await store.add_audit("p", AN_ORDER, hold=Hold(), after=0, term=TERM)
    lost = tuple(replace(AN_ORDER, sequence=number, what=f"lost {number}") for number in (2, 3, 4))
    decision, hold = replace(A_DECISION, sequence=7), Hold(paused="ann")
    records = ForgottenRecords(after=1, audit=lost, hold=hold, decision=decision)
    await store.restore("p", records, term=TERM)
    with pytest.raises(StoreAheadError):  # The answer to the first one was lost.
        await store.restore("p", records, term=TERM)
    await store.restore("new", replace(records, after=0), term=TERM)
    await store.close()

    store = open_store()
    assert await store.pools() == ("new", "p")
    assert await store.audit("p", limit=9) == (*reversed(lost), kept)
    assert await store.audit("new", limit=9) == tuple(reversed(lost))
    assert await store.decisions("p", limit=9) == (decision,)
    assert (await store.recall("p")).hold.paused == "ann"
    assert (await store.add_audit("p", AN_ORDER, hold=None, after=4, term=TERM)).sequence == 5
    assert (await store.add_decision("p", A_DECISION, term=TERM)).sequence == 8
    with pytest.raises(TermOverError):
        await store.restore("p", records, term=TERM - 1)
    await store.close()


async def test_numbers_that_it_lost_are_written_back_and_never_fall(open_store):
    store = open_store()
    await store.fence(term=TERM)
    members = EpochMembers(epoch=57, workers=("a", "b"))
    lost = ForgottenRecords(members=members, next_generation=10)
    for _ in range(2):
        await store.restore("p", lost, term=TERM)
    assert await store.pools() == ("p",)
    assert (await store.recall("p")).members == members
    assert (await store.recall("p")).next_generation == 10
    assert (await store.recall("p")).committed is (await store.recall("p")).proposed is None
    with pytest.raises(StoreConflictError, match="generation 9 was used before, the next is 10"):
        await store.put_proposed("p", layout_of(9), term=TERM)
    with pytest.raises(StoreConflictError, match="the latest is 57"):
        await store.put_membership("p", replace(members, epoch=56), term=TERM)
    await store.put_proposed("p", layout_of(11), term=TERM)
    older = EpochMembers(epoch=56, workers=("c",))
    await store.restore("p", ForgottenRecords(members=older, next_generation=3), term=TERM)
    await store.restore("p", ForgottenRecords(hold=Hold(paused="ann")), term=TERM)
    assert (await store.recall("p")).members == members
    assert (await store.recall("p")).next_generation == 12
    await store.close()


async def test_only_the_newest_audit_records_are_kept(store):
    for after in range(MAX_AUDIT_ENTRIES + 3):
        await store.add_audit("p", AN_ORDER, hold=None, after=after, term=TERM)
    kept = await store.audit("p", limit=2 * MAX_AUDIT_ENTRIES)
    assert len(kept) == MAX_AUDIT_ENTRIES
    assert kept[0].sequence == MAX_AUDIT_ENTRIES + 3


async def test_it_is_known_which_generations_were_committed_as_long_as_they_are_kept(store):
    assert await store.commits("p") == ()
    await store.put_proposed("p", layout_of(1), term=TERM)
    await store.commit("p", 1, previous=None, term=TERM)
    await store.put_proposed("p", layout_of(2), term=TERM)
    await store.adopt("p", layout_of(3), term=TERM)
    assert await store.commits("p") == (1, 3)
    for generation in range(4, 5 + MAX_LAYOUTS):
        await store.adopt("p", layout_of(generation), term=TERM)
    kept = await store.commits("p")
    assert 1 not in kept
    assert kept[-1] == 4 + MAX_LAYOUTS


async def test_a_commit_happens_only_if_the_previous_one_still_stands(store):
    for generation in (1, 2, 3):
        await store.put_proposed("p", layout_of(generation), term=TERM)
    await store.commit("p", 1, previous=None, term=TERM)
    await store.commit("p", 2, previous=1, term=TERM)
    with pytest.raises(StoreConflictError, match="must follow 1, but 2 is committed"):
        await store.commit("p", 3, previous=1, term=TERM)
    assert (await store.recall("p")).committed.generation == 2
    assert (await store.recall("p")).proposed.generation == 3


async def test_a_layout_that_was_never_proposed_cannot_be_committed(store):
    with pytest.raises(StoreConflictError, match="never proposed"):
        await store.commit("p", 1, previous=None, term=TERM)
    assert await store.pools() == ()


async def test_of_many_that_commit_at_once_exactly_one_wins(store):
    await store.put_proposed("p", layout_of(1), term=TERM)
    await store.commit("p", 1, previous=None, term=TERM)
    for generation in range(2, 10):
        await store.put_proposed("p", layout_of(generation), term=TERM)
    outcomes = await asyncio.gather(
        *(store.commit("p", generation, previous=1, term=TERM) for generation in range(2, 10)),
        return_exceptions=True,
    )
    assert sum(outcome is None for outcome in outcomes) == 1
    assert sum(isinstance(outcome, StoreConflictError) for outcome in outcomes) == 7


async def test_what_all_ranks_run_is_adopted_whatever_the_store_thought(store):
    await store.put_proposed("p", layout_of(8), term=TERM)
    await store.adopt("p", layout_of(6, shift=3), term=TERM)
    assert same((await store.recall("p")).committed, layout_of(6, shift=3))
    assert (await store.recall("p")).next_generation == 9
    await store.adopt("p", layout_of(20), term=TERM)
    assert (await store.recall("p")).next_generation == 21


async def test_a_balancer_that_was_succeeded_can_write_nothing_that_matters(store):
    await check_fenced(store)


async def test_a_store_that_does_not_look_at_the_term_would_be_noticed(store, monkeypatch):
    monkeypatch.setattr(SqliteFile, "_check_term", lambda _self, _write: None)
    monkeypatch.setattr(SimStore, "_fenced", lambda _self, data, change, _term: change(data))
    compared = "term ~= highest_term or server() ~= fenced_by"
    assert compared in redis_scripts.OWN_TERM
    monkeypatch.setattr(
        redis_scripts, "OWN_TERM", redis_scripts.OWN_TERM.replace(compared, "false")
    )
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await check_fenced(store)


def writes_of(store, *, term):
    """One of each kind."""
    return [
        lambda: store.put_proposed("p", layout_of(2), term=term),
        lambda: store.commit("p", 1, previous=None, term=term),
        lambda: store.adopt("p", layout_of(1), term=term),
        lambda: store.put_membership("p", EpochMembers(epoch=2, workers=("w",)), term=term),
        lambda: store.put_proposed("other", layout_of(1), term=term),
        lambda: store.put_average("p", "slow", ONES, term=term),
        lambda: store.add_decision("p", A_DECISION, term=term),
        lambda: store.add_audit("p", AN_ORDER, hold=PAUSED, after=0, term=term),
        lambda: store.restore("p", ForgottenRecords(hold=PAUSED), term=term),
        lambda: store.forget("p", term=term),
    ]


async def check_fenced(store):
    """Term 3 was fenced last, so the store rejects writes of terms 2 and 4."""
    await store.fence(term=3)
    await store.put_proposed("p", layout_of(1), term=3)
    await store.put_membership("p", EpochMembers(epoch=1, workers=("w",)), term=3)
    for term in (2, 4):
        for write in writes_of(store, term=term):
            with pytest.raises(TermOverError, match=f"term {term} is over") as caught:
                await write()
            assert (caught.value.highest_term, caught.value.fault) == (3, StoreFault.CONFLICT)
    for term in (2, 3):
        with pytest.raises(TermOverError):
            await store.fence(term=term)
    memory = await store.recall("p")
    assert memory.averages.get("slow") is memory.committed is None
    assert (memory.audit, memory.hold.paused) == ((), "")
    assert await store.decisions("p", limit=1) == ()
    assert (memory.next_generation, memory.members.epoch) == (2, 1)
    await store.fence(term=5)
    await store.commit("p", 1, previous=None, term=5)


async def test_a_new_leader_fences_before_it_writes_anything(open_store):
    first = open_store()
    assert await first.highest_term() == 0
    await first.fence(term=7)
    with pytest.raises(TermOverError):
        await first.put_proposed("p", layout_of(1), term=6)
    await first.close()
    second = open_store()
    assert await second.highest_term() == 7
    assert await second.pools() == ()
    await second.close()


async def test_neighbouring_terms_differ_up_to_the_last_one(store):
    for term in (TERM + 1, 2**24 + 1, MAX_TERM):
        await store.fence(term=term)
        with pytest.raises(TermOverError):
            await store.fence(term=term - 1)
        assert await store.highest_term() == term


async def test_neighbouring_generations_and_epochs_differ_up_to_2_to_the_53(store):
    last = MAX_COUNT
    await store.adopt("p", layout_of(last - 1), term=TERM)
    with pytest.raises(StoreConflictError, match="was used before"):
        await store.put_proposed("p", layout_of(last - 1, shift=1), term=TERM)
    await store.put_proposed("p", layout_of(last), term=TERM)
    assert (await store.recall("p")).proposed.generation == last
    await store.commit("p", last, previous=last - 1, term=TERM)
    assert await store.commits("p") == (last - 1, last)
    await store.put_membership("p", EpochMembers(epoch=last, workers=("w",)), term=TERM)
    with pytest.raises(StoreConflictError, match="is over"):
        await store.put_membership("p", EpochMembers(epoch=last - 1, workers=("w",)), term=TERM)


async def test_an_epoch_does_not_go_back(store):
    await store.put_membership("p", EpochMembers(epoch=3, workers=("a",)), term=TERM)
    await store.put_membership("p", EpochMembers(epoch=3, workers=("b",)), term=TERM)
    with pytest.raises(StoreConflictError, match="epoch 2 is over, the latest is 3"):
        await store.put_membership("p", EpochMembers(epoch=2, workers=("a",)), term=TERM)
    assert (await store.recall("p")).members.workers == ("b",)


async def test_pools_do_not_see_each_other(store):
    await store.put_proposed("b", layout_of(7), term=TERM)
    await store.add_decision("a", A_DECISION, term=TERM)
    assert await store.pools() == ("a", "b")
    assert (await store.recall("a")).next_generation == 1
    assert await store.decisions("b", limit=1) == ()


async def test_a_pool_is_forgotten_whole_and_alone_and_starts_anew(store):
    for pool in ("gone", "kept"):
        await store.adopt(pool, layout_of(7), term=TERM)
        await store.put_membership(pool, EpochMembers(epoch=3, workers=("a",)), term=TERM)
        await store.put_average(pool, "slow", ONES, term=TERM)
        await store.add_decision(pool, A_DECISION, term=TERM)
        await store.add_audit(pool, AN_ORDER, hold=Hold(paused="ann"), after=0, term=TERM)
    with pytest.raises(TermOverError):
        await store.forget("gone", term=TERM - 1)
    assert await store.pools() == ("gone", "kept")
    await store.forget("gone", term=TERM)
    await store.forget("never there", term=TERM)
    assert await store.pools() == ("kept",)
    assert (await store.recall("gone")).committed is None
    assert (await store.recall("gone")).members is None
    assert (await store.recall("gone")).averages.get("slow") is None
    assert await store.decisions("gone", limit=9) == await store.audit("gone", limit=9) == ()
    assert not (await store.recall("gone")).hold.paused
    assert (await store.recall("gone")).next_generation == 1
    assert await store.commits("gone") == ()
    assert (await store.add_decision("gone", A_DECISION, term=TERM)).sequence == 1
    assert (await store.recall("kept")).next_generation == 8
    assert (await store.recall("kept")).members.epoch == 3
    assert len(await store.audit("kept", limit=9)) == 1


async def test_the_newest_decisions_come_first_and_old_ones_are_dropped(store):
    added = await asyncio.gather(
        *(store.add_decision("p", A_DECISION, term=TERM) for _ in range(MAX_DECISIONS + 3))
    )
    numbered = sorted(added, key=lambda decision: decision.sequence)
    assert [decision.sequence for decision in numbered] == list(range(1, MAX_DECISIONS + 4))
    newest = await store.decisions("p", limit=2)
    assert newest == (numbered[-1], numbered[-2])
    kept = await store.decisions("p", limit=MAX_DECISIONS + 3)
    assert [decision.sequence for decision in kept] == list(range(MAX_DECISIONS + 3, 3, -1))


async def test_old_layouts_are_dropped_but_never_the_committed_one(store):
    await store.put_proposed("p", layout_of(1), term=TERM)
    await store.commit("p", 1, previous=None, term=TERM)
    for generation in range(2, MAX_LAYOUTS + 4):
        await store.put_proposed("p", layout_of(generation), term=TERM)
    kept = [g for g in range(1, MAX_LAYOUTS + 4) if await store.layout("p", g) is not None]
    assert kept == [1, *range(4, MAX_LAYOUTS + 4)]
    assert (await store.recall("p")).committed.generation == 1


async def test_a_layout_is_adopted_that_is_older_than_all_that_are_kept(store):
    """Ranks that were parted from the balancer run it; others have run later ones since."""
    for generation in range(2, MAX_LAYOUTS + 4):
        await store.adopt("p", layout_of(generation), term=TERM)
    await store.adopt("p", layout_of(1), term=TERM)
    assert same((await store.recall("p")).committed, layout_of(1))
    assert 1 in await store.commits("p")


async def test_a_proposal_is_over_when_it_is_committed(store):
    await store.put_proposed("p", layout_of(1), term=TERM)
    assert (await store.recall("p")).proposed.generation == 1
    await store.commit("p", 1, previous=None, term=TERM)
    assert (await store.recall("p")).proposed is None


# The SQLite file ----------------------------------------------------------------------------------
