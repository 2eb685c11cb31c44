"""Who leads, decided with clocks turned by hand: at no time two, and in the end always one."""

import itertools
import random
from dataclasses import replace

import pytest

from equipoise.balancer.leadership.leader_state import (
    SKIPPED_TERMS,
    TABLE,
    Due,
    Failed,
    GaveUp,
    LeaderRole,
    LeaderState,
    Outranked,
    Overtaken,
    Saw,
    StartsOver,
    Ticked,
    Wrote,
)
from equipoise.balancer.leadership.lease import (
    MAX_LEASE_S,
    LeaseRecord,
    LeaseTiming,
    Sighting,
)
from equipoise.wire.checks import MAX_TERM
from tests.support.elections import TIMING, Balancer, Register, run


@pytest.fixture
def pair():
    register = Register()
    return Balancer("a", register), Balancer("b", register)


def test_the_table_answers_every_event_in_every_role():
    events = {Due, Saw, Wrote, Overtaken, Failed, Ticked, Outranked, GaveUp, StartsOver}
    assert set(TABLE) == set(itertools.product(LeaderRole, events))


def test_the_first_candidate_leads_and_the_other_knows_its_address(pair):
    a, b = pair
    run(pair, from_s=100.0, to_s=120.0)
    assert (a.state.role, a.terms, b.terms) == (LeaderRole.LEADING, [1], [])
    assert b.state.leader_address == "a:7070"
    assert a.state.leader_address == ""


def test_a_killed_leader_is_followed_within_the_duration_and_two_rounds(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=10.0)
    a.running = False
    history = run(pair, from_s=10.0, to_s=20.0)
    taken_s = next(now for now, leaders in history if leaders == ["b"])
    assert taken_s - 10.0 <= TIMING.duration_s + 2 * TIMING.retry_s
    assert b.terms == [2]


