"""A damaged record makes its own pool unreadable, by name, and no other; nothing overwrites it.

The simulated store is not here: it keeps values, which nothing can damage.
"""

import json
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from redis import Redis

from equipoise.balancer.store.records import INVALID_RECORD, unpack_entry
from equipoise.balancer.store.redis_records import (
    pack_average,
    pack_layout,
    unpack_average,
    unpack_layout,
)
from equipoise.balancer.store.redis_store import HASH_TAG, RedisStore
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import StoreFault, UnreadablePoolError
from equipoise.pool.records import AuditRecord, EpochMembers, Hold, PoolMemory
from tests.support.store_records import A_DECISION, AN_ORDER, ONES, layout_of

TERM = 1
OWN = f"{HASH_TAG}:pool:bad"
HOLD = {"paused": "", "pinned": "", "pin": None, "pinned_generation": 0}
ENTRY = {"time_unix_s": 1.0, "who": "ann", "what": "pause", "accepted": True, "outcome": "paused"}

POOL_VALUES = {
    "a hold that is cut short": ("hold", '{"paused": "an'),
    "a hold of a number": ("hold", json.dumps({**HOLD, "paused": 7})),
    "a hold that is a list": ("hold", "[]"),
    "a pin without a layout": ("hold", json.dumps({**HOLD, "pinned": "ann"})),
    "a pin of other bytes": ("hold", json.dumps({**HOLD, "pinned": "ann", "pin": "/////w=="})),
    "a pin of a negative generation": ("hold", json.dumps({**HOLD, "pinned_generation": -1})),
    "JSON without an end": ("hold", "[" * 100_000),
    "text that is not UTF-8": ("hold", b"\xff\xfe"),
    "a pin of a generation that is a truth": (
        "hold",
        json.dumps({**HOLD, "pinned_generation": True}),
    ),
    "a pin of a generation without an end": (
        "hold",
        json.dumps({**HOLD, "pinned_generation": float("inf")}),
    ),
    "an epoch out of range": ("epoch", 2**60),
    "an epoch below 1": ("epoch", -3),
    "an epoch that is a word": ("epoch", "four"),
    "workers that are no list": ("workers", '"w"'),
    "a worker without a name": ("workers", '["w", ""]'),
    "a worker that is a number": ("workers", "[3]"),
    "a highest generation out of range": ("highest", 2**60),
    "a highest generation that is a word": ("highest", "many"),
    "a committed layout that is missing": ("committed", 9),
    "a committed layout that is a word": ("committed", "one"),
}
ENTRIES = {
    "a record that is cut short": '{"time_unix_s": 1.0',
    "a record that is a number": "3",
    "a record without its caller": json.dumps({**ENTRY, "who": None}),
    "a record that lacks a field": json.dumps({k: v for k, v in ENTRY.items() if k != "who"}),
    "a verdict that is a word": json.dumps({**ENTRY, "accepted": "yes"}),
    "half a character": json.dumps({**ENTRY, "who": "\ud800"}),
    "a time that is no number": json.dumps({**ENTRY, "time_unix_s": float("nan")}),
    "a time of very many digits": '{"time_unix_s": ' + "9" * 4000 + "}",
    "a time that is a truth": json.dumps({**ENTRY, "time_unix_s": True}),
    "a time without an end": json.dumps({**ENTRY, "time_unix_s": float("inf")}),
}


@dataclass
class SqliteFile:
    """A state file that an operator writes to while no balancer has it open."""

    path: Path

    def open(self):
        return SqliteStore(self.path)

    def run(self, statement, *values):
        with sqlite3.connect(self.path) as file:
            found = file.execute(statement, values).fetchall()
        file.close()
        return found

    def damage_value(self, name, value):
        value = value.decode("latin-1") if isinstance(value, bytes) else value
        self.run(f"UPDATE pools SET {name} = ? WHERE pool = 'bad'", value)

    def damage_audit(self, record):
        self.run("UPDATE audit SET record = ? WHERE pool = 'bad'", record)

    def damage_layout(self, num_experts):
        self.run("UPDATE layouts SET num_experts = ? WHERE pool = 'bad'", num_experts)

    def damage_average(self):
        self.run("UPDATE averages SET weight_s = -1 WHERE pool = 'bad'")

    def dump(self):
        tables = ("pools", "layouts", "averages", "decisions", "commits", "audit")
        return {table: self.run(f"SELECT * FROM {table} WHERE pool = 'bad'") for table in tables}

    def load(self, contents):
        for table, rows in contents.items():
            self.run(f"DELETE FROM {table} WHERE pool = 'bad'")
            for row in rows:
                self.run(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)


