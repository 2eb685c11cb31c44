"""The store's promise, kept by each store in `open_store`; then what only the SQLite file can do.

Another store joins by one more parameter of the fixture, which opens it as a new process would.
"""

import asyncio
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.store.hold import Hold
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.sqlite_file import SCHEMA_VERSION
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    MAX_LAYOUTS,
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    Membership,
    StoreConflictError,
    StoreError,
    StoreFault,
    TermOverError,
)
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.shares import WHOLE

TERM = 1


@pytest.fixture(params=["sqlite", "redis"])
def open_store(request, tmp_path):
    """Opens the same store again and again; close what you opened."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state")
    url = request.getfixturevalue("redis_url")
    return lambda: RedisStore(url, timeout_s=20.0)


@pytest.fixture
async def store(open_store):
    opened = open_store()
    yield opened
    await opened.close()


def layout_of(generation, *, shift=0):
    first = contiguous_layout(
        num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4, generation=generation
    )
    relabelled = (first.expert_of_slot + shift) % first.num_experts
    return first.with_placement(relabelled, generation=generation)


def weighted(layout):
    """The same placement, with the first slot of each layer serving almost nothing."""
    shares = layout.shares().copy()
    for row, experts in zip(shares, layout.expert_of_slot, strict=True):
        other = int(np.flatnonzero(experts == experts[0])[-1])
        row[[0, other]] = [7, WHOLE - 7]
    return replace(layout, share_of_slot=shares)


def same(a, b):
    return a is not None and a.generation == b.generation and a.same_placement(b)


A_DECISION = DecisionRecord(
    time_unix_s=1.5e9,
    accepted=True,
    reason="balance grows from 0.61 to 0.93 on 12,000 tokens",
    base_generation=3,
    balancedness_current=0.61,
    balancedness_proposed=0.93,
    moves=17,
    bytes=2**33,
    algorithm="global",
    plan_ms=1.25,
    shift_detected=False,
)

ONES = AverageRecord(half_life_s=5.0, time_unix_s=9.0, weight_s=1.0, tokens=np.ones((2, 6)))


async def test_a_new_store_knows_nothing_and_starts_at_generation_1(store):
    assert await store.pools() == ()
    assert await store.committed("p") is None
    assert await store.proposed("p") is None
    assert await store.layout("p", 1) is None
    assert await store.membership("p") is None
    assert await store.average("p", "slow") is None
    assert await store.decisions("p", limit=9) == ()
    assert await store.next_generation("p") == 1


async def test_everything_put_is_there_after_a_restart(open_store):
    first = open_store()
    layout = layout_of(1, shift=2)
    record = AverageRecord(
        half_life_s=60.0, time_unix_s=1.5e9, weight_s=3.25, tokens=np.arange(12.0).reshape(2, 6) / 7
    )
    await first.put_proposed("p", layout, term=TERM)
    await first.commit("p", 1, previous=None, term=TERM)
    await first.put_proposed("p", layout_of(2), term=TERM)
    await first.put_membership("p", Membership(epoch=4, workers=("w-1", "w-0")), term=TERM)
    await first.put_average("p", "slow", record, term=TERM)
    await first.add_decision("p", A_DECISION, term=TERM)
    await first.close()

    second = open_store()
    assert await second.pools() == ("p",)
    assert same(await second.committed("p"), layout)
    assert same(await second.proposed("p"), layout_of(2))
    assert await second.membership("p") == Membership(epoch=4, workers=("w-1", "w-0"))
    average = await second.average("p", "slow")
    assert (average.half_life_s, average.time_unix_s, average.weight_s) == (60.0, 1.5e9, 3.25)
    np.testing.assert_array_equal(average.tokens, record.tokens)
    assert average.tokens.dtype == np.float64
    assert await second.decisions("p", limit=9) == (replace(A_DECISION, sequence=1),)
    assert await second.next_generation("p") == 3
    await second.close()


async def test_shares_are_kept_to_the_last_token(open_store):
    first = open_store()
    await first.adopt("p", weighted(layout_of(1)), term=TERM)
    await first.put_proposed("p", layout_of(2), term=TERM)
    await first.put_proposed("p", weighted(layout_of(3)), term=TERM)
    await first.put_proposed("p", weighted(layout_of(3)), term=TERM)
    with pytest.raises(StoreConflictError, match="generation 3 was used before"):
        await first.put_proposed("p", layout_of(3), term=TERM)
    await first.close()
    second = open_store()
    assert same(await second.committed("p"), weighted(layout_of(1)))
    assert same(await second.layout("p", 2), layout_of(2))
    assert same(await second.proposed("p"), weighted(layout_of(3)))
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
    assert same(await store.committed("p"), layout_of(1))


AN_ORDER = AuditRecord(
    time_unix_s=1.5e9, who="ann", what="pause (for the night)", accepted=True, outcome="paused"
)


async def test_orders_and_what_they_hold_the_pool_to_are_there_after_a_restart(open_store):
    first = open_store()
    assert await first.audit("p", limit=9) == ()
    assert (await first.hold("p")).reason == ""
    pin = Hold(paused="ann", pinned="bob: a test", pin=layout_of(4, shift=1), pinned_generation=4)
    entry = await first.add_audit("p", AN_ORDER, hold=pin, term=TERM)
    assert entry == replace(AN_ORDER, sequence=1)
    await first.add_audit("p", replace(AN_ORDER, what="look"), hold=None, term=TERM)
    await first.close()

    second = open_store()
    assert await second.pools() == ("p",)
    assert [(one.sequence, one.what) for one in await second.audit("p", limit=9)] == [
        (2, "look"),
        (1, "pause (for the night)"),
    ]
    hold = await second.hold("p")
    assert (hold.paused, hold.pinned, hold.pinned_generation) == ("ann", "bob: a test", 4)
    assert hold.pin.same_placement(pin.pin)
    await second.add_audit("p", AN_ORDER, hold=Hold(), term=TERM)
    assert not (await second.hold("p")).reason
    with pytest.raises(TermOverError):
        await second.add_audit("p", AN_ORDER, hold=pin, term=TERM - 1)
    assert not (await second.hold("p")).reason
    await second.close()


async def test_only_the_newest_orders_are_kept(store):
    await asyncio.gather(
        *(
            store.add_audit("p", AN_ORDER, hold=None, term=TERM)
            for _ in range(MAX_AUDIT_ENTRIES + 3)
        )
    )
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
    with pytest.raises(StoreConflictError, match="was to follow 1, but 2 is committed"):
        await store.commit("p", 3, previous=1, term=TERM)
    assert (await store.committed("p")).generation == 2
    assert (await store.proposed("p")).generation == 3


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
    assert same(await store.committed("p"), layout_of(6, shift=3))
    assert await store.next_generation("p") == 9
    await store.adopt("p", layout_of(20), term=TERM)
    assert await store.next_generation("p") == 21


async def test_a_balancer_that_was_succeeded_can_write_nothing_that_matters(store):
    await store.put_proposed("p", layout_of(1), term=2)
    await store.put_membership("p", Membership(epoch=1, workers=("w",)), term=2)
    late = [
        store.put_proposed("p", layout_of(2), term=1),
        store.commit("p", 1, previous=None, term=1),
        store.adopt("p", layout_of(1), term=1),
        store.put_membership("p", Membership(epoch=2, workers=("w",)), term=1),
        store.put_proposed("other", layout_of(1), term=1),
        store.put_average("p", "slow", ONES, term=1),
        store.add_decision("p", A_DECISION, term=1),
        store.fence(term=1),
    ]
    for write in late:
        with pytest.raises(TermOverError, match="term 1 is over, a balancer of term 2") as caught:
            await write
        assert (caught.value.highest_term, caught.value.fault) == (2, StoreFault.CONFLICT)
    assert await store.average("p", "slow") is None
    assert await store.decisions("p", limit=1) == ()
    assert await store.committed("p") is None
    assert await store.next_generation("p") == 2
    assert (await store.membership("p")).epoch == 1
    await store.commit("p", 1, previous=None, term=3)


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


async def test_an_epoch_does_not_go_back(store):
    await store.put_membership("p", Membership(epoch=3, workers=("a",)), term=TERM)
    await store.put_membership("p", Membership(epoch=3, workers=("b",)), term=TERM)
    with pytest.raises(StoreConflictError, match="epoch 2 is over, the latest is 3"):
        await store.put_membership("p", Membership(epoch=2, workers=("a",)), term=TERM)
    assert (await store.membership("p")).workers == ("b",)


async def test_pools_do_not_see_each_other(store):
    await store.put_proposed("b", layout_of(7), term=TERM)
    await store.add_decision("a", A_DECISION, term=TERM)
    assert await store.pools() == ("a", "b")
    assert await store.next_generation("a") == 1
    assert await store.decisions("b", limit=1) == ()


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
    assert (await store.committed("p")).generation == 1


async def test_a_proposal_is_over_when_it_is_committed(store):
    await store.put_proposed("p", layout_of(1), term=TERM)
    assert (await store.proposed("p")).generation == 1
    await store.commit("p", 1, previous=None, term=TERM)
    assert await store.proposed("p") is None


# The SQLite file ----------------------------------------------------------------------------------


async def test_a_second_balancer_on_one_file_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.balancer.store.sqlite_file._LOCK_TIMEOUT_S", 0.0)
    first = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="held by another process"):
        SqliteStore(tmp_path / "state")
    await first.put_proposed("p", layout_of(1), term=TERM)
    await first.close()
    await SqliteStore(tmp_path / "state").close()


def test_a_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"this was never a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match=r"state is damaged \(file is not a database\): move it"):
        SqliteStore(path)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(StoreError, match="check that its folder exists"):
        SqliteStore(tmp_path / "nowhere" / "state")


def test_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "state"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


async def test_another_schema_version_is_refused_with_the_remedy(tmp_path):
    await SqliteStore(tmp_path / "state").close()
    poke(tmp_path / "state", f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="has schema version 4, this release reads 3: use the"):
        SqliteStore(tmp_path / "state")


async def test_a_file_of_the_first_version_is_read_as_it_was_meant_and_goes_on(tmp_path):
    path = tmp_path / "state"
    first = SqliteStore(path)
    await first.adopt("p", layout_of(1), term=TERM)
    await first.close()
    for statement in (
        "ALTER TABLE layouts DROP COLUMN share_of_slot",
        "ALTER TABLE pools DROP COLUMN num_audit",
        "ALTER TABLE pools DROP COLUMN hold",
        "DROP TABLE audit",
        "DROP TABLE commits",
        "PRAGMA user_version = 1",
    ):
        poke(path, statement)
    second = SqliteStore(path)
    assert same(await second.committed("p"), layout_of(1))
    assert await second.commits("p") == (1,)
    await second.add_audit("p", AN_ORDER, hold=Hold(paused="ann"), term=TERM)
    await second.adopt("p", weighted(layout_of(2)), term=TERM)
    await second.close()
    third = SqliteStore(path)
    assert same(await third.committed("p"), weighted(layout_of(2)))
    await third.close()


async def test_pages_that_were_overwritten_are_found_at_the_start(tmp_path):
    path = tmp_path / "state"
    store = SqliteStore(path)
    for generation in range(1, 40):
        await store.put_proposed("p", layout_of(generation), term=TERM)
    await store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        SqliteStore(path)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE layouts SET expert_of_slot = x'00'",
        "UPDATE layouts SET expert_of_slot = zeroblob(length(expert_of_slot))",
        "UPDATE layouts SET num_layers = 3",
        "UPDATE layouts SET share_of_slot = x'0001'",
        "UPDATE layouts SET share_of_slot = zeroblob(2 * 2 * 8)",
        "UPDATE layouts SET num_ranks = 0",
        "UPDATE layouts SET num_experts = 'six'",
        "DELETE FROM layouts",
    ],
)
async def test_a_senseless_layout_is_never_given_out(tmp_path, damage):
    store = SqliteStore(tmp_path / "state")
    await store.adopt("p", layout_of(1), term=TERM)
    await store.close()
    poke(tmp_path / "state", damage)
    store = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="is damaged"):
        await store.committed("p")
    await store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE averages SET tokens = x'0011223344556677'",
        "UPDATE averages SET num_experts = 5",
        "UPDATE averages SET half_life_s = 0",
        "UPDATE averages SET half_life_s = 'long'",
        f"UPDATE averages SET tokens = x'{np.full(12, np.nan).tobytes().hex()}'",
    ],
)
async def test_a_senseless_average_is_never_given_out(tmp_path, damage):
    store = SqliteStore(tmp_path / "state")
    await store.put_average("p", "slow", ONES, term=TERM)
    await store.close()
    poke(tmp_path / "state", damage)
    store = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="is damaged"):
        await store.average("p", "slow")
    await store.close()


def poke(path, statement):
    """Change the closed file behind the store's back."""
    database = sqlite3.connect(path)
    with database:
        database.execute(statement)
    database.close()
