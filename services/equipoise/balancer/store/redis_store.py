"""`RedisStore`: the store that several balancers share; each step is a script of `redis_scripts`.

All keys have one hash tag, so that a cluster stores them together and one script can check the
term, which all pools share, and write a pool. A write survives what the server's persistence
survives (`appendfsync always` for a power cut). Data loss is detected: the contents have a random
name, the incarnation, which every step checks.
"""

import json
import logging
import secrets
from asyncio import Lock
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from equipoise.balancer.store import redis_scripts as scripts
from equipoise.balancer.store.records import (
    INVALID_RECORD,
    pack_entry,
    pack_hold,
    unpack_hold,
    unpack_members,
    whole,
)
from equipoise.balancer.store.redis_link import RedisLink
from equipoise.balancer.store.redis_records import (
    pack_average,
    pack_layout,
    unpack_average,
    unpack_layout,
    unpack_stream,
)
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    MAX_LAYOUTS,
    StoreAheadError,
    StoreConflictError,
    StoreError,
    StoreFault,
    TermOverError,
    UnreadablePoolError,
    checked_term,
)
from equipoise.planning.layout import Layout
from equipoise.pool.records import (
    MAX_AUDIT,
    AuditRecord,
    AverageRecord,
    DecisionRecord,
    EpochMembers,
    ForgottenRecords,
    Hold,
    PoolMemory,
)

SCHEMA_VERSION = 3
"""Incremented with every change of keys or records; later versions are rejected, and earlier ones
become this one when a balancer leads."""

OLDEST_VERSION = 1
"""Oldest version whose records can be read: layouts without shares are even splits, and missing
audit records mean none."""

_log = logging.getLogger(__name__)

_READABLE = {str(version).encode() for version in range(OLDEST_VERSION, SCHEMA_VERSION + 1)}

HASH_TAG = "{equipoise}"
"""Prefix of every key. Fleets that share a server need separate databases."""

REQUEST_TIMEOUT_S = 2.0
"""Timeout of one step."""

_OF_RECORDS = {StoreFault.DAMAGED, StoreFault.FOREIGN}
"""Faults of a script on the keys of a pool, which are due to them."""


