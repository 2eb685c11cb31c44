"""A state file that is in use, foreign, damaged or of an older release gives a clear error."""

import asyncio
import sqlite3
import threading

import numpy as np
import pytest

from equipoise.balancer.store.sqlite_file import SCHEMA_VERSION, SqliteFile
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import StoreError, StoreFault, TermOverError
from equipoise.pool.records import Hold
from tests.support.store_records import AN_ORDER, ONES, layout_of, same, weighted

TERM = 1


async def test_a_second_balancer_on_one_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.balancer.store.sqlite_file._LOCK_TIMEOUT_S", 0.0)
    first = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="locked by another process"):
        SqliteStore(tmp_path / "state")
    await first.fence(term=TERM)
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


async def test_a_full_disk_takes_no_half_of_a_write_and_is_written_to_again_with_room(tmp_path):
    store = SqliteStore(tmp_path / "state")
    await store.fence(term=TERM)
    await store.put_proposed("p", layout_of(1), term=TERM)
    await store.commit("p", 1, previous=None, term=TERM)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"full.*has free space") as caught:
        await propose_many(store)
    assert caught.value.fault is StoreFault.FULL
    assert (await store.recall("p")).committed.generation == 1
    written = (await store.recall("p")).proposed.generation
    assert (await store.recall("p")).next_generation == written + 1
    store._db.execute("PRAGMA max_page_count = 100000")
    await store.put_proposed("p", layout_of(written + 1), term=TERM)
    await store.close()
    reopened = SqliteStore(tmp_path / "state")
    assert (await reopened.recall("p")).proposed.generation == written + 1
    await reopened.close()


async def propose_many(store):
    for generation in range(2, 500):
        await store.put_proposed("p", layout_of(generation), term=TERM)


def test_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "state"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


async def test_another_schema_version_is_rejected_with_the_remedy(tmp_path):
    await SqliteStore(tmp_path / "state").close()
    poke(tmp_path / "state", f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="has schema version 5, this release reads 4: use the"):
        SqliteStore(tmp_path / "state")


async def test_a_file_of_the_first_version_is_upgraded_and_used(tmp_path):
    path = tmp_path / "state"
    first = SqliteStore(path)
    await first.fence(term=TERM)
    await first.adopt("p", layout_of(1), term=TERM)
    await first.close()
    for statement in (
        "ALTER TABLE layouts DROP COLUMN share_of_slot",
        "ALTER TABLE pools DROP COLUMN num_audit",
        "ALTER TABLE pools DROP COLUMN hold",
        "DROP TABLE audit",
        "DROP TABLE commits",
        "ALTER TABLE averages RENAME COLUMN decayed_load TO tokens",
        "PRAGMA user_version = 1",
    ):
        poke(path, statement)
    second = SqliteStore(path)
    assert same((await second.recall("p")).committed, layout_of(1))
    assert await second.commits("p") == (1,)
    await second.add_audit("p", AN_ORDER, hold=Hold(paused="ann"), after=0, term=TERM)
    await second.adopt("p", weighted(layout_of(2)), term=TERM)
    await second.close()
    third = SqliteStore(path)
    assert same((await third.recall("p")).committed, weighted(layout_of(2)))
    await third.close()


async def test_pages_that_were_overwritten_are_found_at_the_start(tmp_path):
    path = tmp_path / "state"
    store = SqliteStore(path)
    await store.fence(term=TERM)
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
    await store.fence(term=TERM)
    await store.adopt("p", layout_of(1), term=TERM)
    await store.close()
    poke(tmp_path / "state", damage)
    store = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="pool p cannot be read"):
        await store.recall("p")
    await store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE averages SET decayed_load = x'0011223344556677'",
        "UPDATE averages SET num_experts = 5",
        "UPDATE averages SET half_life_s = 0",
        "UPDATE averages SET half_life_s = 'long'",
        f"UPDATE averages SET decayed_load = x'{np.full(12, np.nan).tobytes().hex()}'",
    ],
)
async def test_a_senseless_average_is_never_given_out(tmp_path, damage):
    store = SqliteStore(tmp_path / "state")
    await store.fence(term=TERM)
    await store.put_average("p", "slow", ONES, term=TERM)
    await store.close()
    poke(tmp_path / "state", damage)
    store = SqliteStore(tmp_path / "state")
    with pytest.raises(StoreError, match="pool p cannot be read"):
        (await store.recall("p")).averages.get("slow")
    await store.close()


@pytest.mark.parametrize("term", [2**31, 2**53 + 4, -1, 1.5, "9e999", "'two'"])
async def test_a_fence_that_no_leader_can_have_set_is_named_and_never_lowered(tmp_path, term):
    await SqliteStore(tmp_path / "state").close()
    poke(tmp_path / "state", f"UPDATE fence SET term = {term}")
    store = SqliteStore(tmp_path / "state")
    for call in (store.fence(term=2), store.highest_term()):
        with pytest.raises(StoreError, match=r"is damaged .term .* is not .* move it away") as it:
            await call
        assert it.value.fault is StoreFault.DAMAGED
    await store.close()


def poke(path, statement):
    """Change the closed file behind the store's back."""
    database = sqlite3.connect(path)
    with database:
        database.execute(statement)
    database.close()


async def at_once(file, *writes):
    """Outcomes of writes, (work, term) each, that arrived while the store was busy."""
    gate = threading.Event()
    busy = asyncio.create_task(file.read(gate.wait))
    asked = [asyncio.create_task(file.write(work, term=term)) for work, term in writes]
    await asyncio.sleep(0)
    gate.set()
    await busy
    return await asyncio.gather(*asked, return_exceptions=True)


def knowing(file, pool):
    """Work that writes a pool down, which must be new."""

    def work():
        file.db.execute("INSERT INTO pools (pool) VALUES (?)", (pool,))
        return pool

    return work


async def test_writes_that_wait_are_made_durable_together_and_fail_alone(tmp_path):
    file = SqliteFile(tmp_path / "state")
    await file.fence(term=TERM)
    statements = []
    file.db.set_trace_callback(statements.append)
    writes = [(knowing(file, name), TERM) for name in ("a", "b", "b", "c")]
    outcomes = await at_once(file, *writes, (knowing(file, "d"), TERM - 1))
    assert outcomes[:2] == ["a", "b"]
    assert isinstance(outcomes[2], StoreError), "there is a pool of that name already"
    assert outcomes[3] == "c"
    assert isinstance(outcomes[4], TermOverError)
    assert statements.count("COMMIT") == 1
    await file.close()
    again = SqliteStore(tmp_path / "state")
    assert await again.pools() == ("a", "b", "c")
    await again.close()


async def test_a_write_that_undoes_the_transaction_fails_all_that_were_in_it(tmp_path):
    file = SqliteFile(tmp_path / "state")
    await file.fence(term=TERM)

    def undo():
        # What SQLite does by itself when the disk is full.
        file.db.execute("ROLLBACK")
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    works = (knowing(file, "a"), undo, knowing(file, "b"))
    outcomes = await at_once(file, *((work, TERM) for work in works))
    assert all(isinstance(outcome, StoreError) for outcome in outcomes)
    assert await file.write(knowing(file, "a"), term=TERM) == "a", "it was not there"
    await file.close()
