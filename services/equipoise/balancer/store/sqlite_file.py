"""`SqliteFile`: an SQLite file with its lock, schema, thread and human-readable errors."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from equipoise.balancer.store.records import INVALID_RECORD
from equipoise.balancer.store.store import (
    StoreError,
    StoreFault,
    TermOverError,
    UnreadablePoolError,
    checked_term,
)

SCHEMA_VERSION = 4
"""Incremented with every change of the tables below; versions without an upgrade are rejected."""

_APPLICATION_ID = 0x45515053  # "EQPS": marks our files

_LOCK_TIMEOUT_S = 2.0
"""How long to wait for a lock, such as that of a predecessor that is shutting down."""

_OPERATIONS = """
CREATE TABLE commits (
    pool TEXT NOT NULL,
    generation INTEGER NOT NULL,           -- of a layout that all ranks ran
    PRIMARY KEY (pool, generation)
) WITHOUT ROWID;
CREATE TABLE audit (
    pool TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    record TEXT NOT NULL,                  -- JSON of the rest of an AuditRecord
    PRIMARY KEY (pool, sequence)
) WITHOUT ROWID;
"""
"""Tables of operations, and of the generations that they may roll back to."""

_SCHEMA = f"""{_OPERATIONS}
CREATE TABLE fence (term INTEGER NOT NULL);
INSERT INTO fence VALUES (0);
CREATE TABLE pools (
    pool TEXT PRIMARY KEY,
    committed INTEGER,                     -- generation that all ranks were last known to run
    highest INTEGER NOT NULL DEFAULT 0,    -- highest generation ever used
    epoch INTEGER,
    workers TEXT,                          -- JSON list of worker names in rank order
    num_decisions INTEGER NOT NULL DEFAULT 0,
    num_audit INTEGER NOT NULL DEFAULT 0,
    hold TEXT                              -- as `hold.py` packs it
) WITHOUT ROWID;
CREATE TABLE layouts (
    pool TEXT NOT NULL,
    generation INTEGER NOT NULL,
    num_layers INTEGER NOT NULL,
    num_experts INTEGER NOT NULL,
    num_ranks INTEGER NOT NULL,
    expert_of_slot BLOB NOT NULL,          -- int32 little-endian [layers, slots]
    share_of_slot BLOB,                    -- uint16 little-endian, same shape; null: even splits
    PRIMARY KEY (pool, generation)
) WITHOUT ROWID;
CREATE TABLE averages (
    pool TEXT NOT NULL,
    name TEXT NOT NULL,
    half_life_s REAL NOT NULL,
    time_unix_s REAL NOT NULL,
    weight_s REAL NOT NULL,
    num_layers INTEGER NOT NULL,
    num_experts INTEGER NOT NULL,
    decayed_load BLOB NOT NULL,            -- float64 little-endian [layers, experts]
    PRIMARY KEY (pool, name)
) WITHOUT ROWID;
CREATE TABLE decisions (
    pool TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    record TEXT NOT NULL,                  -- JSON of the rest of a DecisionRecord
    PRIMARY KEY (pool, sequence)
) WITHOUT ROWID;
"""  # noqa: S608 - constant

_UPGRADES = {
    1: "ALTER TABLE layouts ADD COLUMN share_of_slot BLOB;",
    2: f"""{_OPERATIONS}
