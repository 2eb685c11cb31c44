"""`SqliteStore`: the store in one local file, the default of a single balancer."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.balancer.store.records import (
    Numbered,
    pack_entry,
    pack_hold,
    unpack_entry,
    unpack_hold,
    unpack_members,
    whole,
)
from equipoise.balancer.store.sqlite_file import SqliteFile
from equipoise.balancer.store.sqlite_rows import naming, unpack_average, unpack_layout
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    MAX_LAYOUTS,
    StoreAheadError,
    StoreConflictError,
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


class SqliteStore:
    """A `Store` in an SQLite file, which is created when missing and open until `close`.

    Raises:
        StoreError: the file cannot be opened, is damaged, belongs to another program or version,
            or is locked by another process.
    """

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path)
        self._db = self._file.db

    def reopen(self) -> None:
        """Do nothing: nobody replaces a file that is locked."""

    async def highest_term(self) -> int:
        """See `Store`."""
        return await self._file.read(self._file.highest_term)

    async def fence(self, *, term: int) -> None:
        """See `Store`."""
        await self._file.fence(term=term)

    async def pools(self) -> tuple[str, ...]:
        """See `Store`."""

        def read() -> tuple[str, ...]:
            return tuple(name for (name,) in self._db.execute("SELECT pool FROM pools"))

        return tuple(sorted(await self._file.read(read)))

    async def forget(self, pool: str, *, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            for table in ("pools", "layouts", "averages", "decisions", "commits", "audit"):
                self._db.execute(f"DELETE FROM {table} WHERE pool = ?", (pool,))  # noqa: S608 - ours

        await self._file.write(write, term=term, pool=pool)

    async def put_proposed(self, pool: str, layout: Layout, *, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            known = self._layout(pool, layout.generation)
            if known is not None and known.same_placement(layout):
                return
            highest = self._pool_value(pool, "highest") or 0
            if layout.generation <= highest:
                raise StoreConflictError(
                    f"pool {pool}: generation {layout.generation} was used before, the next is "
                    f"{highest + 1}"
                )
            self._put_layout(pool, layout)

        await self._file.write(write, term=term, pool=pool)

    async def commit(self, pool: str, generation: int, *, previous: int | None, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            committed = self._pool_value(pool, "committed")
            if committed == generation:
                return
            if committed != previous:
                raise StoreConflictError(
                    f"pool {pool}: generation {generation} must follow {previous}, but "
                    f"{committed} is committed"
                )
            if self._layout(pool, generation) is None:
                raise StoreConflictError(f"pool {pool}: generation {generation} was never proposed")
            self._set_committed(pool, generation)

        await self._file.write(write, term=term, pool=pool)

    async def adopt(self, pool: str, layout: Layout, *, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            self._set_pool(pool, committed=layout.generation)  # So that it is kept, however old.
            self._put_layout(pool, layout)
            self._set_committed(pool, layout.generation)

        await self._file.write(write, term=term, pool=pool)

    async def recall(self, pool: str) -> PoolMemory:
        """See `Store`."""

        def read() -> PoolMemory:
            values = self._pool_values(pool)
            decisions = self._latest("decisions", DecisionRecord, pool, limit=1)
            with naming("highest"):
                next_generation = whole("it", values.get("highest") or 0) + 1
            with naming("num_audit"):
                last_audit = whole("it", values.get("num_audit") or 0)
            with naming("epoch or workers"):
                epoch = values.get("epoch")
                members = None if epoch is None else unpack_members(epoch, values["workers"])
            with naming("hold"):
                hold = values.get("hold")
                held = Hold() if hold is None else unpack_hold(hold)
            return PoolMemory(
                committed=self._committed(pool, values.get("committed")),
                proposed=self._proposed(pool),
                next_generation=next_generation,
                members=members,
                averages=dict(self._averages(pool)),
                last_decision=decisions[0] if decisions else None,
                hold=held,
                audit=self._latest("audit", AuditRecord, pool, limit=MAX_AUDIT),
                last_audit=last_audit,
            )

        return await self._file.read(read, pool=pool)

    async def layout(self, pool: str, generation: int) -> Layout | None:
        """See `Store`."""
        return await self._file.read(lambda: self._layout(pool, generation), pool=pool)

    async def put_membership(self, pool: str, members: EpochMembers, *, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            latest = self._pool_value(pool, "epoch")
            if latest is not None and latest > members.epoch:
                raise StoreConflictError(
                    f"pool {pool}: epoch {members.epoch} is over, the latest is {latest}"
                )
            self._set_pool(pool, epoch=members.epoch, workers=json.dumps(members.workers))

        await self._file.write(write, term=term, pool=pool)

    async def put_average(self, pool: str, name: str, record: AverageRecord, *, term: int) -> None:
        """See `Store`."""
        num_layers, num_experts = record.decayed_load.shape
        decayed_load = record.decayed_load.astype("<f8", copy=False).tobytes()
        numbers = (record.half_life_s, record.time_unix_s, record.weight_s)

        def write() -> None:
            self._know(pool)
            self._db.execute(
                "INSERT OR REPLACE INTO averages VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (pool, name, *numbers, num_layers, num_experts, decayed_load),
            )

        await self._file.write(write, term=term, pool=pool)

    async def add_decision(
        self, pool: str, decision: DecisionRecord, *, term: int
    ) -> DecisionRecord:
        """See `Store`."""

        def write() -> DecisionRecord:
            self._know(pool)
            numbered = replace(decision, sequence=self._pool_value(pool, "num_decisions") + 1)
            self._append_decision(pool, numbered)
            return numbered

        return await self._file.write(write, term=term, pool=pool)

    async def decisions(self, pool: str, *, limit: int) -> tuple[DecisionRecord, ...]:
        """See `Store`."""
        return await self._file.read(
            lambda: self._latest("decisions", DecisionRecord, pool, limit=limit), pool=pool
        )

    async def commits(self, pool: str) -> tuple[int, ...]:
        """See `Store`."""

        def read() -> tuple[int, ...]:
            rows = self._db.execute(
                "SELECT generation FROM commits JOIN layouts USING (pool, generation)"
                " WHERE pool = ? ORDER BY generation",
                (pool,),
            )
            return tuple(generation for (generation,) in rows)

        return await self._file.read(read, pool=pool)

    async def add_audit(
        self, pool: str, record: AuditRecord, *, hold: Hold | None, after: int, term: int
    ) -> AuditRecord:
        """See `Store`."""

        def write() -> AuditRecord:
            self._know(pool)
            self._check_audit(pool, after)
            sequence = 1 + max(after, self._pool_value(pool, "num_audit"))
            numbered = replace(record, sequence=sequence)
            self._append_audit(pool, numbered)
            if hold is not None:
                self._set_pool(pool, hold=pack_hold(hold))
            return numbered

        return await self._file.write(write, term=term, pool=pool)

    async def audit(self, pool: str, *, limit: int) -> tuple[AuditRecord, ...]:
        """See `Store`."""
        return await self._file.read(
            lambda: self._latest("audit", AuditRecord, pool, limit=limit), pool=pool
        )

    async def restore(self, pool: str, lost: ForgottenRecords, *, term: int) -> None:
        """See `Store`."""

        def write() -> None:
            self._know(pool)
            self._check_audit(pool, lost.after)
            for record in lost.audit:
                self._append_audit(pool, record)
            decision, members = lost.decision, lost.members
            if decision and decision.sequence > self._pool_value(pool, "num_decisions"):
                self._append_decision(pool, decision)
            if members and members.epoch > (self._pool_value(pool, "epoch") or 0):
                self._set_pool(pool, epoch=members.epoch, workers=json.dumps(members.workers))
            if lost.next_generation > self._pool_value(pool, "highest"):
                self._set_pool(pool, highest=lost.next_generation - 1)
            if lost.hold is not None:
                self._set_pool(pool, hold=pack_hold(lost.hold))

        await self._file.write(write, term=term, pool=pool)

    async def close(self) -> None:
        """See `Store`."""
        await self._file.close()

    def _check_audit(self, pool: str, after: int) -> None:
        """Check the number of a pool's latest audit record."""
        (latest,) = self._db.execute(
            "SELECT coalesce(max(sequence), 0) FROM audit WHERE pool = ?", (pool,)
        ).fetchone()
        if latest != after:
            raise StoreAheadError(
                f"pool {pool}: the store has audit records that this balancer does not know"
            )

    def _append_audit(self, pool: str, record: AuditRecord) -> None:
        self._set_pool(pool, num_audit=record.sequence)
        self._append("audit", pool, record, num_kept=MAX_AUDIT_ENTRIES)

    def _append_decision(self, pool: str, record: DecisionRecord) -> None:
        self._set_pool(pool, num_decisions=record.sequence)
        self._append("decisions", pool, record, num_kept=MAX_DECISIONS)

    def _append(
        self, table: str, pool: str, record: AuditRecord | DecisionRecord, *, num_kept: int
    ) -> None:
        self._db.execute(
            f"INSERT INTO {table} VALUES (?, ?, ?)",  # noqa: S608 - tables are ours
            (pool, record.sequence, pack_entry(record)),
        )
        self._db.execute(
            f"DELETE FROM {table} WHERE pool = ? AND sequence <= ?",  # noqa: S608
            (pool, record.sequence - num_kept),
        )

    def _latest(
        self, table: str, kind: type[Numbered], pool: str, *, limit: int
    ) -> tuple[Numbered, ...]:
        """Numbered records of a table, newest first."""
        rows = self._db.execute(
            f"SELECT sequence, record FROM {table} WHERE pool = ?"  # noqa: S608 - tables are ours
            " ORDER BY sequence DESC LIMIT ?",
            (pool, max(0, limit)),
        )
        with naming(table):
            return tuple(unpack_entry(kind, sequence, record) for sequence, record in rows)

    def _know(self, pool: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO pools (pool) VALUES (?)", (pool,))

    def _pool_value(self, pool: str, column: str) -> Any:
        row = self._db.execute(
            f"SELECT {column} FROM pools WHERE pool = ?",  # noqa: S608 - columns are ours
            (pool,),
        ).fetchone()
        return None if row is None else row[0]

    def _pool_values(self, pool: str) -> dict[str, Any]:
        """The columns of a pool; none if it is unknown."""
        found = self._db.execute("SELECT * FROM pools WHERE pool = ?", (pool,))
        row, columns = found.fetchone(), [column[0] for column in found.description]
        return {} if row is None else dict(zip(columns, row, strict=True))

    def _set_pool(self, pool: str, **columns: int | str) -> None:
        self._know(pool)
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.execute(
            f"UPDATE pools SET {assignments} WHERE pool = ?",  # noqa: S608 - columns are ours
            (*columns.values(), pool),
        )

    def _set_committed(self, pool: str, generation: int) -> None:
        self._set_pool(pool, committed=generation)
        self._db.execute("INSERT OR IGNORE INTO commits VALUES (?, ?)", (pool, generation))
        # Commits of dropped layouts are dropped too.
        self._db.execute(
            "DELETE FROM commits WHERE pool = :pool AND generation NOT IN"
            " (SELECT generation FROM layouts WHERE pool = :pool)",
            {"pool": pool},
        )

    def _put_layout(self, pool: str, layout: Layout) -> None:
        self._know(pool)
        cells = layout.expert_of_slot.astype("<i4", copy=False).tobytes()
        shares = layout.share_of_slot
        self._db.execute(
            "INSERT OR REPLACE INTO layouts VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                pool,
                layout.generation,
                layout.num_layers,
                layout.num_experts,
                layout.num_ranks,
                cells,
                None if shares is None else shares.astype("<u2").tobytes(),
            ),
        )
        self._set_pool(pool, highest=max(layout.generation, self._pool_value(pool, "highest")))
        self._db.execute(
            "DELETE FROM layouts WHERE pool = :pool AND generation NOT IN"
            " (SELECT generation FROM layouts WHERE pool = :pool"
            "  ORDER BY generation DESC LIMIT :kept)"
            " AND generation IS NOT (SELECT committed FROM pools WHERE pool = :pool)",
            {"pool": pool, "kept": MAX_LAYOUTS},
        )

    def _committed(self, pool: str, generation: int | None) -> Layout | None:
        if generation is None:
            return None
        layout = self._layout(pool, generation)
        if layout is None:
            raise LookupError(f"layouts has no committed layout {generation}")
        return layout

    def _proposed(self, pool: str) -> Layout | None:
        row = self._db.execute(
            "SELECT max(generation) FROM layouts WHERE pool = ? AND generation >"
            " (SELECT coalesce(committed, 0) FROM pools WHERE pool = ?)",
            (pool, pool),
        ).fetchone()
        return None if row[0] is None else self._layout(pool, row[0])

    def _averages(self, pool: str) -> Iterator[tuple[str, AverageRecord]]:
        rows = self._db.execute(
            "SELECT name, half_life_s, time_unix_s, weight_s, num_layers, num_experts,"
            " decayed_load FROM averages WHERE pool = ?",
            (pool,),
        )
        for name, *row in rows:
            with naming(f"averages {name}"):
                yield name, unpack_average(tuple(row))

    def _layout(self, pool: str, generation: int) -> Layout | None:
        row = self._db.execute(
            "SELECT num_layers, num_experts, num_ranks, expert_of_slot, share_of_slot"
            " FROM layouts WHERE pool = ? AND generation = ?",
            (pool, generation),
        ).fetchone()
        with naming(f"layouts {generation}"):
            return None if row is None else unpack_layout(generation, row)
