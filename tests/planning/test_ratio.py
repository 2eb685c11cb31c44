"""How many ranks the measured traffic asks for."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from equipoise.planning.phase import Phase
from equipoise.planning.ratio import MINUTES, RankUse, Use, advise, use_between

DAY_S = 86_400
NODE_PROMPT_TOKENS_PER_S = 73_700
NODE_ANSWER_TOKENS_PER_S = 14_800
USER_TOKENS_PER_S = 21


def minute(*, tokens=0.0, pending_growth=0.0, full_tokens=0.0, full_s=0.0, slots=0.0, cache=0.0):
    """A minute of one rank; `tokens` per second, `slots` and `cache` as shares."""
    return Use(
        rank_s=60.0,
        tokens=60.0 * tokens,
        pending_growth=pending_growth,
        full_tokens=full_tokens,
        full_s=full_s,
        slots_s=60.0 * slots,
        cache_s=60.0 * cache,
    )


def decode(minutes, *, num_ranks, least_ranks=1, before=0):
    return advise(
        minutes, phase=Phase.DECODE, num_ranks=num_ranks, least_ranks=least_ranks, before=before
    )


def prefill(minutes, *, num_ranks, least_ranks=1, before=0):
    return advise(
        minutes, phase=Phase.PREFILL, num_ranks=num_ranks, least_ranks=least_ranks, before=before
    )


def test_the_published_day_of_deepseek_asks_for_its_published_nodes():
    """Day 6 of open-infra: 608 B tokens in, 168 B out, 226.75 nodes on average."""
    full = NODE_PROMPT_TOKENS_PER_S * 30
    readers = prefill(
        [minute(tokens=608e9 / DAY_S / 100, full_tokens=full, full_s=30)] * MINUTES, num_ranks=100
    )
    users = 168e9 / DAY_S / USER_TOKENS_PER_S
    users_per_node = NODE_ANSWER_TOKENS_PER_S / USER_TOKENS_PER_S
    writers = decode([minute(slots=users / 140 / users_per_node)] * MINUTES, num_ranks=140)
    assert readers.needed == pytest.approx(95.5, abs=0.05)
    assert writers.needed == pytest.approx(131.4, abs=0.05)
    assert readers.needed + writers.needed == pytest.approx(226.75, abs=0.5)
    assert (readers.ranks, writers.ranks) == (107, 146)  # At most 90 % loaded.


def test_a_pool_that_fits_keeps_its_ranks_and_says_why():
    found = decode([minute(slots=0.5, cache=0.85)] * MINUTES, num_ranks=8)
    assert found.ranks == 8
    assert found.needed == pytest.approx(6.8)
    assert found.reason == (
        "requests use 50% of the slots and 85% of the cache: the load of 6.8 ranks over the "
        "latest 5 minutes, 85% of 8"
    )


def test_the_fuller_of_slots_and_cache_decides():
    slots = decode([minute(slots=0.95, cache=0.2)] * MINUTES, num_ranks=10)
    cache = decode([minute(slots=0.2, cache=0.95)] * MINUTES, num_ranks=10)
    assert slots.ranks == cache.ranks == 11


def test_no_advice_before_five_minutes():
    for count in range(1, MINUTES):
        found = decode([minute(slots=0.99)] * count, num_ranks=8)
        assert (found.ranks, found.needed) == (0, 0.0)
        assert found.reason == f"measured for {count} of 5 minutes"


def test_no_advice_on_prefill_before_a_rank_was_seen_at_its_limit():
    idle = [minute(tokens=100)] * 10
    found = prefill(idle, num_ranks=4)
    assert (found.ranks, found.needed) == (0, 0.0)
    assert "no rank has had prompts queued for long enough" in found.reason
    earlier = minute(tokens=100, full_tokens=20_000, full_s=20)
    found = prefill([earlier, *idle], num_ranks=4)
    assert found.needed == pytest.approx(0.4)
    assert found.ranks == 1
    assert "prompts arrive at 400 tokens/s, and a busy rank prefills 1,000" in found.reason


def test_prompts_that_pile_up_count_as_demand():
    full = minute(tokens=1000, pending_growth=60 * 500, full_tokens=60_000, full_s=60)
    found = prefill([full] * MINUTES, num_ranks=4)
    assert found.needed == pytest.approx(6.0)
    assert found.ranks == 7


def test_one_quiet_or_busy_minute_changes_nothing():
    quiet, busy, usual = minute(slots=0.1), minute(slots=0.99), minute(slots=0.85)
    for other in (quiet, busy):
        for place in range(MINUTES):
            minutes = [usual] * MINUTES
            minutes[place] = other
            assert decode(minutes, num_ranks=10).ranks == 10


@pytest.mark.parametrize("use", [0.6, 0.667, 0.75, 0.8, 0.825, 0.9])
def test_noise_never_changes_the_advice_twice(use):
    """Not even at a boundary, if the pool does not follow: 3 % of noise, four hours."""
    noise = random.Random(int(1000 * use))
    minutes, advised = [], []
    for _ in range(240):
        minutes = [*minutes, minute(slots=use * noise.gauss(1.0, 0.03))][-MINUTES:]
        before = advised[-1] if advised else 0
        advised.append(decode(minutes, num_ranks=12, before=before).ranks)
    changes = [(old, new) for old, new in pairwise(advised[MINUTES - 1 :]) if old != new]
    directions = {new > old for old, new in changes}
    assert len(directions) <= 1, changes


@pytest.mark.parametrize("load", [0.3, 1.7, 5.1, 8.09, 8.11, 20.0, 100.0])
def test_a_pool_that_follows_ends_at_80_to_90_per_cent_and_stays(load):
    """A full pool hides what waits, so the advice grows step by step."""
    num_ranks, seen = 10, []
    for _ in range(40):
        full = min(1.0, load / num_ranks)
        num_ranks = decode([minute(slots=full)] * MINUTES, num_ranks=num_ranks).ranks
        seen.append(num_ranks)
    assert seen == sorted(seen, reverse=seen[0] < 10)
    assert seen[-1] == seen[-2]
    assert load / num_ranks <= 0.9
    assert num_ranks == 1 or load / (num_ranks - 1) > 0.8


def test_a_pool_that_can_lose_a_rank_loses_it_only_if_the_rest_still_fits():
    fits = decode([minute(slots=0.7)] * MINUTES, num_ranks=8)
    assert fits.ranks == 7
    assert 0.7 * 8 / fits.ranks <= 0.8
    assert decode([minute(slots=0.72)] * MINUTES, num_ranks=8).ranks == 8


def test_never_fewer_ranks_than_hold_all_experts():
    found = decode([minute()] * MINUTES, num_ranks=144, least_ranks=128)
    assert found.ranks == 128
    assert "fewer than 128 cannot hold all experts" in found.reason


def test_at_most_twice_the_ranks_whatever_is_reported():
    wild = minute(tokens=2.0**53, full_tokens=1, full_s=60, slots=2.0**53)
    for found in (
        decode([wild] * MINUTES, num_ranks=4),
        prefill([wild] * MINUTES, num_ranks=4),
        decode([wild] * MINUTES, num_ranks=4, before=2**40),
    ):
        assert found.ranks == 8


USE = RankUse(
    time_s=10.0, boot_id="a", processed=1000, cached=300, pending=600, slots=0.5, cache=0.25
)


def test_use_between_two_reports():
    later = replace(USE, time_s=12.0, processed=1500, pending=200, slots=0.25, cache=0.75)
    assert use_between(USE, later) == Use(
        rank_s=2.0,
        tokens=500,
        pending_growth=-400,
        full_tokens=500,
        full_s=2.0,
        slots_s=0.5,
        cache_s=1.5,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "b"},  # Counters start again.
        {"processed": 999},  # They never shrink.
        {"cached": 299},
        {"time_s": 10.0},
        {"time_s": 9.0},
    ],
)
def test_reports_that_do_not_follow_one_another_are_no_use(changes):
    later = replace(USE, time_s=12.0, processed=1500)
    assert use_between(USE, replace(later, **changes)) == Use()


@pytest.mark.parametrize(
    "changes", [{"processed": 1601}, {"cached": 401}, {"processed": 1000}, {"pending": 0}]
)
def test_a_rank_that_may_have_run_out_of_prompts_shows_no_limit(changes):
    later = replace(USE, **{"time_s": 12.0, "processed": 1500, **changes})
    assert use_between(USE, later).full_s == 0


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 0.95])
def test_a_simulated_queue_shows_its_load(load):
    """One rank prefills 1,000 tokens/s; prompts of 2,000 to 6,000 at random; reports of 1 s."""
    arrivals = random.Random(7)
    rate, queue, processed, before, minutes = 1000.0, 0.0, 0.0, None, []
    next_s, arrived = 0.0, 0.0
    for minute_of in range(60):
        total = Use()
        for second in range(60):
            now = 60.0 * minute_of + second
            work = rate
            while next_s < now + 1:
                tokens = arrivals.uniform(2000, 6000)
                queue, arrived = queue + tokens, arrived + tokens
                next_s += arrivals.expovariate(load * rate / 4000)
            read = min(queue, work)
            queue, processed = queue - read, processed + read
            after = RankUse(
                time_s=now + 1,
                boot_id="a",
                processed=round(processed),
                cached=0,
                pending=round(queue),
                slots=0.0,
                cache=0.0,
            )
            if before is not None:
                total = total.plus(use_between(before, after))
            before = after
        minutes.append(total)
    found = prefill([*minutes, *minutes][-60:], num_ranks=1)
    measured = sum(one.full_tokens for one in minutes) / sum(one.full_s for one in minutes)
    assert measured == pytest.approx(rate, rel=0.01)
    recent = minutes[-MINUTES:]
    truth = (sum(one.tokens + one.pending_growth for one in recent)) / (60 * MINUTES) / rate
    assert found.needed == pytest.approx(truth, rel=0.02)
    assert arrived / 3600 / rate == pytest.approx(load, rel=0.15)
