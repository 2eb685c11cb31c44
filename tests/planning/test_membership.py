"""When a pool opens a new epoch, with which workers, and for which reason."""

import pytest

from equipoise.planning.expert_needs import ExpertNeeds
from equipoise.planning.membership import (
    EpochCandidate,
    EpochDecision,
    MemberState,
    next_epoch,
)
from equipoise.planning.policy import Policy

POLICY = Policy(reform_timeout_s=5.0, start_timeout_s=60.0, join_settle_s=0.5, report_timeout_s=5.0)
NEW, SURVIVOR, AHEAD, JOINING, SERVING, SLOW, QUARANTINED, MISSING, STUCK = MemberState


def worker(name, state, *, since_s=0.0, holds=None, reason="its stream was cut", places=0):
    holds = state is SURVIVOR if holds is None else holds
    return EpochCandidate(
        name=name, state=state, since_s=since_s, holds=holds, reason=reason, num_places=places
    )


def decide(*candidates, now=0.0, **changes):
    how = {
        "num_ranks": 4,
        "needs": ExpertNeeds(num_experts=32, num_layers=4, slots_per_rank=12),
        "unheard": frozenset(),
        "is_on_record": True,
        "is_rolling_out": False,
        "policy": POLICY,
        "now": now,
    }
    return next_epoch(candidates, **how | changes)


def workers(state, count, *, first=0, **changes):
    return [worker(f"w-{first + number}", state, **changes) for number in range(count)]


def test_without_workers_nothing_is_decided():
    opening = decide()
    assert (opening.workers, opening.reason, opening.is_down) == ((), "", False)


def test_a_complete_group_is_not_interrupted():
    assert decide(*workers(SERVING, 4), now=1e6).workers == ()


@pytest.mark.parametrize(("places", "is_down"), [((60, 40, 28), False), ((60, 40, 27), True)])
def test_what_counts_is_how_many_places_workers_have_together(places, is_down):
    members = [worker(f"w-{rank}", NEW, places=room) for rank, room in enumerate(places)]
    opening = decide(*members, now=60.0)
    assert (opening.is_down, len(opening.workers)) == (is_down, 0 if is_down else 3)
    if is_down:
        reason = "127 places cannot hold 32 experts in each of 4 layers: 128 are needed"
        assert reason in opening.reason


@pytest.mark.parametrize(("room", "is_left_out"), [(40, False), (28, True)])
def test_a_slow_worker_is_left_out_only_if_the_others_have_enough_places(room, is_left_out):
    others = [worker(f"w-{rank}", SERVING, places=44) for rank in range(2)]
    others.append(worker("w-2", SERVING, places=40 if room == 28 else 36))
    slow = worker("w-3", SLOW, places=room, reason="3.0 times longer")
    assert (decide(*others, slow).left_out == ("w-3",)) == is_left_out


# The start ---------------------------------------------------------------------------------------


def test_a_pool_opens_when_all_its_workers_are_connected():
    assert set(decide(*workers(NEW, 4)).workers) == {"w-0", "w-1", "w-2", "w-3"}


def test_a_pool_waits_for_its_workers_and_reports_how_many():
    opening = decide(*workers(NEW, 3), now=59.9)
    assert not opening.workers
    assert "3 of 4 workers are connected (w-0, w-1, w-2): waiting for 1 more" in opening.reason


def test_waiting_for_the_start_times_out():
    opening = decide(*workers(NEW, 3), now=60.0)
    assert len(opening.workers) == 3
    assert opening.timeout == "start"


def test_too_few_slots_at_the_timeout_mean_the_pool_is_down():
    opening = decide(*workers(NEW, 2), now=60.0)
    assert opening.is_down
    assert not opening.workers
    assert "2 workers (w-0, w-1) with 24 slots cannot hold 32 experts" in opening.reason
    assert "3 workers are needed" in opening.reason


# A rank is lost ----------------------------------------------------------------------------------