def test_a_leader_that_stops_in_order_is_followed_at_the_next_round(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    request = a.state.release()
    a.running = False
    assert a.register.write(request) is not None
    history = run(pair, from_s=5.0, to_s=6.0)
    assert history[0][1] == ["b"]
    assert b.state.release() is not None
    assert LeaderState(candidate=b.state.candidate, timing=TIMING).release() is None


def test_a_partitioned_leader_stops_by_itself_before_anybody_follows(pair):
    a, _ = pair
    run(pair, from_s=0.0, to_s=5.0)
    a.reachable = False
    history = run(pair, from_s=5.0, to_s=20.0)
    stopped_s = next(now for now, leaders in history if not leaders)
    taken_s = next(now for now, leaders in history if leaders == ["b"])
    assert stopped_s - 5.0 <= TIMING.renew_deadline_s
    assert stopped_s < taken_s
    a.reachable = True
    history = run(pair, from_s=20.0, to_s=25.0)
    assert all(leaders == ["b"] for _, leaders in history)
    assert a.state.leader_address == "b:7070"


def test_an_unreachable_register_leaves_no_leader_and_then_a_higher_term(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    a.reachable = b.reachable = False
    assert run(pair, from_s=5.0, to_s=30.0)[-1][1] == []
    a.reachable = b.reachable = True
    assert run(pair, from_s=30.0, to_s=31.0)[-1][1] == ["a"]
    assert a.terms == [1, 2]


def test_a_paused_leader_that_wakes_up_knows_at_once_that_its_lease_is_over(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    a.running = False
    run(pair, from_s=5.0, to_s=30.0)
    a.running = True
    assert not a.leads(30.0)
    assert a.apply(Ticked(), 30.0) is None
    assert a.state.role is LeaderRole.FOLLOWING
    assert b.leads(30.0)


def test_an_answer_that_comes_after_the_pause_wins_and_renews_nothing(pair):
    a, b = pair
    campaign = a.apply(Saw(sighting=None), 0.0)
    late = Wrote(sighting=a.register.write(campaign), sent_s=0.0)
    assert a.apply(late, 2.0) is None
    assert (a.state.role, a.terms) == (LeaderRole.FOLLOWING, [])
    run([b], from_s=0.0, to_s=5.0)
    assert b.terms == [2]
    renewal = b.apply(Due(), 5.0)
    late = Wrote(sighting=b.register.write(renewal), sent_s=5.0)
    b.apply(late, 9.0)
    assert not b.leads(9.0)


def test_a_clock_that_leaps_ends_a_term_and_begins_none(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    b.skew_s = 1000.0
    b.round(4.6)  # The record is still that of the round before.
    assert b.terms == []
    run(pair, from_s=5.0, to_s=8.0)
    assert b.terms == []
    a.skew_s = 1000.0
    assert not a.leads(8.0)
    history = run(pair, from_s=8.0, to_s=15.0)
    assert history[-1][1] == ["a"]
    assert (a.terms, b.terms) == ([1, 2], [])


def test_clocks_of_different_machines_are_never_compared():
    register = Register()
    a, b = Balancer("a", register, skew_s=-5e5), Balancer("b", register, skew_s=9e8)
    run([a, b], from_s=0.0, to_s=5.0)
    a.running = False
    assert run([a, b], from_s=5.0, to_s=10.0)[-1][1] == ["b"]


def test_a_renewal_whose_answer_was_lost_does_not_end_the_term(pair):
    a, _ = pair
    run(pair, from_s=0.0, to_s=5.0)
    renewal = a.apply(Due(), 5.0)
    assert a.register.write(renewal) is not None
    assert a.apply(Failed(reason="no answer"), 5.4) is None
    a.round(5.5)
    assert a.leads(7.0)
    assert a.terms == [1]


def test_a_campaign_whose_answer_was_lost_is_won_at_the_next_look_in_a_new_term(pair):
    a, _ = pair
    campaign = a.apply(Saw(sighting=None), 0.0)
    a.register.write(campaign)
    a.apply(Failed(reason="no answer"), 0.4)
    a.round(0.5)
    assert a.terms == [2]


@pytest.mark.parametrize("left", [None, "b"])
def test_a_leader_whose_record_is_gone_or_anothers_stops_at_its_next_renewal(pair, left):
    a, _ = pair
    run(pair, from_s=0.0, to_s=5.0)
    if left is None:
        a.register.sighting = None
    else:
        record = replace(a.register.sighting.record, holder=left, term=5)
        a.register.sighting = Sighting(record=record, version="other")
    request = a.apply(Due(), 5.0)
    request = a.apply(a.answer(request, 5.0), 5.0)
    a.apply(a.answer(request, 5.0), 5.0)
    assert not a.leads(5.0)


def failed_over(register):
    """The register's server was replaced by one with the same record."""
    register.sighting = replace(register.sighting, version="other", is_latest=False)


def test_a_leader_ends_its_term_at_a_failover_and_is_the_first_to_lead_again(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    failed_over(a.register)
    a.round(5.0)
    assert not a.leads(5.0), "another one may have led while it was suspended with its clock"
    assert "the register failed over" in a.state.reason
    b.round(5.0)
    run((b, a), from_s=5.5, to_s=9.5)
    assert (a.terms, b.terms) == ([1, 2 + SKIPPED_TERMS], [])


def test_another_one_leads_after_a_failover_if_the_leader_is_gone(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    failed_over(a.register)
    a.running = False
    run(pair, from_s=5.0, to_s=10.0)
    assert b.terms == [2 + SKIPPED_TERMS]


def test_terms_go_on_from_the_highest_that_anybody_has_heard_of(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    a.register.sighting = None  # The store was emptied.
    run(pair, from_s=5.0, to_s=9.0)
    assert a.terms + b.terms == [1, 2 + SKIPPED_TERMS]
    leader = a if a.leads(9.0) else b
    leader.apply(Outranked(term=4000), 9.0)
    assert not leader.leads(9.0)
    # The register lost that term, and its leader may not know yet.
    run((leader,), from_s=9.0, to_s=11.5)
    assert 4001 not in leader.terms
    assert "the store has seen term 4000, but the lease has term" in leader.state.reason
    run((leader,), from_s=11.5, to_s=13.0)
    assert leader.terms[-1] == 4001
    leader.apply(Outranked(term=4001), 13.0)
    assert leader.leads(13.0)


def test_without_any_lease_a_balancer_begins_with_a_term_of_its_own(pair):
    """A suspended leader may lead in a term that neither an emptied register nor others know."""
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    assert a.leads(5.0)
    a.running = False
    a.register.sighting = None
    fresh = Balancer(name="c", register=a.register, term_offset=417)
    run((fresh,), from_s=5.0, to_s=6.0)
    assert fresh.terms == [417]
    b.register.sighting = None
    run((b,), from_s=6.0, to_s=12.0)
    assert b.terms == [2 + SKIPPED_TERMS], "it has seen term 1"


def test_leaders_that_two_failovers_lost_had_different_terms(pair):
    """Each of two balancers becomes leader by a failover; the other one never hears of it."""
    terms = []
    for name, term_offset in (("c", 7), ("d", 9)):
        older = Register()
        a = Balancer(name="a", register=older)
        run((a,), from_s=0.0, to_s=2.0)
        failed_over(older)
        fresh = Balancer(name=name, register=older, term_offset=term_offset)
        run((fresh,), from_s=2.0, to_s=9.0)
        terms += fresh.terms
    assert terms == [1 + SKIPPED_TERMS + 7, 1 + SKIPPED_TERMS + 9]


def test_who_has_seen_a_lease_takes_no_empty_register_however_long_it_looks(pair):
    """A register that is empty at two looks may have held a lease in between."""
    a, b = pair
    run([b, a], from_s=0.0, to_s=5.0)
    records = []
    for look in range(20):
        now = 5.0 + look / 2
        a.apply(Due(), now)
        records.append(a.apply(Saw(sighting=None), now).record)
        a.apply(Failed(reason="no answer"), now)
    assert all(record.is_vacancy and record.term == 1 + SKIPPED_TERMS for record in records)
    assert len(set(records)) == 20, "a record is a version"
    assert a.terms == []


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_lease_that_vanished_expires_like_one_that_is_not_renewed(pair, is_paused):
    """Its leader leads until its next renewal, or until its deadline if it is paused."""
    a, b = pair
    run([b, a], from_s=0.0, to_s=5.0)
    assert (a.terms, b.terms) == ([], [1])
    b.register.sighting = None
    a.round(5.0)
    assert b.leads(5.0)
    assert not a.leads(5.0)
    assert a.state.reason == "the lease was lost"
    a.round(5.0)
    assert a.state.reason == "the lease was lost, and its leader may lead for up to 3 s"
    assert a.state.leader_address == ""
    b.running = not is_paused
    history = run(pair, from_s=5.0, to_s=15.0)
    taken_s = next(now for now, leaders in history if leaders == ["a"])
    assert TIMING.duration_s <= taken_s - 5.0 <= TIMING.duration_s + 2 * TIMING.retry_s
    assert a.terms == [2 + SKIPPED_TERMS]


@pytest.mark.parametrize("holder", ["", "a"])
def test_a_register_that_went_back_to_a_free_lease_is_taken_once_its_last_leader_must_know(
    pair, holder
):
    """A failover of the store may show a lease of `a`'s own, or one that was released."""
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    old = replace(a.register.sighting.record, holder=holder)
    a.reachable = False
    run(pair, from_s=5.0, to_s=12.0)
    a.reachable = True
    run(pair, from_s=12.0, to_s=13.0)
    assert (a.terms, b.terms) == ([1], [2])
    b.running = False  # It does not look at the register, but its lease is valid.
    a.register.sighting = Sighting(record=old, version="older")
    a.round(13.0)
    assert a.terms == [1]
    assert a.state.reason.startswith("the lease went back from term 2 to 1")
    b.running = True
    assert b.leads(13.0)
    b.running = False
    history = run(pair, from_s=13.5, to_s=20.0)
    taken_s = next(now for now, leaders in history if leaders == ["a"])
    assert TIMING.duration_s <= taken_s - 13.0 <= TIMING.duration_s + 2 * TIMING.retry_s
    assert a.terms == [1, 3]


@pytest.mark.parametrize("holder", ["", "a"])
def test_a_lease_older_than_its_register_is_waited_for_and_lost_terms_are_skipped(pair, holder):
    """`a` never saw the term of `b`, which a failover of the store lost."""
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    old = replace(a.register.sighting.record, holder=holder)
    a.reachable = False
    run(pair, from_s=5.0, to_s=12.0)
    assert (a.terms, b.terms, a.state.highest_term) == ([1], [2], 1)
    a.reachable, b.running = True, False  # b's lease is valid; it looks at the register later.
    a.register.sighting = Sighting(record=old, version="older", is_latest=False)
    history = run(pair, from_s=12.0, to_s=20.0)
    taken_s = next(now for now, leaders in history if leaders == ["a"])
    assert TIMING.duration_s <= taken_s - 12.0 <= TIMING.duration_s + 2 * TIMING.retry_s
    assert a.terms == [1, 2 + SKIPPED_TERMS], "term 2 is used"


def test_a_candidate_says_why_it_waits_for_a_free_lease_after_a_failover(pair):
    a, b = pair
    run([a], from_s=0.0, to_s=5.0)
    free = replace(a.register.sighting.record, holder="")
    b.apply(Saw(sighting=Sighting(record=free, version="older", is_latest=False)), 5.0)
    assert b.state.reason.startswith("the register failed over after the lease of term 1 was")


@pytest.mark.parametrize("where", ["lease", "store"])
def test_the_last_term_is_followed_by_none_and_the_remedy_is_named(pair, where):
    a, b = pair
    last = LeaseRecord(holder="", address="", term=MAX_TERM - 1, renewals=0, duration_s=3.0)
    a.register.sighting = Sighting(record=last, version="found")
    run(pair, from_s=0.0, to_s=5.0)
    assert a.terms == [MAX_TERM], "it can be led in"
    if where == "store":
        a.register.sighting = None
        b.apply(Outranked(term=MAX_TERM), 5.0)
    a.running = False
    history = run(pair, from_s=5.0, to_s=20.0)
    assert history[-1][1] == []
    assert b.terms == []
    assert b.state.reason.startswith("term 2147483647 is the last one")
    assert "empty the lease, empty the store" in b.state.reason


@pytest.mark.parametrize("stated_s", [0.001, 1e9])
def test_the_duration_stated_by_a_dead_leader_is_limited(pair, stated_s):
    a, _ = pair
    run(pair, from_s=0.0, to_s=5.0)
    record = replace(a.register.sighting.record, duration_s=stated_s)
    a.register.sighting = Sighting(record=record, version="damaged")
    a.running = False
    history = run(pair, from_s=5.0, to_s=80.0)
    taken_s = next(now for now, leaders in history if leaders == ["b"])
    assert TIMING.duration_s <= taken_s - 5.0 <= MAX_LEASE_S + 2 * TIMING.retry_s


def test_a_leader_that_cannot_do_its_work_lets_another_one_try(pair):
    a, b = pair
    run(pair, from_s=0.0, to_s=5.0)
    request = a.apply(GaveUp(reason="the store cannot be read"), 5.0)
    assert a.answer(request, 5.0).sighting.record.holder == ""
    assert (a.state.role, a.state.reason) == (
        LeaderRole.FOLLOWING,
        "the store cannot be read",
    )
    b.round(5.0)
    assert b.leads(5.0)


def test_in_any_turmoil_there_is_one_leader_at_most_and_terms_are_never_used_twice():
    for seed in range(100):
        chance = random.Random(seed)
        register = Register()
        balancers = [Balancer(name, register) for name in "abc"]
        now = 0.0
        for _ in range(200):
            now += chance.uniform(0.0, 0.7)
            balancer = chance.choice(balancers)
            match chance.randrange(14):
                case 0:
                    balancer.reachable = not balancer.reachable
                case 1:
                    balancer.running = not balancer.running
                case 2:
                    # Once for each clock: those that leap all the time could be no clocks.
                    balancer.skew_s = balancer.skew_s or chance.uniform(0.0, 100.0)
                case 3:
                    outranked = Outranked(term=chance.randrange(50))
                    balancer.apply(chance.choice((outranked, StartsOver(reason="lost"))), now)
                case _:
                    balancer.round(now)
            assert sum(one.leads(now) for one in balancers) <= 1
        used = [term for balancer in balancers for term in balancer.terms]
        assert len(used) == len(set(used))
        for balancer in balancers:
            balancer.reachable = balancer.running = True
        steps = [now + 10 + n * TIMING.retry_s for n in range(20)]
        for moment in steps:
            for balancer in balancers:
                balancer.round(moment)
        assert sum(balancer.leads(steps[-1]) for balancer in balancers) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"renew_deadline_s": 3.0},
        {"retry_s": 1.6},
        {"request_timeout_s": 0.0},
        {"retry_s": 0.0},
        {"duration_s": float("nan")},
    ],
)
def test_timings_that_could_let_two_lead_are_rejected(wrong):
    with pytest.raises(ValueError, match="a lease needs"):
        LeaseTiming(**wrong)


def test_a_record_is_compared_by_version_not_by_content():
    record = LeaseRecord(holder="b", address="b:1", term=1, renewals=0, duration_s=3.0)
    follower = Balancer("a", Register())
    for second in range(20):
        follower.apply(Saw(sighting=Sighting(record=record, version=str(second))), float(second))
    assert follower.state.role is LeaderRole.FOLLOWING
