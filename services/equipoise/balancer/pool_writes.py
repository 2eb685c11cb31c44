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
        if isinstance(write, WriteAudit):
            write = self._controller.pool.journal.brought_up_to_date(write)
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that ends the pool.
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                written = await write_to(
                    self._store, write, pool=self._name, term=self._tenure.term, log=self._log
                )
        except StoreAheadError:
            self._controller.write_failed(write, reason="", behind=behind)
            await self.restore_lost()
            self._fail_answers(write, behind, reason=_AHEAD)
            return None
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

    async def restore_lost(self) -> None:
        """Write back what the store has lost since; failed writes report what is wrong with it."""
        if not self._tenure.holds():
            return
        journal, term = self._controller.pool.journal, self._tenure.term
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                memory = await restore(self._store, self._name, known=journal, term=term)
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
        self._controller.note_stored(memory)

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
        self._fail_answers(write, behind, reason=reason, is_unknown=fault in _UNKNOWN)

    def _fail_answers(
        self, write: Write, behind: Chain, *, reason: str, is_unknown: bool = False
    ) -> None:
        """Answer the requests of a failed write, which may have happened, and those behind it."""
        unknown = "it is unknown whether this was done: look at the audit before you retry"
        for effect in (write, *behind):
            if isinstance(effect, WriteAudit):
                outcome = unknown if is_unknown and effect is write else "nothing was done"
                self._answers.fail(effect.request.ticket, f"{outcome}: {reason}")


_UNKNOWN = {StoreFault.SLOW, StoreFault.BROKEN, None}
"""Faults after which a write may have happened."""

_AHEAD = (
    "an earlier request was recorded, although the store's answer to it came too late, and this "
    "one was decided without it: look at the audit, and repeat this one if it still applies"
)


def question_tenure(tenure: Tenure, error: StoreError) -> None:
    """End the term if the store differs from memory: a new term reads everything again."""
    if isinstance(error, TermOverError):
        tenure.outranked(error.highest_term)
    elif error.fault in {StoreFault.CONFLICT, StoreFault.LOST}:
        tenure.start_over(str(error))
