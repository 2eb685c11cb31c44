"""The elector against a register that answers late, wrongly or never: nothing waits for ever."""

import asyncio
import time
from dataclasses import replace

import pytest

from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.leader_state import LeaderRole
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming
from equipoise.balancer.leadership.redis_register import RedisRegister
from equipoise.balancer.leadership.register import ALONE, RegisterError, SoleRegister

BOUND_S = 60.0
QUICK = LeaseTiming(duration_s=0.6, renew_deadline_s=0.4, retry_s=0.1, request_timeout_s=0.1)


class HangingRegister(SoleRegister):
    """Answers as long as configured; then hangs, or raises the given error."""

    def __init__(self) -> None:
        super().__init__(term=0)
        self.fault = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = asyncio.Event()

    async def read(self):
        await self._wait()
        return await super().read()

    async def write(self, record, *, replacing):
        await self._wait()
        return await super().write(record, replacing=replacing)

    async def _wait(self):
        self.asked.set()
        if self.fault:
            raise self.fault
        await self.answering.wait()


def elector_of(register, name="a", *, timing=QUICK):
    candidate = Candidate(name=name, address=f"{name}:7070", term_offset=1)
    return Elector(register, candidate=candidate, timing=timing)


async def soon(awaitable):
    return await asyncio.wait_for(awaitable, BOUND_S)


async def test_one_alone_leads_and_gives_the_lease_back_at_the_end():
    register = SoleRegister(term=5)
    elector = elector_of(register, timing=ALONE)
    async with elector.running():
        tenure = await soon(elector.tenure())
        assert tenure.term == 6
        assert tenure.holds()
        assert elector.timeouts == ()
    assert not tenure.holds()
    assert (await register.read()).record.holder == ""


async def test_a_term_that_the_store_rejects_after_a_failover_ends():
    elector = elector_of(SoleRegister(term=5), timing=ALONE)
    async with elector.running():
        first = await soon(elector.tenure())
        first.outranked(first.term)
        assert not first.holds()
        second = await soon(elector.tenure())
        assert second.term == first.term + 1
        first.outranked(second.term)  # An answer that is late.
        assert second.holds()


async def test_a_leader_whose_store_lost_contents_leads_again_before_another_one_can():
    """It knows most of what was lost; a lease that is not in that store is not lost with it."""
    register = SoleRegister(term=5)
    one, other = elector_of(register), elector_of(register, "b")
    async with one.running():
        first = await soon(one.tenure())
        async with other.running():
            await soon(other.until_looked())
            first.start_over("the store was emptied")
            assert not first.holds()
            second = await soon(one.tenure())
            assert second.term == first.term + 1
            second.outranked(second.term - 1)  # It went back to before the fence of this term.
            assert (await soon(one.tenure())).term == second.term + 1
            assert not other.leads()


async def test_two_of_them_share_one_register_and_the_second_follows_the_first():
    register = SoleRegister(term=0)
    one, other = elector_of(register), elector_of(register, "b")
    async with other.running():
        async with one.running():
            leader, follower = one, other
            if (await _first_tenure(one, other)) is other:
                leader, follower = other, one
            while not follower.state.leader_address:
                await soon(follower.until_changed(follower.state))
            assert follower.state.leader_address == leader.state.candidate.address
        tenure = await soon(other.tenure())
        assert tenure.term >= 1


@pytest.mark.parametrize("fault", [None, RegisterError("it is down"), ZeroDivisionError()])
async def test_a_register_that_stops_answering_ends_the_term_within_the_deadline(fault):
    register = HangingRegister()
    elector = elector_of(register)
    async with elector.running():
        tenure = await soon(elector.tenure())
        valid_until_s = elector.state.valid_until_s
        register.fault = fault
        register.answering.clear()
        await soon(elector.until_over(tenure))
        assert elector.state.role is LeaderRole.FOLLOWING
        assert elector.state.valid_until_s <= valid_until_s + QUICK.retry_s
        lease, request = elector.timeouts
        assert (lease.name, lease.timeout_s) == ("lease", QUICK.renew_deadline_s)
        assert lease.reached >= 1
        assert lease.latest == f"term {tenure.term} ended: it was not renewed"
        assert request.name == "register"
        assert request.reached or fault
        register.fault = None
        register.answering.set()
        again = await soon(elector.tenure())
        assert again.term > tenure.term
        assert not tenure.holds()