def test_a_loss_that_all_noticed_opens_an_epoch_of_the_survivors_at_once():
    opening = decide(worker("w-0", MISSING), *workers(SURVIVOR, 3, first=1))
    assert set(opening.workers) == {"w-1", "w-2", "w-3"}
    assert opening.reason == "the group was lost: w-0 is missing: its stream was cut"
    assert opening.timeout == ""


def test_workers_that_have_not_noticed_a_loss_are_waited_for():
    pool = [worker("w-0", MISSING), *workers(SURVIVOR, 2, first=1), worker("w-3", SERVING)]
    opening = decide(*pool, now=4.9)
    assert not opening.workers
    assert "waiting for w-3 to leave it, at most 5 s" in opening.reason


def test_a_worker_that_never_notices_a_loss_is_left_out_at_the_timeout():
    pool = [*workers(SURVIVOR, 3), worker("w-3", SERVING)]
    opening = decide(*pool, now=5.0)
    assert set(opening.workers) == {"w-0", "w-1", "w-2"}
    assert opening.left_out == ("w-3",)
    assert opening.timeout == "reform"
    assert "w-3 did not leave it within 5 s" in opening.reason


def test_a_worker_left_out_is_neither_waited_for_nor_assigned_a_rank():
    opening = decide(*workers(SURVIVOR, 3), worker("w-3", STUCK))
    assert set(opening.workers) == {"w-0", "w-1", "w-2"}


def test_a_worker_that_is_needed_is_included_at_the_timeout():
    opening = decide(*workers(SURVIVOR, 2), worker("w-3", SERVING), now=5.0)
    assert set(opening.workers) == {"w-0", "w-1", "w-3"}
    assert "w-3 did not leave it within 5 s, but all are needed" in opening.reason


def test_a_worker_that_lost_a_group_in_which_most_still_serve_is_left_out():
    opening = decide(
        worker("w-0", SURVIVOR, reason="a lie"), *workers(SERVING, 3, first=1), now=5.0
    )
    assert set(opening.workers) == {"w-1", "w-2", "w-3"}
    assert opening.left_out == ("w-0",)
    assert opening.is_disputed
    assert opening.reason == (
        "w-0 lost the group (a lie), but w-1, w-2, w-3 still serve in it after 5 s and continue "
        "alone"
    )


def test_a_group_lost_without_a_missing_worker_re_forms():
    opening = decide(*workers(SURVIVOR, 4, reason="a step timed out"))
    assert len(opening.workers) == 4
    assert opening.reason == "the group was lost: a step timed out"


def test_losing_too_many_slots_takes_the_pool_down_until_a_worker_returns():
    pool = [*workers(MISSING, 2), *workers(SURVIVOR, 2, first=2)]
    opening = decide(*pool)
    assert opening.is_down
    assert "w-0 is missing" in opening.reason
    assert len(decide(*pool, worker("w-4", NEW)).workers) == 3


def test_a_broken_stream_alone_is_not_a_loss_because_the_rank_may_still_step():
    assert decide(worker("w-0", MISSING), *workers(SERVING, 3, first=1), now=1e6).workers == ()


# While ranks form --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_a_loss_while_ranks_form_opens_the_next_epoch_at_once(number):
    pool = workers(JOINING, 4)
    pool[number] = worker(f"w-{number}", MISSING)
    opening = decide(*pool)
    assert set(opening.workers) == {f"w-{other}" for other in range(4)} - {f"w-{number}"}
    assert f"w-{number} is missing: its stream was cut, before all ranks served" in opening.reason


def test_a_rank_that_does_not_serve_in_time_is_left_out_if_the_others_suffice():
    pool = [*workers(SERVING, 3), worker("w-3", JOINING, since_s=1.0)]
    assert not decide(*pool, now=600.9).workers
    opening = decide(*pool, now=601.0)
    assert (set(opening.workers), opening.left_out) == ({"w-0", "w-1", "w-2"}, ("w-3",))
    assert (opening.reason, opening.timeout) == ("w-3 did not serve within 600 s", "join")


