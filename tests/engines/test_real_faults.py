"""What happens to ranks of vLLM's and SGLang's real code when something breaks."""

import os
import signal
import time

import pytest

from equipoise_api.v1 import status_pb2
from tests.engines.real import PHASES

IDLE_S = 90.0
"""Three times the time within which ranks must switch."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("damaged", "corrupted"),
        ("slow", "no answer in 5 s"),
        ("unreachable", "ipv4:127.0.0.2:"),
    ],
)
def test_what_a_peer_does_not_give_is_rejected_by_name_and_nothing_switches(
    real_balancer, run_of, answer, fault
):
    run = run_of(answer=answer, redundant=0)
    real_balancer.until(lambda status: status.rollouts_aborted >= 2)
    real_balancer.until(lambda _: fault in real_balancer.log)
    run.until_windows(2)
    found = run.records()
    assert fault in run.log
    assert [one["switches"] for one in found] == [[]] * 4
    assert [one["stopped"] for one in found] == [""] * 4


def test_a_balancer_that_dies_in_any_phase_of_a_rollout_is_succeeded(real_balancer, run_of):
    run = run_of()
    run.until_balanced()
    real_balancer.die_in_every_phase(lambda: run.until_windows(1))
    found = run.records()
    assert len(found[0]["switches"]) > len(PHASES)
    assert [one["stopped"] for one in found] == [""] * 4


def test_a_balancer_that_loses_its_store_is_told_the_layout_by_the_ranks(real_balancer, run_of):
    run = run_of()
    run.until_balanced()
    real_balancer.pin(real_balancer.layout())
    real_balancer.until(lambda status: not status.HasField("rollout"))
    layout, epoch = real_balancer.layout(), real_balancer.status().epoch
    real_balancer.kill()
    real_balancer.lose_store()
    run.until_windows(1)
    real_balancer.start()
    real_balancer.until(lambda status: status.health == status_pb2.POOL_HEALTH_SERVING)
    assert real_balancer.layout().expert_of_slot == layout.expert_of_slot
    assert real_balancer.status().epoch == epoch
    run.control(traffic=1)
    run.until_balanced()
    assert [one["stopped"] for one in run.records()] == [""] * 4


def test_an_idle_engine_is_shown_and_balanced_when_it_serves_again(real_balancer, run_of):
    run = run_of()
    run.until_balanced()
    run.control(is_idle=True)
    # A layout that was staged at that moment is dropped when the time to switch is over.
    real_balancer.until(
        lambda status: all(rank.idle for rank in status.ranks) and not status.HasField("rollout")
    )
    windows, aborted = len(run.windows()), real_balancer.status().rollouts_aborted
    enough_s = time.monotonic() + IDLE_S
    real_balancer.until(lambda _: time.monotonic() > enough_s)
    assert len(run.windows()) <= windows + 1
    assert real_balancer.status().rollouts_aborted == aborted
    run.control(is_idle=False, traffic=1)
    run.until_balanced()
    assert [one["stopped"] for one in run.records()] == [""] * 4


def test_a_rank_that_answers_nothing_is_named_and_balanced_when_it_answers_again(
    real_balancer, run_of
):
    run = run_of()
    run.until_balanced()
    epoch = real_balancer.status().epoch
    stopped = run.pids()[2]
    os.kill(stopped, signal.SIGSTOP)
    real_balancer.until(lambda status: "engine-2" in status.health_reason)
    os.kill(stopped, signal.SIGCONT)
    real_balancer.until(lambda status: status.health == status_pb2.POOL_HEALTH_SERVING)
    run.control(traffic=1)
    run.until_balanced()
    assert real_balancer.status().epoch == epoch
    assert [one["stopped"] for one in run.records()] == [""] * 4


def test_a_rank_that_dies_is_named_and_no_other_hangs(real_balancer, run_of):
    """The engine itself fails without it: its own collectives do, here those of the test."""
    run = run_of()
    run.until_balanced()
    os.kill(run.pids()[2], signal.SIGKILL)
    assert run.wait()[2] == signal.SIGKILL
    real_balancer.until(lambda status: "engine-2" in status.health_reason)


def test_two_engines_at_one_balancer_are_balanced_apart(real_balancer, run_of):
    runs = [run_of(environment={"EQUIPOISE_POOL": pool}) for pool in ("moe", "other")]
    runs[1].control(traffic=1)
    for run in runs:
        run.until_balanced()
    first, second = (run.records()[0] for run in runs)
    assert first["switches"]
    assert second["switches"]
    assert first["tables"][-1][1] != second["tables"][-1][1]


def test_an_engine_that_restarts_is_taken_over_in_its_new_epoch(real_balancer, run_of):
    first = run_of()
    first.until_balanced()
    before = real_balancer.status()
    assert first.records()[0]["switches"]
    second = run_of()
    second.until_balanced()
    after = real_balancer.status()
    assert after.epoch > before.epoch
    assert {rank.state for rank in after.ranks} == {"connected"}
    assert second.records()[0]["switches"]
