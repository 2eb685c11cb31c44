"""`PoolWrites`: carries out one pool's writes, each with a timeout, and reports their outcome."""

import asyncio
from dataclasses import replace

from equipoise.balancer.answers import Answers
from equipoise.balancer.leadership.elector import Tenure
from equipoise.balancer.persistence import restore, write_to
from equipoise.balancer.pool_log import PoolLog
from equipoise.balancer.store.store import (
    Store,
    StoreAheadError,
    StoreError,
    StoreFault,
    TermOverError,
    UnreadablePoolError,
)
from equipoise.pool.controller import PoolController
from equipoise.pool.counters import WRITE_TIMEOUT_S
from equipoise.pool.effects import Chain, Write, WriteAudit


class PoolWrites:
    """Writes in the term of `tenure`, and ends it if the store differs from what this leader knows.

    Operators' `answers` are given when their audit record is written, or fail with it.
    """

    def __init__(
        self,
        controller: PoolController,
        *,
        store: Store,
        tenure: Tenure,
        answers: Answers,
        log: PoolLog,
    ) -> None:
        self._controller = controller
        self._store = store
        self._tenure = tenure
        self._answers = answers
        self._log = log
        self._unreadable = ""

    async def write(self, write: Write, *, behind: Chain) -> Write | None:
        """Write; return what was written, or None once the failure is reported.

        The effects `behind` it are not carried out if it fails, and their requests fail too.
        """
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                written = await self._carry_out(write)
        except TimeoutError:
            reason = f"the store did not answer within {WRITE_TIMEOUT_S:g} s"
            self._note_failure(write, reason, behind=behind, fault=StoreFault.SLOW)
            return None
        except StoreError as error:
            self._note_failure(write, str(error), behind=behind, fault=error.fault)
            question_tenure(self._tenure, error)
            return None
        except Exception as error:  # noqa: BLE001
            # A bug: the pool continues without this write, and reports it.
            self._log.exception("a write failed")
            self._note_failure(write, f"the store failed: {error}", behind=behind, fault=None)
            return None
        if isinstance(written, WriteAudit):
            answer = replace(written.answer, sequence=written.record.sequence)
            self._answers.give(written.request.ticket, answer)
        return written

    async def _carry_out(self, write: Write) -> Write:
        """Write; first adopt requests whose writing seemed to fail, if the store has any."""
        if not isinstance(write, WriteAudit):
            return await self._write(write)
        journal = self._controller.pool.journal
        try:
            return await self._write(journal.brought_up_to_date(write))
        except StoreAheadError:
            await self._restore()
            return await self._write(journal.brought_up_to_date(write))

    async def _write(self, write: Write) -> Write:
        term = self._tenure.term
        return await write_to(self._store, write, pool=self._name, term=term, log=self._log)

    async def _restore(self) -> None:
        journal, term = self._controller.pool.journal, self._tenure.term
        memory = await restore(self._store, self._name, known=journal, term=term)
        self._controller.note_stored(memory)

    async def restore_lost(self) -> None:
        """Write back what the store has lost since; failed writes report what is wrong with it."""
        if not self._tenure.holds():
            return
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._restore()
        except (TimeoutError, StoreAheadError):
            return  # The next look finds what came in between.
        except UnreadablePoolError as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                self._log.warning("the next leader will not lead this pool: %s", error)
            return
        except StoreError as error:
            question_tenure(self._tenure, error)
            return
        self._unreadable = ""

    @property
    def _name(self) -> str:
        return self._controller.pool.name

    def _note_failure(
        self, write: Write, reason: str, *, behind: Chain, fault: StoreFault | None
    ) -> None:
        """Report a failed write; `fault` is None if the failure is a bug."""
        self._log.error("%s", reason)
        timed_out = fault is StoreFault.SLOW
        self._controller.write_failed(write, reason=reason, timed_out=timed_out, behind=behind)
        unknown = "it is unknown whether this was done: look at the audit before you retry"
        for effect in (write, *behind):
            if isinstance(effect, WriteAudit):
                is_unknown = fault in _UNKNOWN and effect is write
                outcome = unknown if is_unknown else "nothing was done"
                self._answers.fail(effect.request.ticket, f"{outcome}: {reason}")


_UNKNOWN = {StoreFault.SLOW, StoreFault.BROKEN, None}
"""Faults after which a write may have happened."""


def question_tenure(tenure: Tenure, error: StoreError) -> None:
    """End the term if the store differs from memory: a new term reads everything again."""
    if isinstance(error, TermOverError):
        tenure.outranked(error.highest_term)
    elif error.fault in {StoreFault.CONFLICT, StoreFault.LOST}:
        tenure.start_over(str(error))
