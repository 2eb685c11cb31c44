"""How evenly requests are spread: bounds of list scheduling, two gateways, and a trace."""

import itertools
import os
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.rank_load import Amount, RankInfo, RankLoad, RankState
from equipoise.gateway.routing import Demand
from tests.support.request_fleet import (
    RULES,
    at_load,
    by_rule,
    least_requests,
    play,
    recorded,
    round_robin,
    trace,
)

PARITY = 100


def prompt_of(num_tokens):
    return Demand(prompt_tokens=num_tokens, answer_tokens=1, generates=False)


def cost(num_tokens):
    return num_tokens + num_tokens**2 // 2 / PARITY


def finishing_times(prompts, num_ranks):
    """When each rank has prefilled what it is given, all prompts arriving at once in this order."""
    ranks = [RankLoad(name=str(n), address=str(n), parity_tokens=PARITY) for n in range(num_ranks)]
    for turn, num_tokens in enumerate(prompts):
        demand = prompt_of(num_tokens)
        rank = ranks[by_rule(ranks, demand, turn)]
        rank.book(demand.booking_on(rank), now=0.0)
    return [one.pending_tokens.total + one.pending_pairs.total / PARITY for one in ranks]


def optimum(costs, num_ranks):
    """Least possible time of the last rank, by trying every assignment to equal ranks."""
    reached = {(0.0,) * num_ranks}
    for one in costs:
        reached = {
            tuple(sorted((*times[:place], times[place] + one, *times[place + 1 :])))
            for times in reached
            for place in range(num_ranks)
        }
    return min(times[-1] for times in reached)


prompts = st.lists(st.integers(1, 400), min_size=1, max_size=10)


@settings(deadline=None)
@given(prompts, st.integers(1, 6))
def test_the_last_rank_ends_within_the_bound_of_list_scheduling(tokens, num_ranks):
    """Graham, 1966: at most the mean and (1 - 1/m) of the longest."""
    costs = [cost(one) for one in tokens]
    bound = sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs)
    assert max(finishing_times(tokens, num_ranks)) <= bound + 1e-6


@settings(deadline=None, max_examples=40)
@given(prompts, st.integers(2, 3))
def test_longest_first_ends_within_four_thirds_of_the_optimum(tokens, num_ranks):
    """Graham, 1969: LPT is within 4/3 - 1/(3m)."""
    best = optimum([cost(one) for one in tokens], num_ranks)
    ended = max(finishing_times(sorted(tokens, reverse=True), num_ranks))
    assert ended <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-6


def test_longest_last_can_end_later_than_that():
    tokens = [100] * 6 + [300]
    best = optimum([cost(one) for one in tokens], 3)
    assert best == cost(300)
    assert max(finishing_times(tokens, 3)) > (4 / 3 - 1 / 9) * best


def views(num_gateways, *, num_ranks=8):
    return [
        [RankLoad(name=str(n), address=str(n)) for n in range(num_ranks)]
        for _ in range(num_gateways)
    ]


def reported(name, report, pending):
    return RankInfo(
        name=name,
        address=name,
        state=RankState.OPEN,
        report=report,
        max_requests=64,
        pending_tokens=pending,
        kv_tokens_total=10**6,
    )


def place_burst(gateways, *, count, num_tokens=1000):
    """Both gateways get a burst between two reports; returns what each rank got."""
    got = [0] * len(gateways[0])
    for turn in range(count):
        for gateway, first_turn in zip(gateways, (3, 6), strict=True):
            demand = prompt_of(num_tokens)
            place = by_rule(gateway, demand, first_turn + turn)
            gateway[place].book(demand.booking_on(gateway[place]), now=0.0)
            got[place] += 1
    return got


def test_a_burst_at_two_gateways_between_two_reports_is_spread():
    gateways = views(2)
    assert place_burst(gateways, count=32) == [8] * 8
    # Reports from before the burst change nothing, nor do those that have seen it.
    for report, pending in ((1, 0), (2, 8000), (3, 8000)):
        for gateway in gateways:
            for rank in gateway:
                rank.note_report(reported(rank.name, report, pending))
                assert rank.pending_tokens.total == (4000 if report == 1 else 8000)
    assert place_burst(gateways, count=8) == [2] * 8


def test_two_gateways_overfill_a_rank_that_became_idle_by_no_more_than_its_lead():
    gateways = views(2)
    for report in (1, 2, 3):
        for gateway in gateways:
            for rank in gateway:
                pending = 0 if rank.name == "5" else 6000
                rank.note_report(reported(rank.name, report, pending))
    got = place_burst(gateways, count=16)
    # Each fills the lead of six prompts, and then spreads.
    assert got[5] == 2 * 7
    assert max(one for place, one in enumerate(got) if place != 5) <= 4


def test_an_amount_that_both_gateways_have_booked_is_not_counted_twice():
    amount = Amount()
    amount.add(5)
    amount.report(5 + 7)
    assert (amount.booked, amount.foreign) == (5, 7)
    amount.add(-5)
    amount.report(5 + 7)
    assert amount.total == 7


