"""The queue for a rank: fair, bounded, and served as soon as possible."""

import asyncio

import pytest

from equipoise.gateway.errors import NoRankError, TooManyQueuedError
from equipoise.gateway.rank_table import FIRST_REST_S, LONGEST_REST_S, RankInfo, RankTable
from equipoise.gateway.routing import RankState
from equipoise.gateway.suspicion import PROOF_TOKENS, Suspicion
from equipoise.wire.inference_messages import GenerateRequest

BOUND_S = 30.0
REQUEST = GenerateRequest(request_id="r", prompt=(1, 2, 3), max_tokens=7)


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ranks(clock):
    return RankTable(max_queued=2, clock=clock)


def reported(*names, state=RankState.OPEN, **more):
    return [RankInfo(name=name, address=f"{name}:1", state=state, **more) for name in names]


async def place(ranks, *, is_retry=False, suspicion=None, avoid=frozenset(), bound_s=BOUND_S):
    return await ranks.reserve(
        REQUEST,
        avoid=avoid,
        is_retry=is_retry,
        suspicion=suspicion or Suspicion(),
        until_s=ranks.now() + bound_s,
        timeout_s=bound_s,
    )


async def in_line(ranks, num_waiting, **more):
    """A task that is queued at this position."""
    task = asyncio.create_task(place(ranks, **more))
    await asyncio.sleep(0)
    assert ranks.num_waiting == num_waiting
    return task


def load(ranks, name):
    return next(rank for rank in ranks.loads() if rank.name == name)


async def test_a_reservation_counts_until_it_is_released(ranks):
    ranks.update(reported("a"))
    one = await place(ranks)
    assert (load(ranks, "a").num_open, load(ranks, "a").tokens_in_flight) == (1, 10)
    one.accepted()
    one.generated(1)
    assert (load(ranks, "a").tokens_in_flight, load(ranks, "a").kv_tokens) == (6, 4)
    one.generated(2)
    assert (load(ranks, "a").tokens_in_flight, load(ranks, "a").kv_tokens) == (4, 6)
    one.release()
    one.release()
    idle = load(ranks, "a")
    assert (idle.num_open, idle.tokens_in_flight, idle.kv_tokens) == (0, 0, 0)


async def test_the_queue_is_served_in_order_with_retries_first(ranks, clock):
    new = [await in_line(ranks, 1), await in_line(ranks, 2)]
    returning = [
        await in_line(ranks, 3, is_retry=True),
        await in_line(ranks, 4, is_retry=True),
    ]
    order = []
    for name, task in zip("CDAB", [*new, *returning], strict=True):
        task.add_done_callback(lambda _, name=name: order.append(name))
    ranks.update(reported("a"))
    await asyncio.gather(*new, *returning)
    assert "".join(order) == "ABCD"


async def test_a_full_queue_rejects_new_requests_but_no_retries(ranks):
    waiting = [await in_line(ranks, 1), await in_line(ranks, 2)]
    with pytest.raises(TooManyQueuedError, match="2 requests already wait for a rank"):
        await place(ranks)
    waiting.append(await in_line(ranks, 3, is_retry=True))
    ranks.update(reported("a"))
    await asyncio.gather(*waiting)


async def test_a_queue_timeout_names_the_trouble_of_each_rank(ranks):
    ranks.update(reported("a", state=RankState.CLOSED))
    with pytest.raises(NoRankError, match=r"within 0.01 s \(queue\): a: is leaving"):
        await place(ranks, bound_s=0.01)
    assert ranks.num_waiting == 0


async def test_an_expired_wait_reserves_nothing(ranks):
    ranks.update(reported("a"))
    with pytest.raises(NoRankError):
        await place(ranks, bound_s=0.0)
    assert load(ranks, "a").num_open == 0