@pytest.mark.parametrize(
    "pool", [workers(JOINING, 4), [*workers(SERVING, 2), *workers(JOINING, 2, first=2)]]
)
def test_ranks_that_do_not_serve_in_time_but_are_needed_get_another_epoch(pool):
    assert not decide(*pool, now=599.9).workers
    opening = decide(*pool, now=600.0)
    assert (len(opening.workers), opening.left_out, opening.timeout) == (4, (), "join")
    assert "did not serve within 600 s, but all are needed" in opening.reason


@pytest.mark.parametrize("others", [AHEAD, JOINING, SURVIVOR, SERVING])
def test_a_rank_that_took_up_a_later_epoch_gets_one_above_it_at_once(others):
    ahead = worker("w-3", AHEAD, reason="it has already taken up epoch 58")
    opening = decide(*workers(others, 3), ahead)
    assert len(opening.workers) == 4
    assert opening.reason.endswith("w-3 is ahead: it has already taken up epoch 58")
    assert not opening.left_out


def test_new_workers_wait_until_joining_ranks_serve():
    opening = decide(*workers(JOINING, 4), worker("w-4", NEW), now=599.0)
    assert not opening.workers
    assert "w-4 joins when w-0, w-1, w-2, w-3 serves" in opening.reason


def test_a_rank_that_cannot_join_while_others_load_waits_until_the_timeout():
    pool = [*workers(SURVIVOR, 3), worker("w-3", JOINING)]
    assert not decide(*pool, now=4.9).workers
    assert decide(*pool, now=5.0).left_out == ("w-3",)


# Newcomers ---------------------------------------------------------------------------------------


def test_new_workers_join_together_after_the_settling_time():
    pool = [*workers(SERVING, 4), worker("w-4", NEW), worker("w-5", NEW, since_s=0.3)]
    assert decide(*pool, now=0.7).reason == "w-4, w-5 joins shortly"
    assert len(decide(*pool, now=0.8).workers) == 6


def test_a_worker_that_comes_again_and_again_keeps_no_other_out():
    def pool(now):
        return [*workers(SERVING, 4), worker("w-4", NEW), worker("w-5", NEW, since_s=now - 0.1)]

    assert not decide(*pool(4.9), now=4.9).workers
    assert len(decide(*pool(5.0), now=5.0).workers) == 6


def test_nor_beside_a_missing_one():
    def pool(now):
        new = [worker("w-4", NEW), worker("w-5", NEW, since_s=now - 1.0)]
        return [worker("w-0", MISSING), *workers(SERVING, 3, first=1), *new]

    assert not decide(*pool(49.0), now=49.0).workers
    assert decide(*pool(50.0), now=50.0).workers


def test_new_workers_wait_for_a_rollout_to_end():
    opening = decide(*workers(SERVING, 4), worker("w-4", NEW), now=9.0, is_rolling_out=True)
    assert opening.reason == "w-4 joins when the rollout is over"


def test_a_new_worker_beside_a_missing_one_waits_until_the_timeout():
    pool = [worker("w-0", MISSING), *workers(SERVING, 3, first=1), worker("w-4", NEW, since_s=1.0)]
    assert not decide(*pool, now=5.9).workers
    opening = decide(*pool, now=6.0)
    assert set(opening.workers) == {"w-1", "w-2", "w-3", "w-4"}
    assert opening.timeout == "reform"


def test_a_new_worker_waits_for_ranks_not_yet_connected_to_a_new_balancer():
    pool = [*workers(SERVING, 3), worker("w-4", NEW)]
    opening = decide(*pool, now=4.9, unheard=frozenset({"w-3"}))
    assert not opening.workers
    assert "w-3 has not connected yet" in opening.reason
    assert len(decide(*pool, now=5.0, unheard=frozenset({"w-3"})).workers) == 4


# A balancer that was restarted -------------------------------------------------------------------