@dataclass
class Server:
    """A Redis server that an operator writes to."""

    url: str
    client: Redis

    def open(self):
        return RedisStore(self.url, timeout_s=20.0)

    def damage_value(self, name, value):
        self.client.hset(OWN, name, value)

    def damage_audit(self, record):
        self.client.delete(f"{OWN}:audit")
        self.client.xadd(f"{OWN}:audit", {"record": record}, id="1-0")

    def damage_layout(self, num_experts):
        packed = self.client.hget(f"{OWN}:layouts", "1")
        header, _, table = packed.partition(b"\n")
        changed = {**json.loads(header), "num_experts": num_experts}
        self.client.hset(f"{OWN}:layouts", "1", json.dumps(changed).encode() + b"\n" + table)

    def damage_average(self):
        packed = self.client.hget(f"{OWN}:averages", "slow")
        damaged = packed.replace(b'"weight_s": 1.0', b'"weight_s": -1.0')
        assert damaged != packed
        self.client.hset(f"{OWN}:averages", "slow", damaged)

    def dump(self):
        return {key: self.client.dump(key) for key in self.client.scan_iter(f"{OWN}*")}

    def load(self, contents):
        self.client.delete(*self.client.scan_iter(f"{OWN}*"))
        for key, packed in contents.items():
            self.client.restore(key, 0, packed)


@pytest.fixture(params=["sqlite", "redis"])
def place(request, tmp_path):
    if request.param == "sqlite":
        yield SqliteFile(tmp_path / "state")
        return
    url = request.getfixturevalue("redis_url")
    with Redis.from_url(url) as client:
        yield Server(url, client)


async def fill(place):
    store = place.open()
    await store.fence(term=TERM)
    for pool in ("bad", "good"):
        await store.adopt(pool, layout_of(1), term=TERM)
        await store.put_proposed(pool, layout_of(2), term=TERM)
        await store.put_membership(pool, EpochMembers(epoch=4, workers=("w",)), term=TERM)
        await store.put_average(pool, "slow", ONES, term=TERM)
        await store.add_decision(pool, A_DECISION, term=TERM)
        await store.add_audit(pool, AN_ORDER, hold=Hold(paused="ann"), after=0, term=TERM)
    await store.close()


async def check_unreadable(place, *, names=""):
    """One pool cannot be read, the other can, and the records are as they were damaged."""
    damaged = place.dump()
    store = place.open()
    await store.fence(term=TERM + 1)
    assert await store.pools() == ("bad", "good")
    assert (await store.recall("good")).hold.paused == "ann"
    with pytest.raises(UnreadablePoolError, match="pool bad cannot be read") as caught:
        await store.recall("bad")
    assert caught.value.fault is StoreFault.DAMAGED
    assert names in str(caught.value)
    assert "to start from what its workers report" in str(caught.value)
    await store.close()
    assert place.dump() == damaged


async def test_a_pool_can_be_read_once_its_records_are_repaired_or_deleted(place):
    await fill(place)
    before = place.dump()
    place.damage_value("hold", "{")
    await check_unreadable(place)
    place.load(before)
    store = place.open()
    repaired = await store.recall("bad")
    assert (repaired.committed.generation, repaired.proposed.generation) == (1, 2)
    assert (repaired.hold.paused, repaired.members.epoch) == ("ann", 4)
    assert repaired.last_decision == replace(A_DECISION, sequence=1)
    await store.close()
    place.load({name: [] for name in before} if isinstance(place, SqliteFile) else {})
    store = place.open()
    assert await store.recall("bad") == replace(PoolMemory(), hold=ANY)
    assert (await store.recall("good")).hold.paused == "ann"
    await store.close()