@pytest.fixture(scope="module")
def arrivals():
    return list(trace(1, count=1500, per_s=50))


def test_prompts_wait_least_by_this_rule_also_with_two_gateways(arrivals):
    def wait_s(rule, num_gateways=1):
        played = play(arrivals, rule, generates=False, num_gateways=num_gateways)
        return played.mean_wait_s

    alone, two = wait_s(by_rule), wait_s(by_rule, 2)
    assert alone < 0.85 * wait_s(least_requests)
    assert alone < 0.4 * wait_s(round_robin)
    assert two < 1.5 * alone
    assert two < wait_s(least_requests, 2)


def test_latents_are_most_even_by_this_rule_also_with_two_gateways(arrivals):
    def latents(rule, num_gateways=1):
        return play(arrivals, rule, prefills=False, num_gateways=num_gateways).latents

    alone, two = latents(by_rule), latents(by_rule, 2)
    assert alone > latents(least_requests) > 0.5
    assert two > 0.9 * alone
    assert two > latents(least_requests, 2)


def test_a_text_that_all_prompts_begin_with_does_not_draw_them_to_one_rank(arrivals):
    shared = tuple(b"all %d" % place for place in range(16))
    hot = [
        type(one)(
            at_s=one.at_s, prompt_tokens=1500, answer_tokens=2,
            keys=(*shared, *(b"%f %d" % (one.at_s, place) for place in range(7))),
        )
        for one in arrivals
    ]  # fmt: skip
    played = play(hot, by_rule, generates=False)
    assert played.hit_rate > 0.6
    assert played.attention > 0.9
    assert played.mean_wait_s < 1.1 * play(hot, round_robin, generates=False).mean_wait_s


MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}
{"timestamp": 900, "input_length": 9, "output_length": 0, "hash_ids": [3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.7500000,600,3
2023-11-17 00:00:00.2500000,1024,7
"""


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", MOONCAKE), ("a.csv", AZURE)])
def test_recorded_traces_are_read(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    first, second = recorded(path)
    assert second.at_s - first.at_s == pytest.approx(0.5)
    assert [(one.prompt_tokens, one.answer_tokens) for one in (first, second)] == [
        (600, 3), (1024, 7),
    ]  # fmt: skip
    assert [len(one.keys) for one in (first, second)] == [9, 15]
    # 512 tokens are shared where the trace says so.
    assert len(set(first.keys) & set(second.keys)) == (8 if name == "a.jsonl" else 0)


@pytest.mark.parametrize("does", [(True, False), (False, True), (True, True)])
def test_a_trace_is_sped_up_until_ranks_are_busy(does, arrivals):
    prefills, generates = does
    faster, speed = at_load(arrivals, 0.5, prefills=prefills, generates=generates)
    slower, _ = at_load(arrivals, 0.25, prefills=prefills, generates=generates)
    assert slower[-1].at_s == pytest.approx(2 * faster[-1].at_s)
    assert faster[-1].at_s * speed == pytest.approx(arrivals[-1].at_s - arrivals[0].at_s)


def test_ranks_with_more_work_than_time_fall_behind(arrivals):
    def wait_s(load):
        sped_up, _ = at_load(arrivals[:300], load, prefills=True, generates=False)
        return play(sped_up, round_robin, generates=False).mean_wait_s

    assert wait_s(3.0) > 3 * wait_s(0.3)


PARTS = {
    "prefill": ({"generates": False}, 52),
    "decode": ({"prefills": False}, 26),
    "mixed": ({}, 26),
}


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_rules_on_a_trace(part):
    """Prints the table of decision 0032."""
    changes, per_s = PARTS[part]
    traces = [list(trace(seed, count=5000, per_s=per_s)) for seed in (1, 2, 3)]
    print_table(part, traces, changes)


RECORDED = "EQUIPOISE_REQUEST_TRACE"


@pytest.mark.benchmark
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.skipif(RECORDED not in os.environ, reason=f"{RECORDED} names no recorded trace")
def test_rules_on_a_recorded_trace(part):
    """Prints the table of decision 0032 for a trace whose ranks are busy for 70 % of the time."""
    changes, _ = PARTS[part]
    does = {"prefills": True, "generates": True} | changes
    arrivals, speed = at_load(recorded(Path(os.environ[RECORDED])), 0.7, **does)
    print(f"{len(arrivals)} requests at {speed:.2f} times their speed")
    print_table(part, [arrivals], changes)


def print_table(part, traces, changes):
    for num_gateways, (name, rule) in itertools.product((1, 2), RULES.items()):
        played = [play(one, rule, num_gateways=num_gateways, **changes) for one in traces]
        means = {
            kind: statistics.mean(getattr(one, kind) for one in played)
            for kind in (
                "attention", "latents", "requests", "mean_wait_s", "p99_wait_s", "hit_rate",
            )
        }  # fmt: skip
        row = " | ".join(f"{value:.2f}" for value in means.values())
        print(f"| {part} | {name} | {num_gateways} | {row} |")
        assert all(value >= 0 for value in means.values())