class RedisStore:
    """A `Store` in the Redis server at `url`; connects on first use.

    Raises:
        StoreError: the URL is not valid, or the password file cannot be read.
    """

    def __init__(
        self, url: str, *, timeout_s: float = REQUEST_TIMEOUT_S, password_file: str = ""
    ) -> None:
        self._link = RedisLink(url, timeout_s=timeout_s, password_file=password_file)
        self._incarnation: bytes | None = None
        self._opening = Lock()

    def reopen(self) -> None:
        """See `Store`."""
        self._incarnation = None

    async def highest_term(self) -> int:
        """See `Store`."""
        (term,) = await self._read("", scripts.HIGHEST_TERM)
        return self._term(term)

    async def fence(self, *, term: int) -> None:
        """See `Store`."""
        await self._write("", scripts.FENCE, SCHEMA_VERSION, term=term)

    async def pools(self) -> tuple[str, ...]:
        """See `Store`."""
        (names,) = await self._read("", scripts.POOLS)
        return tuple(sorted(name.decode(errors="backslashreplace") for name in names))

    async def forget(self, pool: str, *, term: int) -> None:
        """See `Store`."""
        await self._write(pool, scripts.FORGET, term=term)

    async def put_proposed(self, pool: str, layout: Layout, *, term: int) -> None:
        """See `Store`."""
        answer, *rest = await self._step(
            pool,
            scripts.PUT_PROPOSED,
            layout.generation,
            pack_layout(layout),
            MAX_LAYOUTS,
            term=term,
        )
        if answer == b"used":
            with self._sensing(pool, "highest"):
                highest = whole("it", rest[0])
            raise StoreConflictError(
                f"pool {pool}: generation {layout.generation} was used before, the next is "
                f"{highest + 1}"
            )

    async def commit(self, pool: str, generation: int, *, previous: int | None, term: int) -> None:
        """See `Store`."""
        before = "" if previous is None else previous
        answer, *rest = await self._step(pool, scripts.COMMIT, generation, before, term=term)
        if answer == b"other":
            raise StoreConflictError(
                f"pool {pool}: generation {generation} must follow {previous}, but "
                f"{rest[0].decode() or None} is committed"
            )
        if answer == b"unknown":
            raise StoreConflictError(f"pool {pool}: generation {generation} was never proposed")

    async def adopt(self, pool: str, layout: Layout, *, term: int) -> None:
        """See `Store`."""
        packed = pack_layout(layout)
        await self._write(pool, scripts.ADOPT, layout.generation, packed, MAX_LAYOUTS, term=term)

    async def recall(self, pool: str) -> PoolMemory:
        """See `Store`."""
        found = await self._read(pool, scripts.RECALL, MAX_AUDIT)
        committed, its_layout, proposed, newest, highest, hold, epoch, workers, *rest = found
        num_audit, averages, decisions, audit = rest
        if committed is not None and its_layout is None:
            missing = committed.decode(errors="backslashreplace")
            raise self._unreadable(pool, f"layouts has no committed layout {missing}")
        with self._sensing(pool, "decisions"):
            latest = unpack_stream(DecisionRecord, decisions)
        with self._sensing(pool, "audit"):
            requests = unpack_stream(AuditRecord, audit)
        with self._sensing(pool, "num_audit"):
            last_audit = whole("it", num_audit)
        with self._sensing(pool, "highest"):
            next_generation = whole("it", highest) + 1
        with self._sensing(pool, "epoch or workers"):
            members = None if epoch is None else unpack_members(epoch, workers)
        with self._sensing(pool, "hold"):
            held = Hold() if hold is None else unpack_hold(hold)
        return PoolMemory(
            committed=self._layout(pool, committed, its_layout),
            proposed=self._layout(pool, proposed, newest),
            next_generation=next_generation,
            members=members,
            averages=dict(self._averages(pool, averages)),
            last_decision=latest[0] if latest else None,
            hold=held,
            audit=requests,
            last_audit=last_audit,
        )

    async def layout(self, pool: str, generation: int) -> Layout | None:
        """See `Store`."""
        return self._layout(pool, *await self._read(pool, scripts.LAYOUT, generation))

    async def put_membership(self, pool: str, members: EpochMembers, *, term: int) -> None:
        """See `Store`."""
        workers = json.dumps(members.workers)
        answer, *rest = await self._step(
            pool, scripts.PUT_MEMBERSHIP, members.epoch, workers, term=term
        )
        if answer == b"later":
            with self._sensing(pool, "epoch"):
                latest = whole("it", rest[0])
            raise StoreConflictError(
                f"pool {pool}: epoch {members.epoch} is over, the latest is {latest}"
            )

    async def put_average(self, pool: str, name: str, record: AverageRecord, *, term: int) -> None:
        """See `Store`."""
        await self._write(pool, scripts.PUT_AVERAGE, name, pack_average(record), term=term)

    async def add_decision(
        self, pool: str, decision: DecisionRecord, *, term: int
    ) -> DecisionRecord:
        """See `Store`."""
        (sequence,) = await self._write(
            pool, scripts.ADD_DECISION, pack_entry(decision), MAX_DECISIONS, term=term
        )
        return replace(decision, sequence=int(sequence))

    async def decisions(self, pool: str, *, limit: int) -> tuple[DecisionRecord, ...]:
        """See `Store`."""
        (entries,) = await self._read(pool, scripts.DECISIONS, max(0, limit))
        with self._sensing(pool, "decisions"):
            return unpack_stream(DecisionRecord, entries or ())

    async def commits(self, pool: str) -> tuple[int, ...]:
        """See `Store`."""
        (generations,) = await self._read(pool, scripts.COMMITS)
        with self._sensing(pool, "commits"):
            return tuple(sorted(whole("one", one) for one in generations))

    async def add_audit(
        self, pool: str, record: AuditRecord, *, hold: Hold | None, after: int, term: int
    ) -> AuditRecord:
        """See `Store`."""
        (sequence,) = await self._write(
            pool,
            scripts.ADD_AUDIT,
            after,
            pack_entry(record),
            MAX_AUDIT_ENTRIES,
            "" if hold is None else pack_hold(hold),
            term=term,
        )
        return replace(record, sequence=int(sequence))

    async def audit(self, pool: str, *, limit: int) -> tuple[AuditRecord, ...]:
        """See `Store`."""
        (entries,) = await self._read(pool, scripts.AUDIT, max(0, limit))
        with self._sensing(pool, "audit"):
            return unpack_stream(AuditRecord, entries or ())

    async def restore(self, pool: str, lost: ForgottenRecords, *, term: int) -> None:
        """See `Store`."""
        entries = (*lost.audit, *(() if lost.decision is None else (lost.decision,)))
        members = lost.members or EpochMembers(epoch=0, workers=())
        await self._write(
            pool,
            scripts.RESTORE,
            lost.after,
            "" if lost.hold is None else pack_hold(lost.hold),
            len(lost.audit),
            MAX_AUDIT_ENTRIES,
            MAX_DECISIONS,
            members.epoch,
            json.dumps(members.workers),
            max(0, lost.next_generation - 1),
            *(part for one in entries for part in (one.sequence, pack_entry(one))),
            term=term,
        )

    async def close(self) -> None:
        """See `Store`."""
        await self._link.close()

    async def _read(self, pool: str, script: str, *arguments: str | int | bytes) -> list[Any]:
        _, *values = await self._step(pool, script, *arguments, term="")
        return values

    async def _write(
        self, pool: str, script: str, *arguments: str | int | bytes, term: int
    ) -> list[Any]:
        _, *values = await self._step(pool, script, *arguments, term=term)
        return values

    async def _step(
        self, pool: str, script: str, *arguments: str | int | bytes, term: int | str
    ) -> list[Any]:
        """Run a script; return its status word, then its values."""
        is_own = term != "" and script is not scripts.FENCE
        script = (scripts.OWN_TERM if is_own else "") + script
        incarnation = await self._open()
        try:
            answer, *values = await self._run(
                scripts.PRELUDE + script, _keys(pool), (incarnation, term, pool, *arguments)
            )
        except StoreError as error:
            if pool and error.fault in _OF_RECORDS:
                raise self._unreadable(pool, f"one of its keys: {error.__cause__}") from error
            raise
        if answer == b"over":
            assert isinstance(term, int), "reads have no term"
            highest_term = self._term(values[0])
            raise TermOverError(store=self._link.name, term=term, highest_term=highest_term)
        if answer == b"ahead":
            raise StoreAheadError(
                f"pool {pool}: {self._link.name} has audit records that this balancer does not know"
            )
        if answer == b"lost":
            raise StoreError(
                f"{self._link.name} was emptied or replaced since this balancer read it: "
                "reading everything again and asking the workers what they run",
                fault=StoreFault.LOST,
            )
        return [answer, *values]

    async def _open(self) -> bytes:
        """Return the incarnation of the contents, which are created when missing."""
        async with self._opening:
            if self._incarnation is None:
                schema, found = await self._run(
                    scripts.OPEN,
                    _keys("")[:1],
                    (secrets.token_hex(8), SCHEMA_VERSION),
                )
                if schema not in _READABLE or found is None:
                    raise StoreError(
                        f"{self._link.name} has schema version "
                        f"{'unknown' if schema is None else schema.decode(errors='replace')}, this "
                        f"release reads {SCHEMA_VERSION}: use the release that wrote it, or "
                        "another database to start from what the workers report",
                        fault=StoreFault.FOREIGN,
                    )
                self._incarnation = found
                await self._warn_of_eviction()
            return self._incarnation

    async def _warn_of_eviction(self) -> None:
        """Warn if a full server would delete some of this store's keys and keep others."""
        try:
            async with self._link.request():
                memory = await self._link.redis.info("memory")
        except StoreError:  # This account may not ask.
            return
        policy = str(memory.get("maxmemory_policy", ""))
        if memory.get("maxmemory") and policy.startswith("allkeys-"):
            _log.warning(
                "%s deletes keys when it is full (maxmemory-policy %s), after which pools cannot "
                "be read: set maxmemory-policy to noeviction",
                self._link.name,
                policy,
            )

    async def _run(
        self, script: str, keys: tuple[str, ...], arguments: tuple[str | int | bytes, ...]
    ) -> list[Any]:
        async with self._link.request():
            registered = self._link.redis.register_script(script)
            answer: list[Any] = await registered(keys=keys, args=arguments)
            return answer

    def _layout(self, pool: str, generation: bytes | None, packed: bytes | None) -> Layout | None:
        if generation is None or packed is None:
            return None
        with self._sensing(pool, f"layouts {generation.decode(errors='backslashreplace')}"):
            return unpack_layout(generation, packed)

    def _averages(self, pool: str, found: Sequence[bytes]) -> Iterator[tuple[str, AverageRecord]]:
        for key, packed in zip(found[::2], found[1::2], strict=True):
            name = key.decode(errors="backslashreplace")
            with self._sensing(pool, f"averages {name}"):
                yield name, unpack_average(packed)

    def _term(self, found: bytes) -> int:
        """Return a stored term; raise StoreError if no leader can have written it."""
        try:
            return checked_term(found)
        except ValueError as error:
            raise StoreError(
                f"{self._link.name} is damaged (highest term: {error}): empty its database, or "
                "use another, to start from what the workers report",
                fault=StoreFault.DAMAGED,
            ) from error

    @contextmanager
    def _sensing(self, pool: str, what: str) -> Iterator[None]:
        """Raise UnreadablePoolError if the record that is unpacked meanwhile is invalid."""
        try:
            yield
        except INVALID_RECORD as error:
            raise self._unreadable(pool, f"{what}: {error}") from error

    def _unreadable(self, pool: str, finding: str) -> UnreadablePoolError:
        key = _keys(pool)[2]
        return UnreadablePoolError(
            f"pool {pool} cannot be read from {self._link.name} ({finding}): restore its keys, "
            f"{key} and {key}:*, from a backup, or delete them to start from what its workers "
            "report"
        )


def _keys(pool: str) -> tuple[str, ...]:
    """Return the keys in the order of `PRELUDE`."""
    # The name is escaped, so that no key of a pool named a:layouts is one of pool a.
    own = f"{HASH_TAG}:pool:{quote(pool, safe='/ ')}"
    return (
        f"{HASH_TAG}:meta",
        f"{HASH_TAG}:pools",
        own,
        f"{own}:layouts",
        f"{own}:averages",
        f"{own}:decisions",
        f"{own}:commits",
        f"{own}:audit",
    )