ALTER TABLE pools ADD COLUMN num_audit INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pools ADD COLUMN hold TEXT;
INSERT INTO commits SELECT pool, committed FROM pools WHERE committed IS NOT NULL;
""",  # noqa: S608 - constant
    3: "ALTER TABLE averages RENAME COLUMN tokens TO decayed_load;",
}
"""Upgrades of a file from each version to the next one."""

_Result = TypeVar("_Result")


class SqliteFile:
    """An open file, created when missing; only work of `read` and `write` may use `db`.

    The file is locked while it is open, so a second balancer fails to open it. Work runs on one
    thread, so a slow disk delays no stream.

    Raises:
        StoreError: the file cannot be opened, is damaged, belongs to another program or version,
            or is locked by another process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            db = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            # Text that is damaged must be seen by the reader of its record.
            db.text_factory = lambda text: text.decode(errors="backslashreplace")
            self.db = db
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self.db.close()
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._pending: deque[_PendingWrite[Any]] = deque()

    async def read(self, work: Callable[[], _Result], *, pool: str = "") -> _Result:
        """Run `work`, which concerns only `pool` unless that is empty, on the store's thread.

        Raises:
            UnreadablePoolError: a row of the pool is invalid.
            StoreError: SQLite failed, or another row is invalid.
        """

        def explained() -> _Result:
            with self._explained(pool):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, explained)

    async def write(self, work: Callable[[], _Result], *, term: int, pool: str = "") -> _Result:
        """Run `work` in a transaction that is durable on return, or rolled back.

        Queued writes share a transaction, because hundreds of pools close their windows at once,
        and a disk syncs all of them as fast as one. A write that fails rolls back only itself.

        Raises:
            TermOverError: another `term` was fenced since.
            StoreError: as `read`.
        """
        return await self._written(_PendingWrite(work=work, term=term, pool=pool))

    async def fence(self, *, term: int) -> None:
        """Reject writes of all other terms from now on.

        Raises:
            TermOverError: this `term` or a higher one was fenced.
            StoreError: as `read`.
        """

        def work() -> None:
            self.db.execute("UPDATE fence SET term = ?", (term,))

        await self._written(_PendingWrite(work=work, term=term, pool="", fences=True))

    async def _written(self, write: "_PendingWrite[_Result]") -> _Result:
        self._pending.append(write)
        # The first call on the thread runs all writes that are queued by then.
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_all)
        if write.fault is not None:
            raise write.fault
        return write.result

    def highest_term(self) -> int:
        """Return the latest fenced term; only for work of `read` and `write`."""
        (highest,) = self.db.execute("SELECT term FROM fence").fetchone()
        return checked_term(highest)

    async def close(self) -> None:
        """Close the file and end its thread."""
        await self.read(self.db.close)
        self._thread.shutdown()

    def damaged(self, finding: str) -> StoreError:
        """Return the error for contents that no release wrote."""
        return StoreError(
            f"{self._path} is damaged ({finding}): move it away to start from what the "
            "workers report",
            fault=StoreFault.DAMAGED,
        )

    def _unreadable(self, pool: str, finding: str) -> UnreadablePoolError:
        return UnreadablePoolError(
            f"pool {pool} cannot be read from {self._path} ({finding}): stop the balancer, restore "
            "the file from a backup or delete the rows of the pool from all its tables, to start "
            "from what its workers report, and start it again"
        )

    def _prepare(self) -> None:
        # Lock first: another process may be writing.
        self.db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self.db.execute("BEGIN EXCLUSIVE")
        is_new = self.db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        self.db.execute("COMMIT")
        if not is_new:
            self._check_is_ours()
            self._upgrade()
        self.db.execute("PRAGMA journal_mode = WAL")
        # A generation must survive a power cut before a rank stages it.
        self.db.execute("PRAGMA synchronous = FULL")
        if is_new:
            self.db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID};"
                f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

    def _check_is_ours(self) -> None:
        (application,) = self.db.execute("PRAGMA application_id").fetchone()
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            raise StoreError(
                f"{self._path} is an SQLite file of another program: use another state file",
                fault=StoreFault.FOREIGN,
            )
        if version != SCHEMA_VERSION and version not in _UPGRADES:
            raise StoreError(
                f"{self._path} has schema version {version}, this release reads {SCHEMA_VERSION}: "
                "use the release that wrote it, or move the file away to start from what the "
                "workers report",
                fault=StoreFault.FOREIGN,
            )
        (finding,) = self.db.execute("PRAGMA quick_check(1)").fetchone()
        if finding != "ok":
            raise self.damaged(finding)

    def _upgrade(self) -> None:
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        for older in range(version, SCHEMA_VERSION):
            self.db.executescript(
                f"BEGIN; {_UPGRADES[older]} PRAGMA user_version = {older + 1}; COMMIT;"
            )

    @contextmanager
    def _explained(self, pool: str = "") -> Iterator[None]:
        """Turn errors of SQLite and of invalid rows into a StoreError with a remedy."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreError(
                    f"{self._path} is locked by another process: stop it, only one balancer can "
                    "use a state file"
                ) from error
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise StoreError(
                f"{self._path} cannot be used ({error}): check that its folder exists, is "
                "writable and has free space",
                fault=StoreFault.FULL if is_full else StoreFault.UNREACHABLE,
            ) from error
        except sqlite3.Error as error:
            raise self.damaged(str(error)) from error
        except INVALID_RECORD as error:
            raise (
                self._unreadable(pool, str(error)) if pool else self.damaged(str(error))
            ) from error

    def _write_all(self) -> None:
        """Run the queued writes in order in one transaction; each keeps its outcome."""
        writes = [self._pending.popleft() for _ in range(len(self._pending))]
        if not writes:
            return
        try:
            with self._explained():
                self.db.execute("BEGIN IMMEDIATE")
                for write in writes:
                    self._write_one(write)
                self.db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - each write raises it to its caller
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            for write in writes:
                write.fail(error)

    def _write_one(self, write: "_PendingWrite[Any]") -> None:
        self.db.execute("SAVEPOINT one")
        try:
            with self._explained():
                self._check_term(write)
            with self._explained(write.pool):
                write.run()
        except Exception as error:
            write.fail(error)
            if not self.db.in_transaction:
                raise  # A full disk, for example, rolls back the whole transaction.
            self.db.execute("ROLLBACK TO one")
        self.db.execute("RELEASE one")

    def _check_term(self, write: "_PendingWrite[Any]") -> None:
        term, highest = write.term, self.highest_term()
        if term <= highest if write.fences else term != highest:
            raise TermOverError(store=str(self._path), term=term, highest_term=highest)


@dataclass(slots=True, kw_only=True)
class _PendingWrite(Generic[_Result]):
    """A queued write; once it has run, it has a `fault` or a `result`."""

    work: Callable[[], _Result]
    term: int
    pool: str
    fences: bool = False
    fault: Exception | None = None
    result: _Result = field(init=False)

    def run(self) -> None:
        """Do the work."""
        self.result = self.work()

    def fail(self, error: Exception) -> None:
        """Record a failure; the first one counts."""
        self.fault = self.fault or error
