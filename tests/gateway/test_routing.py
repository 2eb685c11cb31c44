"""Requests go to the available rank of least cost, for a stated reason."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.prefix_index import PrefixIndex
from equipoise.gateway.rank_load import Amount, RankInfo, RankLoad, RankState
from equipoise.gateway.routing import (
    Demand,
    NoRankChoice,
    RankChoice,
    choose,
    parity_tokens,
    rejection,
)
from equipoise.wire.block_keys import keys_of

NOW_S = 100.0
PREFILLS = Demand(prompt_tokens=100, answer_tokens=1, generates=False)
CONTINUES = Demand(prompt_tokens=100, answer_tokens=50, is_prefilled_elsewhere=True)
BOTH = Demand(prompt_tokens=100, answer_tokens=50)
demands = st.sampled_from([PREFILLS, CONTINUES, BOTH])


def amounts(most):
    return st.builds(Amount, booked=st.integers(0, most), foreign=st.integers(0, most))


loads = st.builds(
    RankLoad,
    name=st.just(""),
    address=st.just(""),
    state=st.sampled_from(RankState),
    requests=amounts(20),
    latents=amounts(2000),
    pending_tokens=amounts(2000),
    pending_pairs=amounts(10**6),
    max_requests=st.sampled_from([0, 8, 64]),
    kv_tokens_total=st.sampled_from([0, 1000, 3000]),
    parity_tokens=st.sampled_from([0, 200, 10_000]),
    num_unanswered=st.integers(0, 3),
    num_failures=st.integers(0, 1),
    resting_until_s=st.sampled_from([0.0, NOW_S, NOW_S + 0.5, NOW_S + 2.0]),
    resting_reason=st.sampled_from(["", "it broke"]),
)
pools = st.lists(loads, max_size=6).map(
    lambda ranks: [
        replace(rank, name=f"worker-{place}", address=f"host:{place}")
        for place, rank in enumerate(ranks)
    ]
)
avoided = st.frozensets(st.integers(0, 5).map("host:{}".format))
turns = st.integers(0, 100)


def found(ranks, demand=BOTH, avoid=frozenset(), turn=0):
    return choose(ranks, demand=demand, now=NOW_S, avoid=avoid, turn=turn)


def rank(name, *, requests=0, latents=0, tokens=0, pairs=0, **more):
    return RankLoad(
        name=name,
        address=f"{name}:1",
        requests=Amount(booked=requests),
        latents=Amount(booked=latents),
        pending_tokens=Amount(booked=tokens),
        pending_pairs=Amount(booked=pairs),
        **{"max_requests": 10, "kv_tokens_total": 10_000, "parity_tokens": 1000} | more,
    )


def chosen(ranks, **more):
    choice = found(ranks, **more)
    assert isinstance(choice, RankChoice), choice
    return next(rank for rank in ranks if rank.address == choice.address)


def usable(ranks):
    return [rank for rank in ranks if not rejection(rank, now=NOW_S)]


@settings(deadline=None)
@given(pools, avoided, turns)
def test_a_rank_is_chosen_exactly_when_one_is_available(ranks, avoid, turn):
    choice = found(ranks, avoid=avoid, turn=turn)
    assert isinstance(choice, RankChoice) == bool(usable(ranks))
    if isinstance(choice, RankChoice):
        assert choice.address in {rank.address for rank in usable(ranks)}


@settings(deadline=None)
@given(pools, demands, avoided, turns)
def test_no_other_rank_is_better_in_every_respect(ranks, demand, avoid, turn):
    if not usable(ranks):
        return
    best = chosen(ranks, demand=demand, avoid=avoid, turn=turn)

    def badness(rank):
        booking = demand.booking_on(rank)
        waiting = (rank.pending_tokens.total, rank.pending_pairs.total)
        return (*waiting, rank.share_with(booking))

    for other in usable(ranks):
        ahead = (other.address in avoid, other.state, other.is_crowded)
        order = (best.address in avoid, best.state, best.is_crowded)
        assert order <= ahead
        if order == ahead:
            pairs = list(zip(badness(other), badness(best), strict=True))
            assert not all(one < another for one, another in pairs)


@settings(deadline=None)
@given(pools)
def test_closed_and_resting_ranks_are_never_chosen(ranks):
    choice = found(ranks)
    if isinstance(choice, RankChoice):
        rank = chosen(ranks)
        assert rank.state is not RankState.CLOSED
        assert rank.resting_until_s <= NOW_S
        assert not (rank.num_failures and rank.num_unanswered)


@settings(deadline=None)
@given(pools, demands, avoided, turns, st.integers(1, 500))
def test_more_work_elsewhere_changes_nothing(ranks, demand, avoid, turn, more):
    if not usable(ranks):
        return
    best = chosen(ranks, demand=demand, avoid=avoid, turn=turn)
    heavier = [
        rank
        if rank.address == best.address
        else replace(
            rank,
            pending_tokens=Amount(booked=rank.pending_tokens.total + more),
            requests=Amount(booked=rank.requests.total + more),
        )
        for rank in ranks
    ]
    assert chosen(heavier, demand=demand, avoid=avoid, turn=turn).address == best.address


@settings(deadline=None)
@given(pools)
def test_without_a_choice_every_rank_has_a_reason(ranks):
    nothing = found(ranks)
    if isinstance(nothing, RankChoice):
        assert nothing.reason
        return
    for rank in ranks:
        assert f"{rank.name}: {rejection(rank, now=NOW_S)}" in nothing.reason
    resting = [
        rank.resting_until_s
        for rank in ranks
        if rank.state is not RankState.CLOSED and rank.resting_until_s > NOW_S
    ]
    assert nothing.retry_at_s == min(resting, default=None)


@settings(deadline=None)
@given(st.integers(1, 6), demands, turns)
def test_ranks_of_equal_cost_take_turns(num_ranks, demand, turn):
    ranks = [rank(f"worker-{n}") for n in range(num_ranks)]
    addresses = {chosen(ranks, demand=demand, turn=turn + n).address for n in range(num_ranks)}
    assert len(addresses) == num_ranks


def test_no_known_rank_is_a_reason():
    assert found([]) == NoRankChoice(reason="no rank is known", retry_at_s=None)


def test_a_prompt_goes_where_it_is_prefilled_first():
    # A token more, or as many pairs as take as long as two.
    least, more = rank("least", tokens=500, requests=9), rank("more", tokens=501)
    assert chosen([more, least], demand=PREFILLS) is least
    far = rank("far", tokens=499, pairs=2 * 1000)
    assert chosen([far, least], demand=PREFILLS) is least
    assert chosen([far, replace(least, pending_tokens=Amount(booked=502))], demand=PREFILLS) is far


def test_attention_is_weighed_by_the_pools_median():
    ranks = [rank(str(n), parity_tokens=parity) for n, parity in enumerate([0, 10, 50, 70, 9000])]
    assert parity_tokens(ranks) == 60
    assert parity_tokens(ranks[:1]) == 0
    # Unknown to all: tokens alone count.
    one, other = rank("one", tokens=5, parity_tokens=0), rank("other", pairs=9, parity_tokens=0)
    assert chosen([one, other], demand=PREFILLS) is other


def test_of_equal_ranks_the_prompt_goes_to_the_one_with_more_room():
    full, free = rank("full", requests=3), rank("free", requests=2)
    assert chosen([full, free], demand=PREFILLS) is free


@pytest.mark.parametrize(
    ("held", "free"),
    [
        ({"requests": 5}, {"requests": 4, "latents": 3000, "tokens": 9000}),
        ({"latents": 5000}, {"latents": 4000, "requests": 2, "tokens": 9000}),
        ({"requests": 5}, {"latents": 4800}),
        ({"requests": 8, "max_requests": 10}, {"requests": 14, "max_requests": 20}),
        ({"latents": 4000, "kv_tokens_total": 5000}, {"latents": 6000, "kv_tokens_total": 9000}),
    ],
)
def test_a_request_that_was_prefilled_elsewhere_goes_where_the_larger_share_is_smallest(held, free):
    ranks = [rank("held", **held), rank("free", **free)]
    assert chosen(ranks, demand=CONTINUES).name == "free"
    assert chosen(ranks[::-1], demand=CONTINUES).name == "free"


def test_where_the_same_rank_prefills_and_generates_both_count():
    # A request slot is a tenth of 10,000 cache tokens, of which each weighs a quarter.
    waits, full = rank("waits", tokens=249), rank("full", requests=1)
    assert chosen([waits, full]) is waits
    assert chosen([replace(waits, pending_tokens=Amount(booked=251)), full]) is full


def test_a_cached_beginning_is_not_prefilled_again():
    prompt = tuple(range(320))
    demand = replace(
        PREFILLS, prompt_tokens=320, keys=tuple(keys_of(prompt, block_tokens=16)), block_tokens=16
    )
    knows = rank("knows", block_tokens=16, prefixes=PrefixIndex())
    knows.prefixes.max_blocks = 100
    knows.prefixes.note(demand.keys[:10])
    booking = demand.booking_on(knows)
    assert (booking.pending_tokens, booking.pending_pairs) == (160, 160 * 160 + 160 * 160 // 2)
    assert demand.booking_on(replace(knows, block_tokens=64)).pending_tokens == 320
    empty = rank("empty", block_tokens=16)
    # 160 + 38.4 here, 320 + 51.2 there.
    assert chosen([empty, knows], demand=demand) is knows
    busy = replace(knows, pending_tokens=Amount(booked=172))
    assert chosen([empty, busy], demand=demand) is busy
    assert (
        chosen([empty, replace(knows, pending_tokens=Amount(booked=173))], demand=demand) is empty
    )
    elsewhere = replace(demand, is_prefilled_elsewhere=True)
    assert elsewhere.booking_on(empty).pending_tokens == 320 - 19 * 16


def test_a_prefix_index_keeps_beginnings_longest_and_its_bound():
    index = PrefixIndex()
    index.max_blocks = 8
    one, other = (tuple(bytes([n, m]) for m in range(6)) for n in range(2))
    index.note(one)
    index.note(other)
    assert (len(index), index.num_cached(one), index.num_cached(other)) == (8, 2, 6)
    index.note(one)
    assert (index.num_cached(one), index.num_cached(other)) == (6, 2)
    index.note(tuple(bytes([9, m]) for m in range(20)))
    assert (len(index), index.num_cached(one)) == (8, 0)


def test_ranks_of_an_earlier_version_are_told_apart_by_what_they_report():
    old = [RankLoad(name=name, address=name) for name in ("a", "b")]
    for number, one in enumerate(old):
        info = RankInfo(name=one.name, address=one.address, state=RankState.OPEN, report=1)
        one.note_report(replace(info, num_requests=3 - number, kv_tokens_used=100 * number))
    # Each request is assumed to have 128 tokens to prefill, and a slot of 512 tokens.
    for demand in (PREFILLS, BOTH, CONTINUES):
        assert chosen(old, demand=demand).name == "b"
    new = rank("c", tokens=257, requests=2)
    assert chosen([*old, new], demand=PREFILLS).name == "b"


def test_a_rank_that_broke_under_a_request_is_the_last_resort():
    broke, other = rank("broke"), rank("other", tokens=1000)
    assert chosen([broke, other], avoid=frozenset({"broke:1"})).name == "other"
    assert chosen([broke], avoid=frozenset({"broke:1"})).name == "broke"


def test_a_doubtful_rank_is_chosen_when_all_others_rest():
    silent, heard = rank("silent", state=RankState.DOUBTFUL), rank("heard", tokens=1000)
    assert chosen([silent, heard]).name == "heard"
    assert chosen([silent, replace(heard, resting_until_s=NOW_S + 1)]).name == "silent"


def test_a_rank_with_a_full_cache_comes_after_one_with_room():
    full, busy = rank("full", latents=9500), rank("busy", tokens=9000, latents=1000)
    assert chosen([full, busy]) is busy
    assert chosen([full, replace(busy, state=RankState.DOUBTFUL)]) is full
    assert chosen([replace(full, kv_tokens_total=20_000), busy]).name == "full"


def test_the_reason_has_the_numbers():
    choice = found([rank("a", tokens=40, pairs=5000, requests=2), rank("b", tokens=2000)])
    assert choice.reason == (
        "a has the lowest cost of 2 usable ranks of 2: 45 tokens are queued for prefill, this "
        "prompt adds 105, and with it 30% of the rank's slots or cache are in use"
    )