@pytest.mark.parametrize(("name", "value"), POOL_VALUES.values(), ids=POOL_VALUES)
async def test_a_damaged_value_is_named_with_its_pool(place, name, value):
    await fill(place)
    place.damage_value(name, value)
    await check_unreadable(place, names="layouts" if name == "committed" else name)


@pytest.mark.parametrize("record", ENTRIES.values(), ids=ENTRIES)
async def test_a_damaged_audit_record_is_named_with_its_pool(place, record):
    await fill(place)
    place.damage_audit(record)
    await check_unreadable(place, names="audit")


@pytest.mark.parametrize("field", ["num_layers", "num_experts", "num_ranks", "table_bytes"])
@pytest.mark.parametrize("value", [True, None, -1, 1.0, float("nan"), float("inf"), 10**400, "1"])
def test_a_number_of_a_packed_layout_is_a_whole_number(field, value):
    header, _, table = pack_layout(layout_of(1)).partition(b"\n")
    changed = json.dumps({**json.loads(header), field: value}).encode()
    with pytest.raises(INVALID_RECORD):
        unpack_layout(1, changed + b"\n" + table)


@pytest.mark.parametrize("field", ["num_layers", "num_experts", "weight_s", "half_life_s"])
@pytest.mark.parametrize("value", [True, None, -1, float("nan"), float("inf"), 10**400, "1"])
def test_a_number_of_a_packed_average_is_in_range(field, value):
    header, _, table = pack_average(ONES).partition(b"\n")
    changed = json.dumps({**json.loads(header), field: value}).encode()
    with pytest.raises(INVALID_RECORD):
        unpack_average(changed + b"\n" + table)


@pytest.mark.parametrize("num_experts", [0, -1, 7, 10**15, "six"])
async def test_a_layout_for_other_experts_is_named_with_its_pool(place, num_experts):
    """Also one for so many that their table would not fit into memory."""
    await fill(place)
    place.damage_layout(num_experts)
    await check_unreadable(place, names="layouts")


async def test_a_negative_average_is_named_with_its_pool(place):
    await fill(place)
    place.damage_average()
    await check_unreadable(place, names="averages slow")


@pytest.mark.parametrize("key", [OWN, f"{OWN}:layouts", f"{OWN}:averages", f"{OWN}:audit"])
async def test_a_key_of_another_kind_makes_only_its_pool_unreadable(redis_url, key):
    with Redis.from_url(redis_url) as client:
        place = Server(redis_url, client)
        await fill(place)
        client.delete(key)
        client.set(key, "what a program wrote that is not ours")
        await check_unreadable(place, names="(one of its keys: WRONGTYPE")


async def test_a_generation_that_a_script_cannot_compare_makes_only_its_pool_unreadable(redis_url):
    with Redis.from_url(redis_url) as client:
        place = Server(redis_url, client)
        await fill(place)
        client.hset(f"{OWN}:layouts", "newest", b"")
        await check_unreadable(place, names="attempt to compare")


async def test_a_pools_name_that_is_not_utf_8_hides_no_other_pool(redis_url):
    with Redis.from_url(redis_url) as client:
        place = Server(redis_url, client)
        await fill(place)
        client.sadd(f"{HASH_TAG}:pools", b"\xff")
        store = place.open()
        assert await store.pools() == (r"\xff", "bad", "good")
        assert (await store.recall("good")).hold.paused == "ann"
        await store.close()


def test_what_only_a_later_release_knows_of_an_entry_is_left_out():
    """Else a pool could not be led after the control plane was rolled back."""
    packed = json.dumps({**ENTRY, "ticket": "OPS-1"})
    assert unpack_entry(AuditRecord, 7, packed) == AuditRecord(**ENTRY, sequence=7)