async def test_rounds_that_fail_do_not_flood_the_log(caplog):
    register = HangingRegister()
    register.fault = ZeroDivisionError()
    register.answering.clear()
    elector = elector_of(register)
    async with elector.running():
        async with asyncio.timeout(BOUND_S):
            while "failed (8 so far)" not in caplog.text:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(QUICK.retry_s)
    assert caplog.text.count("Traceback") in {4, 5}


async def test_a_term_that_was_outranked_is_followed_by_a_higher_one():
    elector = elector_of(SoleRegister(term=0))
    async with elector.running():
        tenure = await soon(elector.tenure())
        tenure.outranked(70)
        assert not tenure.holds()
        await soon(elector.until_over(tenure))
        assert (await soon(elector.tenure())).term == 71


async def test_a_term_is_confirmed_by_a_renewal_that_was_sent_after_the_question():
    register = HangingRegister()
    elector = elector_of(register)
    async with elector.running():
        tenure = await soon(elector.tenure())
        asked_s = time.monotonic()
        assert await soon(tenure.until_confirmed())
        assert elector.state.renewed_s > asked_s
        register.answering.clear()
        assert not await soon(tenure.until_confirmed()), "it ends with the lease"
        register.answering.set()


async def test_a_paused_leader_confirms_nothing_once_another_one_has_the_lease():
    register = SoleRegister(term=0)
    one, other = elector_of(register), elector_of(register, "b")
    async with one.running():
        tenure = await soon(one.tenure())
        seen = await register.read()
        successor = replace(seen.record, holder="b", address="b:7070", term=tenure.term + 1)
        assert await register.write(successor, replacing=seen.version)
        assert tenure.holds(), "it has not looked yet"
        assert not await soon(tenure.until_confirmed())
        assert one.state.leader_address == other.state.candidate.address


async def test_a_leader_that_steps_down_releases_the_lease_first():
    register = SoleRegister(term=0)
    one, other = elector_of(register), elector_of(register, "b")
    async with one.running():
        tenure = await soon(one.tenure())
        async with other.running():
            while not other.state.leader_address:
                await soon(other.until_changed(other.state))
            tenure.give_up("the store cannot be read")
            await soon(one.until_over(tenure))
            assert (await _first_tenure(one, other)).state.term == 2
        tenure.give_up("repeated by a caller that had not seen it")


async def test_stopping_is_bounded_when_the_register_hangs():
    register = HangingRegister()
    elector = elector_of(register)
    async with elector.running():
        await soon(elector.tenure())
        register.asked.clear()
        register.answering.clear()
        await soon(register.asked.wait())
    assert not elector.leads()


async def test_a_redis_that_is_paused_ends_the_term_and_one_that_wakes_begins_another(redis_server):
    timing = LeaseTiming(duration_s=2.0, renew_deadline_s=1.5, retry_s=0.2, request_timeout_s=1.0)
    register = RedisRegister(redis_server.url, timeout_s=1.0)
    elector = elector_of(register, timing=timing)
    async with elector.running():
        tenure = await soon(elector.tenure())
        redis_server.pause()
        await soon(elector.until_over(tenure))
        redis_server.resume()
        assert (await soon(elector.tenure())).term > tenure.term
    await register.close()


async def _first_tenure(*electors):
    waits = {asyncio.create_task(elector.tenure()): elector for elector in electors}
    done, pending = await asyncio.wait(waits, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return waits[done.pop()]
