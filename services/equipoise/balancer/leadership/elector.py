"""`Elector`: carries out what `standing.py` decides, with every wait bounded.

Owns the rounds, the demotion timer and the register. A register that hangs delays its round and
nothing else: the timer runs beside it, and `leads` looks at the clock itself.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from equipoise.balancer.leadership.register import ALONE, LeaseRegister, RegisterError
from equipoise.balancer.leadership.standing import (
    Candidate,
    Due,
    Event,
    Failed,
    GaveUp,
    LeaderRole,
    LeaseTiming,
    Outranked,
    Overtaken,
    Read,
    Request,
    Saw,
    Standing,
    Ticked,
    Write,
    Wrote,
)
from equipoise.pool.counters import Bound

_MAX_REQUESTS = 4
"""Requests of one round: a renewal that finds itself overtaken, a look, and a renewal again."""

_log = logging.getLogger(__name__)


class Tenure:
    """The right to lead for one term; whoever writes or pushes holds it against the clock."""

    def __init__(self, elector: "Elector", term: int) -> None:
        self._elector = elector
        self.term = term

    def holds(self) -> bool:
        """Whether this balancer leads in this term at this very moment."""
        return self._elector.leads() and self._elector.standing.term == self.term

    def outranked(self, term: int) -> None:
        """Somebody has seen a higher term: this one ends, and the next one will be higher still."""
        self._elector.tell(Outranked(term=term))

    def give_up(self, reason: str) -> None:
        """End this term, because what it rests on is gone."""
        if self.holds():
            self._elector.tell(GaveUp(reason=reason))


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
        self._standing = Standing(candidate=candidate, timing=timing)
        self._changed = asyncio.Event()
        self._pending: Request = None
        self._looked = asyncio.Event()
        self._lease = Bound(name="lease", bound_s=timing.renew_deadline_s)
        self._request = Bound(name="register", bound_s=timing.request_timeout_s)

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Its waits since the process started; none if nobody else can reach the register."""
        return () if self._standing.timing == ALONE else (self._lease, self._request)

    @property
    def standing(self) -> Standing:
        """What is known now."""
        return self._standing

    def leads(self) -> bool:
        """Whether this balancer may write and push at this very moment."""
        return self._standing.leads(now=self._clock())

    def tell(self, event: Event) -> None:
        """Something was learned elsewhere; a request that follows from it waits for the round."""
        self._pending = self._apply(event) or self._pending

    async def until_looked(self) -> None:
        """Wait for the end of the first round, after which it is known whether somebody leads."""
        await self._looked.wait()

    async def tenure(self) -> Tenure:
        """Wait until this balancer leads."""
        while not self.leads():
            await self._changed.wait()
        return Tenure(self, self._standing.term)

    async def until_over(self, tenure: Tenure) -> None:
        """Wait until `tenure` has ended."""
        while tenure.holds():
            await self._changed.wait()

    async def until_changed(self, known: Standing) -> Standing:
        """Wait until role, term or leader are others than in `known`."""
        while _position(self._standing) == _position(known):
            await self._changed.wait()
        return self._standing

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part in elections inside the block; at its end an own lease is given back."""
        tasks = [asyncio.create_task(self._rounds()), asyncio.create_task(self._watch_deadline())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._resign()

    async def _rounds(self) -> None:
        retry_s = self._standing.timing.retry_s
        while True:
            began_s = self._clock()
            try:
                await self._round()
            except Exception:  # noqa: BLE001 - a fault of ours must not end elections for good
                _log.exception("a round of the election failed")
            self._looked.set()
            await asyncio.sleep(max(0.0, min(retry_s, began_s + retry_s - self._clock())))

    async def _round(self) -> None:
        request, self._pending = self._pending or self._apply(Due()), None
        for _ in range(_MAX_REQUESTS):
            if request is None:
                return
            request = self._apply(await self._perform(request))

    async def _perform(self, request: Read | Write) -> Event:
        sent_s = self._clock()
        timeout_s = self._standing.timing.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(request, Read):
                    return Saw(sighting=await self._register.read())
                sighting = await self._register.write(request.record, replacing=request.replacing)
        except TimeoutError:
            reason = f"the lease's register did not answer within {timeout_s:g} s"
            self._request = self._request.again(reason)
            return Failed(reason=reason)
        except RegisterError as error:
            return Failed(reason=str(error))
        return Overtaken() if sighting is None else Wrote(sighting=sighting, sent_s=sent_s)

    async def _watch_deadline(self) -> None:
        """End a term whose lease ran out, whatever the register is doing."""
        while True:
            changed, left_s = self._changed, None
            if self._standing.role is LeaderRole.LEADING:
                left_s = max(0.0, self._standing.valid_until_s - self._clock())
            # Not wait_for: in Python 3.11 it can swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
            self._apply(Ticked())

    async def _resign(self) -> None:
        request = self._standing.release()
        if request is not None:
            self.tell(GaveUp(reason="this balancer stops"))
            await self._perform(request)

    def _apply(self, event: Event) -> Request:
        before, now = self._standing, self._clock()
        self._standing, request = before.step(event, now=now)
        if self._standing is not before:
            if before.has_run_out(now=now):
                self._lease = self._lease.again(f"term {before.term} ended: it was not renewed")
            _report(before, self._standing)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return request


def _position(standing: Standing) -> tuple[LeaderRole, int, str]:
    return standing.role, standing.term, standing.leader_address


def _report(before: Standing, after: Standing) -> None:
    if after.role is LeaderRole.LEADING and before.role is not LeaderRole.LEADING:
        _log.info("this balancer leads in term %d", after.term)
    elif before.role is LeaderRole.LEADING and after.role is not LeaderRole.LEADING:
        _log.warning("this balancer no longer leads (term %d): %s", before.term, after.reason)
    elif after.leader_address != before.leader_address and after.leader_address:
        _log.info("the balancer at %s leads", after.leader_address)
    elif after.reason != before.reason and after.role is LeaderRole.FOLLOWING:
        _log.debug("following: %s", after.reason)
