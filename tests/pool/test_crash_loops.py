"""A worker that dies in one epoch after another, and what it costs the others."""

import pytest

from equipoise.pool.health import Health
from tests.support.joining_workers import Fleet

LOOPING = "worker-3"
OTHERS = ["worker-0", "worker-1", "worker-2"]


def crash(fleet, name=LOOPING, *, after_s, back_s):
    """It is there for a while, dies, and its supervisor starts it again."""
    fleet.live(seconds=after_s)
    fleet.kill(name)
    fleet.live(seconds=back_s)
    fleet.restart(name)


def serving(fleet):
    return [name for name, worker in fleet.workers.items() if worker.alive and worker.serves]


def expects(fleet, name):
    """Whether ranks wait for a worker's experts, or serve with it."""
    return name in [peer.worker for peer in fleet.workers["worker-0"].join_epoch.peers]


@pytest.mark.parametrize("loads", [True, False])
def test_a_worker_that_crashes_again_and_again_interrupts_the_others_ever_less(make_harness, loads):
    """Whether it dies while it loads its experts, for which all ranks wait, or as it serves."""
    fleet = Fleet(make_harness)
    fleet.live(seconds=90)
    opened, num_served = [], 0
    for _ in range(90):
        fleet.kill(LOOPING)
        fleet.live(seconds=5)
        fleet.restart(LOOPING)
        before = len(fleet.opened())
        for _ in range(10):
            fleet.live(seconds=0.5, forms=not (loads and expects(fleet, LOOPING)))
            num_served += set(OTHERS) <= set(serving(fleet))
        opened.append(len(fleet.opened()) - before)
    assert sum(opened) <= 20
    assert sum(opened[-50:]) <= 6
    assert num_served > 800
    reason = fleet.harness.pool.diagnosis().reason
    assert f"{LOOPING} gets no rank: it died or restarted in " in reason


def test_workers_of_a_bad_machine_that_crash_at_different_times_are_excluded(make_harness):
    fleet = Fleet(make_harness, num_ranks=8, slots_per_rank=8)
    fleet.live(seconds=90)
    bad = ["worker-5", "worker-6", "worker-7"]
    for _ in range(10):
        for name in bad:
            crash(fleet, name, after_s=2, back_s=1)
    before = len(fleet.opened())
    for _ in range(30):
        for name in bad:
            crash(fleet, name, after_s=2, back_s=1)
    assert len(fleet.opened()) - before <= 30
    reason = fleet.harness.pool.diagnosis().reason
    assert any(f"{name} gets no rank: it died or restarted in " in reason for name in bad)


def test_workers_that_died_once_before_do_not_delay_the_exclusion_of_one_that_crashes(make_harness):
    fleet = Fleet(make_harness)
    fleet.live(seconds=5)
    for name in OTHERS[:2]:
        crash(fleet, name, after_s=3, back_s=2)
    for _ in range(5):
        assert "gets no rank" not in fleet.harness.pool.diagnosis().reason
        crash(fleet, after_s=3, back_s=1)
    fleet.live(seconds=3)
    reason = fleet.harness.pool.diagnosis().reason
    assert f"{LOOPING} gets no rank: it died or restarted in 5 epochs" in reason


class Inattentive(Fleet):
    """One worker never notices that a peer is gone."""

    def _is_broken(self, worker):
        return worker.hello.worker != "worker-1" and super()._is_broken(worker)


def test_a_worker_that_crashes_is_excluded_also_if_a_peer_does_not_leave_in_time(make_harness):
    fleet = Inattentive(make_harness)
    for _ in range(5):
        crash(fleet, after_s=8, back_s=7)
    fleet.live(seconds=8)
    assert any("did not leave it within" in line for line in fleet.harness.logs)
    assert (
        f"{LOOPING} gets no rank: it died or restarted in " in fleet.harness.pool.diagnosis().reason
    )


def test_workers_that_die_in_turn_are_all_taken_back(make_harness):
    fleet = Fleet(make_harness)
    fleet.live(seconds=5)
    for number in range(16):
        crash(fleet, f"worker-{number % 4}", after_s=3, back_s=2)
    fleet.live(seconds=5)
    assert serving(fleet) == sorted(fleet.workers)
    assert fleet.harness.pool.diagnosis().health is Health.SERVING


def test_a_worker_that_crashes_long_after_it_joined_is_taken_back(make_harness):
    fleet = Fleet(make_harness)
    for _ in range(8):
        crash(fleet, after_s=70, back_s=5)
    fleet.live(seconds=5)
    assert serving(fleet) == sorted(fleet.workers)


def test_all_workers_that_restart_together_are_taken_back(make_harness):
    fleet = Fleet(make_harness)
    for _ in range(8):
        fleet.live(seconds=5)
        for name in fleet.workers:
            fleet.kill(name)
        for name in fleet.workers:
            fleet.restart(name)
    fleet.live(seconds=10)
    assert serving(fleet) == sorted(fleet.workers)


def test_the_only_worker_of_a_pool_is_taken_back_however_often_it_crashes(make_harness):
    fleet = Fleet(make_harness, num_ranks=1, slots_per_rank=32)
    for _ in range(8):
        crash(fleet, "worker-0", after_s=3, back_s=1)
    fleet.live(seconds=2)
    assert serving(fleet) == ["worker-0"]


def test_a_worker_that_is_needed_is_taken_back_however_often_it_crashes(make_harness):
    fleet = Fleet(make_harness, slots_per_rank=8)
    for _ in range(8):
        crash(fleet, after_s=3, back_s=1)
    fleet.live(seconds=5)
    assert serving(fleet) == sorted(fleet.workers)