async def test_a_cancelled_wait_leaves_no_trace(ranks):
    waiting = await in_line(ranks, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ranks.num_waiting == 0
    ranks.update(reported("a"))
    assert load(ranks, "a").num_open == 0


async def test_a_reservation_made_while_its_caller_is_cancelled_is_released(ranks):
    waiting = await in_line(ranks, 1)
    ranks.update(reported("a"))
    assert load(ranks, "a").num_open == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert load(ranks, "a").num_open == 0


async def test_a_failed_rank_backs_off_and_is_then_tried_with_one_request(ranks, clock):
    ranks.update(reported("a"))
    with await place(ranks) as failed:
        failed.lost("it broke")
    assert ranks.trouble() == "a: does not serve: it broke"
    clock.now_s += FIRST_REST_S
    trial = await place(ranks)
    second, third = await in_line(ranks, 1), await in_line(ranks, 2)
    trial.accepted()
    assert ranks.num_waiting == 0
    await asyncio.gather(second, third)


async def test_serving_other_requests_does_not_end_the_backoff_of_a_rejecting_rank(ranks, clock):
    ranks.update(reported("a"))
    served = await place(ranks)
    served.accepted()
    for _ in range(2):
        with await place(ranks) as rejected:
            rejected.lost("it is draining")
        served.generated(1)
        clock.now_s = load(ranks, "a").resting_until_s
    # It is asked by one at a time, and rests for longer each time.
    with await place(ranks) as rejected:
        waiting = await in_line(ranks, 1)
        rejected.lost("it is draining")
    assert load(ranks, "a").resting_until_s - clock.now_s == pytest.approx(4 * FIRST_REST_S)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    served.release()
    assert load(ranks, "a").num_unanswered == 0


async def test_backoff_doubles_up_to_a_limit_and_simultaneous_failures_count_once(ranks, clock):
    ranks.update(reported("a"))
    rests = []
    for _ in range(8):
        failed = await place(ranks)
        failed.lost("it broke")
        failed.lost("it broke")
        failed.release()
        rests.append(load(ranks, "a").resting_until_s - clock.now_s)
        clock.now_s = load(ranks, "a").resting_until_s
    assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    assert (rests[0], rests[-1]) == pytest.approx((FIRST_REST_S, LONGEST_REST_S))


async def test_a_missing_rank_finishes_its_requests_and_is_removed(ranks):
    ranks.update(reported("a", "b"))
    places = [await place(ranks), await place(ranks)]
    on_a = next(one for one in places if one.rank.name == "a")
    ranks.update(reported("b"))
    assert load(ranks, "a").state is RankState.CLOSED
    assert (await place(ranks)).rank.name == "b"
    on_a.release()
    assert [rank.name for rank in ranks.loads()] == ["b"]


async def test_a_rank_that_reappears_keeps_its_counters(ranks):
    ranks.update(reported("a", "b"))
    await place(ranks)
    ranks.update(reported("b", state=RankState.CLOSED))
    ranks.update(reported("a", "b"))
    assert sum(rank.num_open for rank in ranks.loads()) == 1
    assert {rank.state for rank in ranks.loads()} == {RankState.OPEN}


async def test_an_empty_update_changes_nothing(ranks):
    ranks.update(reported("a"))
    ranks.update([])
    assert (await place(ranks)).rank.name == "a"


async def test_reported_requests_beyond_ours_are_foreign(ranks):
    ranks.update(reported("a", report=1))
    ours = [await place(ranks) for _ in range(3)]
    ranks.update(reported("a", num_requests=5, report=2))
    assert load(ranks, "a").num_foreign == 2
    # The next report may be from before our requests ended.
    for one in ours:
        one.release()
    ranks.update(reported("a", num_requests=5, report=3))
    assert load(ranks, "a").num_foreign == 2
    ranks.update(reported("a", num_requests=2, report=4))
    ranks.update(reported("a", num_requests=2, report=5))
    assert load(ranks, "a").num_foreign == 2


async def test_reported_cache_use_beyond_ours_is_foreign(ranks):
    ranks.update(reported("a", report=1))
    ours = await place(ranks)
    may_hold = load(ranks, "a").tokens_in_flight
    ranks.update(reported("a", kv_tokens_total=999, kv_tokens_used=may_hold + 30, report=2))
    assert load(ranks, "a").foreign_kv_tokens == 30
    assert load(ranks, "a").kv_tokens_total == 999
    ours.release()
    ranks.update(reported("a", kv_tokens_used=may_hold, report=3))
    assert load(ranks, "a").foreign_kv_tokens == 0


async def test_a_repeated_report_counts_once(ranks):
    ranks.update(reported("a", num_requests=2, report=7))
    ours = await place(ranks)
    ranks.update(reported("a", num_requests=2, report=7))
    assert load(ranks, "a").num_foreign == 2
    ours.release()


def suspect():
    """A request under which two ranks failed."""
    return Suspicion(breaks={"one": {"a choice"}, "another": {"a choice"}})


async def test_two_suspects_never_share_a_rank_and_do_not_hold_up_other_requests(ranks):
    ranks.update(reported("a", "b"))
    suspects = [await place(ranks, suspicion=suspect()) for _ in range(2)]
    assert {one.rank.name for one in suspects} == {"a", "b"}
    third = await in_line(ranks, 1, is_retry=True, suspicion=suspect())
    fourth = await in_line(ranks, 2, is_retry=True, suspicion=suspect())
    assert (await place(ranks)).rank.name in {"a", "b"}
    suspects[0].accepted()
    suspects[0].generated(1)
    assert ranks.num_waiting == 2
    suspects[0].generated(PROOF_TOKENS - 1)
    assert (await third).rank.name == suspects[0].rank.name, "its token cleared the one before"
    suspects[1].release()
    assert (await fourth).rank.name == suspects[1].rank.name
    assert ranks.num_waiting == 0


async def test_other_requests_prefer_ranks_without_a_suspect(ranks):
    ranks.update(reported("a", "b"))
    avoided = await place(ranks, suspicion=suspect())
    others = [await place(ranks) for _ in range(3)]
    assert avoided.rank.name not in {other.rank.name for other in others}


async def test_the_choices_of_a_suspect_run_one_at_a_time(ranks):
    ranks.update(reported("a", "b"))
    suspicion = suspect()
    first = await place(ranks, suspicion=suspicion)
    second = await in_line(ranks, 1, is_retry=True, suspicion=suspicion)
    first.accepted()
    assert ranks.num_waiting == 1
    first.generated(PROOF_TOKENS)
    assert (await second).is_isolated


async def test_running_choices_of_a_new_suspect_are_suspects_and_isolate_no_other(ranks):
    ranks.update(reported("a"))
    suspicion = Suspicion()
    running = await place(ranks, suspicion=suspicion)
    running.accepted()
    isolated = await place(ranks, suspicion=suspect())
    assert isolated.is_isolated
    suspicion.breaks = suspect().breaks
    ranks.mark_suspects()
    assert load(ranks, "a").num_suspects == 2
    assert not isolated.is_isolated
    assert not running.is_isolated