def test_survivors_wait_for_ranks_not_yet_connected_to_a_new_balancer():
    pool = workers(NEW, 3, holds=True)
    assert not decide(*pool, now=4.9, unheard=frozenset({"w-3"})).workers
    opening = decide(*pool, now=5.0, unheard=frozenset({"w-3"}))
    assert len(opening.workers) == 3
    assert opening.timeout == "reform"
    assert len(decide(*pool, now=0.0).workers) == 3, "all that were known are here"


# Slow workers ------------------------------------------------------------------------------------


def test_a_group_continues_without_slow_workers():
    slow = worker("w-3", SLOW, reason="3.0 times longer")
    opening = decide(*workers(SERVING, 3), slow)
    assert set(opening.workers) == {"w-0", "w-1", "w-2"}
    assert opening.left_out == ("w-3",)
    assert opening.reason == "continues without slow workers: w-3: 3.0 times longer"


def test_a_new_worker_replaces_a_slow_one():
    slow = worker("w-2", SLOW, reason="3.0 times longer")
    opening = decide(*workers(SERVING, 2), slow, *workers(NEW, 1, first=3))
    assert set(opening.workers) == {"w-0", "w-1", "w-3"}


def test_a_slow_worker_that_is_needed_stays():
    slow = worker("w-2", SLOW, reason="3.0 times longer")
    opening = decide(*workers(SERVING, 2), slow)
    assert not opening.workers
    assert opening.reason == "slow, but needed for all experts to have slots: w-2: 3.0 times longer"


def test_no_worker_is_left_out_during_a_rollout():
    slow = worker("w-3", SLOW, reason="3.0 times longer")
    assert not decide(*workers(SERVING, 3), slow, is_rolling_out=True).workers


# Quarantine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rolling_out", [False, True])
@pytest.mark.parametrize("state", [SERVING, JOINING, SURVIVOR])
def test_the_others_continue_at_once_without_a_quarantined_worker(state, is_rolling_out):
    bad = worker("w-3", QUARANTINED, reason="2 of its slots hold other bytes")
    opening = decide(*workers(state, 3), bad, is_rolling_out=is_rolling_out)
    assert set(opening.workers) == {"w-0", "w-1", "w-2"}
    assert opening.left_out == ("w-3",)
    assert "without quarantined workers: w-3: 2 of its slots" in opening.reason


def test_a_quarantined_worker_is_not_taken_back_although_it_is_needed():
    opening = decide(*workers(SERVING, 2), worker("w-2", QUARANTINED))
    assert opening.is_down
    assert not opening.workers
    assert "not quarantined do not suffice (24 slots cannot hold 32 experts: 3" in opening.reason


# Engines of other projects -----------------------------------------------------------------------


@pytest.mark.parametrize("state", [NEW, SURVIVOR, AHEAD, QUARANTINED, MISSING, STUCK])
def test_no_epoch_opens_for_the_ranks_of_an_engine(state):
    ranks = [*workers(SERVING, 3), worker("w-3", state)]
    opening = decide(*ranks, now=1e6, engine="vLLM 0.33.0")
    assert opening.workers == ()
    assert "waiting for w-3: the ranks of vLLM 0.33.0 keep their group" in opening.reason
    is_connected = state in {NEW, SURVIVOR, AHEAD}
    assert ("give another engine a pool of its own" in opening.reason) is is_connected


@pytest.mark.parametrize("state", [SERVING, SLOW])
def test_a_complete_group_of_an_engine_waits_for_nothing(state):
    ranks = [*workers(SERVING, 3), worker("w-3", state)]
    assert decide(*ranks, now=1e6, engine="vLLM 0.33.0") == EpochDecision()


def test_ranks_of_an_engine_that_lost_their_group_are_not_assigned_again():
    ranks = workers(SURVIVOR, 4)
    assert decide(*ranks, now=1e6).workers
    assert not decide(*ranks, now=1e6, engine="vLLM 0.33.0").workers
