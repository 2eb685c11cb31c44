"""The queue for a rank: fair, bounded, and served as soon as possible."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.gateway.errors import NoRankError, TooManyQueuedError
from equipoise.gateway.rank_load import ASSUMED_PENDING_TOKENS, RankInfo, RankState
from equipoise.gateway.rank_table import FIRST_REST_S, LONGEST_REST_S, RankTable
from equipoise.gateway.request_balance import balancedness, request_balancedness
from equipoise.gateway.suspicion import PROOF_TOKENS, Suspicion
from equipoise.planning.balance import balancedness as layer_balancedness
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


def _field(value):
    return tuple(value) if isinstance(value, range) else value


async def place(
    ranks, *, is_retry=False, suspicion=None, avoid=frozenset(), bound_s=BOUND_S, **changes
):
    return await ranks.reserve(
        replace(REQUEST, **{name: _field(value) for name, value in changes.items()}),
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


def booked(ranks, name):
    rank = load(ranks, name)
    amounts = (rank.requests, rank.latents, rank.pending_tokens, rank.pending_pairs)
    return tuple(amount.booked for amount in amounts)


async def test_a_reservation_counts_until_it_is_released(ranks):
    ranks.update(reported("a"))
    one = await place(ranks)
    assert booked(ranks, "a") == (1, 3 + 7, 3, 3 * 3 // 2)
    one.accepted()
    one.generated(0)
    assert booked(ranks, "a") == (1, 10, 3, 4), "its prompt has not been prefilled"
    one.generated(1)
    assert booked(ranks, "a") == (1, 10, 0, 0)
    one.generated(8)
    assert booked(ranks, "a") == (1, 12, 0, 0), "an answer that is longer than expected"
    one.release()
    one.release()
    assert booked(ranks, "a") == (0, 0, 0, 0)


async def test_what_ends_before_it_is_prefilled_leaves_nothing_behind(ranks):
    ranks.update(reported("a"))
    (await place(ranks)).release()
    assert booked(ranks, "a") == (0, 0, 0, 0)


async def test_answers_are_expected_to_be_as_long_as_the_latest_ones(ranks):
    ranks.update(reported("a"))
    for _ in range(400):
        with await place(ranks, max_tokens=5000) as one:
            one.generated(20)
    await place(ranks, max_tokens=5000)
    assert load(ranks, "a").latents.booked == 3 + 20
    await place(ranks, max_tokens=4)
    assert load(ranks, "a").latents.booked == 3 + 20 + 3 + 4


async def test_a_prompt_follows_its_beginning_until_waiting_costs_more(ranks):
    known = {"block_tokens": 16, "kv_tokens_total": 2**20, "max_requests": 2**10}
    ranks.update(reported("a", "b", boot_id="1", **known))

    async def prefill(prompt, **more):
        return await place(ranks, prompt=prompt, max_tokens=1, **more)

    with await prefill(range(200)) as first:
        first.generated(1)
    assert first.rank.name == "a"
    # Rank a prefills 8 tokens of each, b would prefill 200.
    followers = [await prefill((*range(192), *range(turn, turn + 8))) for turn in range(20)]
    assert [one.rank.name for one in followers] == ["a"] * 20
    assert load(ranks, "a").pending_tokens.booked == 20 * 8
    assert (await prefill((*range(192), 1))).rank.name == "a", "161 tokens against 193"
    await prefill(range(1000, 1040), avoid=frozenset({"b:1"}))
    assert (await prefill((*range(192), 2))).rank.name == "b", "202 tokens against 193"
    ranks.update(reported("a", "b", boot_id="2", **known))
    assert [len(rank.prefixes) for rank in ranks.loads()] == [0, 0]


async def test_work_sent_to_ranks_is_remembered_for_a_while(ranks, clock):
    ranks.update(reported("a", "b"))
    with await place(ranks):
        assert request_balancedness(ranks.loads(), now=clock()) == {
            "tokens": 0.5, "attention": 0.5, "latents": 0.5, "requests": 0.5,
        }  # fmt: skip
    measured = request_balancedness(ranks.loads(), now=clock())
    assert measured == {"tokens": 0.5, "attention": 0.5}, "no work is no balance"
    clock.now_s += 60
    await place(ranks)
    # Half as much as now, on the other rank: 1.5 of 2 x 1.
    assert request_balancedness(ranks.loads(), now=clock())["tokens"] == pytest.approx(0.75)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=9).filter(any))
def test_balancedness_is_what_it_is_of_experts(burdens):
    assert balancedness(burdens) == pytest.approx(layer_balancedness(np.array([burdens], float)))


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


async def test_requests_that_full_ranks_sent_back_fill_the_queue(ranks):
    waiting = [await in_line(ranks, number, is_retry=True) for number in (1, 2)]
    with pytest.raises(TooManyQueuedError, match="2 requests already wait for a rank"):
        await place(ranks)
    ranks.update(reported("a"))
    await asyncio.gather(*waiting)


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
    def foreign():
        return load(ranks, "a").requests.foreign

    ranks.update(reported("a", report=1))
    ours = [await place(ranks) for _ in range(3)]
    ranks.update(reported("a", num_requests=5, report=2))
    assert foreign() == 2
    # The next report may be from before our requests ended.
    for one in ours:
        one.release()
    ranks.update(reported("a", num_requests=5, report=3))
    assert foreign() == 2
    ranks.update(reported("a", num_requests=2, report=4))
    ranks.update(reported("a", num_requests=2, report=5))
    assert foreign() == 2


async def test_of_all_that_is_reported_what_we_may_have_booked_is_ours(ranks):
    ranks.update(reported("a", report=1))
    ours = await place(ranks)
    reports = {"max_requests": 8, "kv_tokens_total": 999, "parity_tokens": 100}
    more = {"kv_tokens_used": 10 + 30, "pending_tokens": 3 + 40, "pending_pairs": 4 + 50}
    ranks.update(reported("a", report=2, **more, **reports))
    rank = load(ranks, "a")
    assert (rank.latents.foreign, rank.pending_tokens.foreign) == (30, 40)
    assert (rank.pending_pairs.foreign, rank.kv_tokens_total, rank.max_requests) == (50, 999, 8)
    ours.release()
    less = {"kv_tokens_used": 10, "pending_tokens": 3, "pending_pairs": 4}
    ranks.update(reported("a", report=3, **less, **reports))
    assert (rank.latents.foreign, rank.pending_tokens.foreign) == (0, 0)


async def test_a_booking_stays_on_top_of_reports_that_cannot_have_seen_it(ranks):
    ranks.update(reported("a", report=1, max_requests=8))
    await place(ranks)
    for report in (2, 3, 4):
        # From before the request arrived there, and later with it.
        seen = 3 if report > 2 else 0
        ranks.update(reported("a", report=report, max_requests=8, pending_tokens=seen))
        assert load(ranks, "a").pending_tokens.total == 3


async def test_requests_on_a_rank_that_reports_no_prompts_are_assumed_to_wait(ranks):
    ranks.update(reported("a", report=1))
    ranks.update(reported("a", num_requests=4, report=2))
    assert load(ranks, "a").pending_tokens.foreign == 4 * ASSUMED_PENDING_TOKENS


async def test_capacities_are_known_before_the_first_token(ranks):
    ranks.update(reported("a", report=0, max_requests=8, kv_tokens_total=999))
    assert (load(ranks, "a").request_slots, load(ranks, "a").cache_tokens) == (8, 999)
    ranks.update(reported("b"))
    assert (load(ranks, "b").request_slots, load(ranks, "b").cache_tokens) == (64, 64 * 512)


async def test_a_repeated_report_counts_once(ranks):
    ranks.update(reported("a", num_requests=2, report=7))
    ours = await place(ranks)
    ranks.update(reported("a", num_requests=2, report=7))
    assert load(ranks, "a").requests.foreign == 2
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


async def test_ranks_are_ready_once_one_has_answered(ranks):
    ranks.update(reported("a"))
    assert ranks.trouble() == ""
    assert ranks.unready() == "no rank has answered yet"
    ranks.note_answer(load(ranks, "a").address, context_length=0)
    assert ranks.unready() == ""
    ranks.note_silence(load(ranks, "a").address, "it broke")
    assert ranks.unready() == "a: does not serve: it broke"
