"""`SqliteFile`: one SQLite file of ours, its lock, its schema's version and its faults in words.

Owns the connection and the thread it is used on. Knows the tables, not what their rows mean.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from equipoise.balancer.store.store import StoreError, StoreFault, TermOverError
from equipoise.planning.errors import InvalidLayoutError

SCHEMA_VERSION = 4
"""Raised with every change of the tables below; versions without an upgrade are refused, never
guessed at."""

_APPLICATION_ID = 0x45515053  # "EQPS": tells our files from other programs' SQLite files

_LOCK_TIMEOUT_S = 2.0
"""How long a file that another process holds is waited for: a predecessor that is just ending."""

_ORDERS = """
CREATE TABLE commits (
    pool TEXT NOT NULL,
    generation INTEGER NOT NULL,           -- of a layout that all ranks ran once
    PRIMARY KEY (pool, generation)
) WITHOUT ROWID;
CREATE TABLE audit (
    pool TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    record TEXT NOT NULL,                  -- JSON of the rest of an AuditRecord
    PRIMARY KEY (pool, sequence)
) WITHOUT ROWID;
"""
"""What operators ordered, and what they may go back to."""

_SCHEMA = f"""{_ORDERS}
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
    hold TEXT                              -- what operators hold it to, as `hold.py` packs it
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
"""  # noqa: S608 - all of it is ours

_UPGRADES = {
    1: "ALTER TABLE layouts ADD COLUMN share_of_slot BLOB;",
    2: f"""{_ORDERS}
ALTER TABLE pools ADD COLUMN num_audit INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pools ADD COLUMN hold TEXT;
INSERT INTO commits SELECT pool, committed FROM pools WHERE committed IS NOT NULL;
""",  # noqa: S608 - all of it is ours
    3: "ALTER TABLE averages RENAME COLUMN tokens TO decayed_load;",
}
"""What brings a file of an older version to the next one."""

_Result = TypeVar("_Result")


class SqliteFile:
    """An open file with our tables, made when missing; `db` may be used by `read` and `write` only.

    The file is locked while it is open: a second balancer on it is told so instead of writing in
    between. Work runs one piece after the other on a thread of its own, so that a slow disk delays
    whoever waits for it and no stream.

    Raises:
        StoreError: the file cannot be opened, is damaged, is somebody else's or another version's,
            or another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._explained():
            self.db = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self.db.close()
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._asked: deque[_Asked[Any]] = deque()

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the store's thread.

        Raises:
            StoreError: what SQLite, or a row that makes no sense, raised in it.
        """

        def explained() -> _Result:
            with self._explained():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, explained)

    async def write(self, work: Callable[[], _Result], *, term: int) -> _Result:
        """Run `work` in a transaction that is durable on return, or undone.

        What waits at one moment is made durable together: hundreds of pools close their windows at
        once, and a disk takes as long for one of them as for all. What fails undoes itself only.

        Raises:
            TermOverError: a higher `term` wrote before.
            StoreError: as `read`.
        """
        asked = _Asked(work=work, term=term)
        self._asked.append(asked)
        # Whoever is first on the thread does it for all who asked by then.
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_all)
        if asked.fault is not None:
            raise asked.fault
        return asked.result

    def highest_term(self) -> int:
        """The highest term that ever wrote; used by `read` and `write` only."""
        (highest,) = self.db.execute("SELECT term FROM fence").fetchone()
        return int(highest)

    async def close(self) -> None:
        """Release the file and its thread."""
        await self.read(self.db.close)
        self._thread.shutdown()

    def damaged(self, finding: str) -> StoreError:
        """The error for contents that no release of ours wrote."""
        return StoreError(
            f"{self._path} is damaged ({finding}): move it away to start anew from what the "
            "workers report",
            fault=StoreFault.DAMAGED,
        )

    def _prepare(self) -> None:
        # The lock comes first: nothing may be judged while somebody else may be writing it.
        self.db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self.db.execute("BEGIN EXCLUSIVE")
        is_new = self.db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        self.db.execute("COMMIT")
        if not is_new:
            self._check_is_ours()
            self._upgrade()
        self.db.execute("PRAGMA journal_mode = WAL")
        # A generation must survive a power cut before anybody stages it.
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
                f"{self._path} is an SQLite file of another program: name another state file",
                fault=StoreFault.FOREIGN,
            )
        if version != SCHEMA_VERSION and version not in _UPGRADES:
            raise StoreError(
                f"{self._path} has schema version {version}, this release reads {SCHEMA_VERSION}: "
                "use the release that wrote it, or move the file away to start anew from what the "
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
    def _explained(self) -> Iterator[None]:
        """Turn what SQLite and senseless rows raise into one sentence with a remedy."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreError(
                    f"{self._path} is held by another process: one balancer uses a state file at a "
                    "time"
                ) from error
            is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
            raise StoreError(
                f"{self._path} cannot be used ({error}): check that its folder exists, can be "
                "written and has room",
                fault=StoreFault.FULL if is_full else StoreFault.UNREACHABLE,
            ) from error
        except (sqlite3.Error, InvalidLayoutError, LookupError, TypeError, ValueError) as error:
            raise self.damaged(str(error)) from error

    def _write_all(self) -> None:
        """Do what was asked, in order, in one transaction; outcomes are left with who asked."""
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        if not asked:
            return
        try:
            with self._explained():
                self.db.execute("BEGIN IMMEDIATE")
                for one in asked:
                    self._write_one(one)
                self.db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - each of them raises it to who asked
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            for one in asked:
                one.fail(error)

    def _write_one(self, asked: "_Asked[Any]") -> None:
        self.db.execute("SAVEPOINT one")
        try:
            with self._explained():
                self._fence(asked.term)
                asked.run()
        except Exception as error:
            asked.fail(error)
            if not self.db.in_transaction:
                raise  # A full disk, for one, takes all of the transaction back.
            self.db.execute("ROLLBACK TO one")
        self.db.execute("RELEASE one")

    def _fence(self, term: int) -> None:
        highest = self.highest_term()
        if term < highest:
            raise TermOverError(store=str(self._path), term=term, highest_term=highest)
        self.db.execute("UPDATE fence SET term = ?", (term,))


@dataclass(slots=True, kw_only=True)
class _Asked(Generic[_Result]):
    """A piece of work and, once it is done, its `fault` or else its `result`."""

    work: Callable[[], _Result]
    term: int
    fault: Exception | None = None
    result: _Result = field(init=False)

    def run(self) -> None:
        """Do the work."""
        self.result = self.work()

    def fail(self, error: Exception) -> None:
        """It failed; the first fault counts."""
        self.fault = self.fault or error
