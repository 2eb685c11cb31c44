"""Requests go to the available rank with the least work, for a stated reason."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.routing import (
    NoRankChoice,
    RankChoice,
    RankLoad,
    RankState,
    choose,
    rejection,
)

NOW_S = 100.0

loads = st.builds(
    RankLoad,
    name=st.just(""),
    address=st.just(""),
    state=st.sampled_from(RankState),
    num_open=st.just(3),
    num_unanswered=st.integers(0, 3),
    tokens_in_flight=st.integers(0, 2000),
    kv_tokens=st.integers(0, 2000),
    num_foreign=st.integers(0, 20),
    foreign_kv_tokens=st.integers(0, 2000),
    kv_tokens_total=st.sampled_from([0, 1000, 3000]),
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


def found(ranks, avoid=frozenset(), turn=0):
    return choose(ranks, now=NOW_S, avoid=avoid, turn=turn)


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


def badness(rank, avoid):
    return (rank.address in avoid, rank.state, rank.is_crowded, rank.work_tokens)


@settings(deadline=None)
@given(pools, avoided, turns)
def test_no_other_rank_has_a_lower_cost(ranks, avoid, turn):
    if not usable(ranks):
        return
    best = chosen(ranks, avoid=avoid, turn=turn)
    for other in usable(ranks):
        assert badness(best, avoid) <= badness(other, avoid)


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
@given(pools, avoided, turns, st.integers(1, 500))
def test_more_work_elsewhere_changes_nothing(ranks, avoid, turn, more):
    if not usable(ranks):
        return
    best = chosen(ranks, avoid=avoid, turn=turn)
    heavier = [
        rank
        if rank.address == best.address
        else replace(rank, tokens_in_flight=rank.tokens_in_flight + more)
        for rank in ranks
    ]
    assert chosen(heavier, avoid=avoid, turn=turn).address == best.address


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
@given(st.integers(1, 6), turns)
def test_ranks_with_equal_work_take_turns(num_ranks, turn):
    ranks = [
        RankLoad(name=f"worker-{n}", address=f"host:{n}", state=RankState.OPEN)
        for n in range(num_ranks)
    ]
    addresses = {chosen(ranks, turn=turn + n).address for n in range(num_ranks)}
    assert len(addresses) == num_ranks


def test_no_known_rank_is_a_reason():
    assert found([]) == NoRankChoice(reason="no rank is known", retry_at_s=None)


def test_work_counts_tokens_in_flight_cached_tokens_and_foreign_requests():
    idle = RankLoad(name="idle", address="a", state=RankState.OPEN)
    for busier in ({"tokens_in_flight": 8}, {"kv_tokens": 8}, {"num_foreign": 1}):
        assert chosen([replace(idle, name="busy", address="b", **busier), idle]).name == "idle"
    made = replace(idle, name="made", kv_tokens=100)
    to_make = replace(idle, name="to make", address="b", tokens_in_flight=100)
    assert chosen([to_make, made]).name == "made"


def test_a_rank_that_broke_under_a_request_is_the_last_resort():
    broke = RankLoad(name="broke", address="a", state=RankState.OPEN)
    other = RankLoad(name="other", address="b", state=RankState.OPEN, tokens_in_flight=1000)
    assert chosen([broke, other], avoid=frozenset("a")).name == "other"
    assert chosen([broke], avoid=frozenset("a")).name == "broke"


def test_a_doubtful_rank_is_chosen_when_all_others_rest():
    silent = RankLoad(name="silent", address="a", state=RankState.DOUBTFUL)
    heard = RankLoad(name="heard", address="b", state=RankState.OPEN, tokens_in_flight=1000)
    assert chosen([silent, heard]).name == "heard"
    assert chosen([silent, replace(heard, resting_until_s=NOW_S + 1)]).name == "silent"


def test_a_rank_with_a_full_cache_comes_after_one_with_room():
    full = RankLoad(
        name="full", address="f:1", state=RankState.OPEN, kv_tokens=950, kv_tokens_total=1000
    )
    busy = RankLoad(
        name="busy", address="b:1", state=RankState.OPEN, tokens_in_flight=9000, kv_tokens=100
    )
    assert chosen([full, busy]) is busy
    assert chosen([full, replace(busy, state=RankState.DOUBTFUL)]) is full
    assert chosen([replace(full, kv_tokens_total=2000), busy]).name == "full"


def test_foreign_cache_use_counts_like_our_own():
    mine = RankLoad(name="mine", address="m:1", state=RankState.OPEN, kv_tokens=400)
    theirs = replace(mine, name="theirs", address="t:1", kv_tokens=0, foreign_kv_tokens=399)
    assert chosen([mine, theirs]) is theirs
    assert theirs.work_tokens < mine.work_tokens
