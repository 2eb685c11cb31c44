"""`Elector`: carries out what `leader_state.py` decides, with a timeout on every wait.

A register that hangs delays only its round: the demotion timer runs separately, and `leads` reads
the clock itself.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from equipoise.balancer.changed import Changed
from equipoise.balancer.leadership.leader_state import (
    Action,
    Due,
    Failed,
    GaveUp,
    LeaderRole,
    LeaderState,
    LeaseEvent,
    Outranked,
    Overtaken,
    ReadRegister,
    Saw,
    StartsOver,
    Ticked,
    WriteRegister,
    Wrote,
)
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming
from equipoise.balancer.leadership.register import ALONE, LeaseRegister, RegisterError
from equipoise.pool.counters import Timeout
from equipoise.telemetry.logs import Causes

_MAX_REQUESTS = 4
"""Requests per round: a renewal that was overtaken, a read, and another renewal."""

_log = logging.getLogger(__name__)


class Tenure:
    """The right to lead for one term; checked before every write and push."""

    def __init__(self, elector: "Elector", term: int) -> None:
        self._elector = elector
        self.term = term

    def holds(self) -> bool:
        """Whether this balancer leads in this term now."""
        return self._elector.leads() and self._elector.state.term == self.term

    async def until_confirmed(self) -> bool:
        """Wait until a renewal sent after this call is accepted; False if the term ended instead.

        The lease is renewed in every round anyway, so the wait ends with a round or with the lease.
        """
        return await self._elector.until_renewed(self)

    def outranked(self, term: int) -> None:
        """Report that the store rejects this term: it has `term`, or failed over to before it."""
        if term <= self.term:
            self.start_over("the store failed over and may have lost a later term")
        else:
            self._elector.apply(Outranked(term=term))

    def start_over(self, reason: str) -> None:
        """End this term, and begin another one that reads the store again.

        The lease stays with this balancer, which knows most of what the store may have lost.
        """
        if self.holds():
            self._elector.apply(StartsOver(reason=reason))

    def give_up(self, reason: str) -> None:
        """End this term before its lease expires, so that another balancer can lead."""
        if self.holds():
            self._elector.apply(GaveUp(reason=reason))


class Elector:
    """One candidate; used from the event loop only. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        register: LeaseRegister,
        *,
        candidate: Candidate,
        timing: LeaseTiming,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._register = register
        self._clock = clock
        self._state = LeaderState(candidate=candidate, timing=timing)
        self._changed = Changed()
        self._pending: Action = None
        self._looked = asyncio.Event()
        self._failures = Causes()
        self._lease = Timeout(name="lease", timeout_s=timing.renew_deadline_s)
        self._request = Timeout(name="register", timeout_s=timing.request_timeout_s)

    @property
    def timeouts(self) -> tuple[Timeout, ...]:
        """Waits since the process started; empty if no other candidate can reach the register."""
        return () if self._state.timing == ALONE else (self._lease, self._request)

    @property
    def state(self) -> LeaderState:
        """The current state."""
        return self._state

    def leads(self) -> bool:
        """Whether this balancer may write and push now."""
        return self._state.leads(now=self._clock())

    def apply(self, event: LeaseEvent) -> None:
        """Apply an event from outside; a request that follows waits for the next round."""
        self._pending = self._apply(event) or self._pending

    async def until_looked(self) -> None:
        """Wait for the end of the first round, after which the leader is known if there is one."""
        await self._looked.wait()

    async def tenure(self) -> Tenure:
        """Wait until this balancer leads."""
        while not self.leads():
            await self._changed.wait()
        return Tenure(self, self._state.term)

    async def until_over(self, tenure: Tenure) -> None:
        """Wait until `tenure` has ended."""
        while tenure.holds():
            await self._changed.wait()

    async def until_renewed(self, tenure: Tenure) -> bool:
        """Wait until `tenure` is renewed by a request sent after this call, or has ended.

        Returns whether it holds.
        """
        asked_s = self._clock()
        while tenure.holds() and self._state.renewed_s <= asked_s:
            await self._changed.wait()
        return tenure.holds()

    async def until_changed(self, known: LeaderState) -> LeaderState:
        """Wait until role, term or leader differ from those in `known`."""
        while _position(self._state) == _position(known):
            await self._changed.wait()
        return self._state

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part in elections inside the block; release the lease at its end."""
        tasks = [asyncio.create_task(self._rounds()), asyncio.create_task(self._watch_deadline())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._resign()

    async def _rounds(self) -> None:
        retry_s = self._state.timing.retry_s
        while True:
            began_s = self._clock()
            try:
                await self._round()
            except Exception as error:  # noqa: BLE001 - a bug must not end elections for good
                if number := self._failures.count(repr(error)):
                    _log.exception("an election round failed (%d so far)", number)
            self._looked.set()
            await asyncio.sleep(max(0.0, min(retry_s, began_s + retry_s - self._clock())))

    async def _round(self) -> None:
        request, self._pending = self._pending or self._apply(Due()), None
        for _ in range(_MAX_REQUESTS):
            if request is None:
                return
            request = self._apply(await self._perform(request))

    async def _perform(self, request: ReadRegister | WriteRegister) -> LeaseEvent:
        sent_s = self._clock()
        timeout_s = self._state.timing.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(request, ReadRegister):
                    return Saw(sighting=await self._register.read())
                sighting = await self._register.write(request.record, replacing=request.replacing)
        except TimeoutError:
            reason = f"the lease register did not answer within {timeout_s:g} s"
            self._request = self._request.again(reason)
            return Failed(reason=reason)
        except RegisterError as error:
            return Failed(reason=str(error))
        return Overtaken() if sighting is None else Wrote(sighting=sighting, sent_s=sent_s)

    async def _watch_deadline(self) -> None:
        """End a term whose lease expired, even while the register hangs."""
        while True:
            left_s = None
            if self._state.role is LeaderRole.LEADING:
                left_s = max(0.0, self._state.valid_until_s - self._clock())
            # Not wait_for: in Python 3.11 it can swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            self._apply(Ticked())

    async def _resign(self) -> None:
        request = self._state.release()
        if request is not None:
            self.apply(GaveUp(reason="this balancer is shutting down"))
            await self._perform(request)

    def _apply(self, event: LeaseEvent) -> Action:
        before, now = self._state, self._clock()
        self._state, request = before.step(event, now=now)
        if self._state is not before:
            if before.has_run_out(now=now):
                self._lease = self._lease.again(f"term {before.term} ended: it was not renewed")
            _report(before, self._state, event)
            self._changed.notify()
        return request


def _position(state: LeaderState) -> tuple[LeaderRole, int, str]:
    return state.role, state.term, state.leader_address


def _report(before: LeaderState, after: LeaderState, event: LeaseEvent) -> None:
    if after.role is LeaderRole.LEADING and before.role is not LeaderRole.LEADING:
        _log.info("this balancer leads in term %d", after.term)
    elif before.role is LeaderRole.LEADING and after.role is not LeaderRole.LEADING:
        _log.warning("this balancer no longer leads (term %d): %s", before.term, after.reason)
    elif after.leader_address != before.leader_address and after.leader_address:
        _log.info("the balancer at %s leads", after.leader_address)
    elif after.reason != before.reason and after.role is LeaderRole.FOLLOWING:
        level = logging.WARNING if isinstance(event, Failed) else logging.DEBUG
        _log.log(level, "following: %s", after.reason)
