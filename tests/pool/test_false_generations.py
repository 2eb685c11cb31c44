"""A worker that reports a generation that its pool does not run is named, and not believed."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.pool.health import Health
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.wire.balancer_messages import Abort, Stage
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import GroupLost

RAISED = 2**31
"""A number that one liar made the pool reserve."""

WINDOW_S = 10
LIAR, RAISER = 2, 3
LIES = {"below a raised one": RAISED - 5, "the raised one": RAISED}


@pytest.fixture
def raised(serving_harness):
    """A pool of four that serves generation 1, with a number raised far above it."""
    raiser = serving_harness.ranks[RAISER]
    lost = GroupLost(epoch=0, reason="x", expert_of_slot=None, generation=RAISED)
    serving_harness.say(raiser, lost)
    assert serving_harness.pool.layouts.next_generation > RAISED
    assert serving_harness.pool.diagnosis().health is Health.SERVING
    return serving_harness


def beat(harness, *, but=()):
    harness.now += 1.0
    for worker in harness.ranks:
        if worker.rank not in but:
            harness.say(worker, worker.heartbeat())
    harness.tick()


def numbered(layout, generation):
    return layout.with_placement(layout.expert_of_slot, generation=generation)


def is_believed(harness, rank, generation):
    return harness.pool.roster.seated()[rank].generation == generation


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_false_generation_in_heartbeats_is_named_until_it_ends(raised, lie):
    harness, liar = raised, raised.ranks[LIAR]
    harness.say(liar, replace(liar.heartbeat(), generation=lie))
    beat(harness, but=[LIAR])
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason == (
        f"rank 2 ({liar.hello.worker}) runs generation {lie}, but the pool runs generation 1: "
        "restart it"
    )
    assert not is_believed(harness, LIAR, lie)
    harness.say(liar, liar.heartbeat())
    assert harness.pool.diagnosis().health is Health.SERVING


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_hello_with_a_false_generation_is_rejected_with_its_layout(raised, lie):
    harness, liar = raised, raised.ranks[LIAR]
    liar.run(numbered(liar.layout, lie))
    with pytest.raises(RejectedWorkerError, match="runs generation") as caught:
        harness.hello(liar.reconnecting())
    assert caught.value.kind == "hello_generation"
    assert harness.pool.layouts.get(lie) is None
    assert not is_believed(harness, LIAR, lie)


@pytest.mark.parametrize("kind", ["serving", "switched"])
def test_other_messages_about_a_false_generation_are_rejected(raised, skewed, kind):
    harness, liar = raised, raised.ranks[LIAR]
    if kind == "switched":
        harness.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
        value = liar.switch()
    else:
        value = liar.serving()
    with pytest.raises(InvalidMessageError, match=f"{liar.hello.worker} reports") as caught:
        harness.say(liar, replace(value, generation=RAISED - 5))
    assert caught.value.kind == f"{kind}_generation"
    assert is_believed(harness, LIAR, 1)
    assert harness.pool.rollouts.current is None or not harness.pool.rollouts.current.switched_ranks


def test_a_false_generation_confirms_no_switch(raised, skewed):
    harness = raised
    harness.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    harness.stage_all()
    ranks = harness.ranks
    for rank in (0, 1, RAISER):
        harness.say(ranks[rank], ranks[rank].switch())
    raises = GroupLost(epoch=0, reason="x", expert_of_slot=None, generation=2 * RAISED)
    harness.say(ranks[RAISER], raises)
    for false in (RAISED + 5, 2 * RAISED):
        beat_of_liar = replace(ranks[LIAR].heartbeat(), generation=false, staged_generation=0)
        harness.say(ranks[LIAR], beat_of_liar)
    assert harness.pool.rollouts.current.switched_ranks == {0, 1, RAISER}
    harness.say(ranks[LIAR], ranks[LIAR].switch())
    assert harness.pool.rollouts.current is None
    beat(harness)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_rank_that_reports_a_generation_before_the_current_one_is_named(serving_harness, skewed):
    harness = serving_harness
    for seed in (1, 2):
        harness.run_traffic(skewed(seed), seconds=3 * WINDOW_S)
    current = harness.pool.layouts.current.generation
    assert current > 2
    liar = harness.ranks[LIAR]
    for generation in range(1, current):
        harness.say(liar, replace(liar.heartbeat(), generation=generation))
        assert f"rank 2 ({liar.hello.worker}) runs generation {generation}, but" in (
            harness.pool.diagnosis().reason
        )
        harness.say(liar, liar.heartbeat())
        assert harness.pool.diagnosis().health is Health.SERVING


def test_of_ranks_that_were_found_the_one_of_another_generation_is_named(
    make_harness, serving_harness
):
    harness = make_harness()
    harness.workers, harness.now = serving_harness.workers, serving_harness.now
    liar = harness.ranks[LIAR]
    liar.run(numbered(liar.layout, RAISED))
    for worker in harness.ranks:
        harness.hello(worker.reconnecting())
    assert harness.pool.diagnosis().reason == (
        f"rank 2 ({liar.hello.worker}) runs generation {RAISED}, but 3 of 4 ranks run generation "
        "1: restart it"
    )


def switched_unseen(make_harness, before, skewed):
    """A new balancer with an empty store finds ranks that are about to switch, and then do so."""
    before.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    for worker in before.ranks[1:]:
        before.say(worker, worker.answer_staged())
    harness = make_harness()
    harness.workers, harness.now = before.workers, before.now
    # Rank 0 has staged it, too, before an Abort reaches it; then all switch in the same step.
    staged = {worker.rank: worker.staged for worker in harness.ranks}
    for worker in harness.ranks:
        hello = worker.reconnecting()
        if worker.rank == 0:
            hello = replace(hello, running=replace(hello.running, staged_generation=0))
        harness.hello(hello)
    for worker in harness.ranks:
        worker.run(staged[worker.rank].layout)
    return harness


def test_ranks_that_switched_to_what_the_store_forgot_teach_it_by_reconnecting(
    make_harness, serving_harness, skewed
):
    harness = switched_unseen(make_harness, serving_harness, skewed)
    generation, ended = harness.ranks[0].layout.generation, []
    assert harness.pool.layouts.get(generation) is None
    for worker in harness.ranks:
        digest = worker.layout.digest()
        try:
            harness.say(worker, replace(worker.heartbeat(), layout_digest=digest))
        except InvalidMessageError as error:
            ended.append((worker, error.kind))
    assert ended
    assert {kind for _, kind in ended} == {"unknown_layout"}
    for worker, _ in ended:
        harness.lose(worker)
        harness.hello(worker.reconnecting())
    beat(harness)
    assert harness.pool.layouts.current.generation == generation
    assert harness.pool.layouts.committed.same_placement(harness.ranks[0].layout)
    assert harness.pool.diagnosis().health is Health.SERVING
    harness.run_traffic(skewed(2), seconds=2 * WINDOW_S)
    assert harness.sent_to("worker-0", Stage)
    assert np.all([one.generation > generation for one in map(staged_layout, harness.ranks)])


def test_ranks_that_reconnect_before_they_report_what_the_store_forgot_are_led_again(
    make_harness, serving_harness, skewed
):
    harness = switched_unseen(make_harness, serving_harness, skewed)
    generation, waiting, num_tries = harness.ranks[0].layout.generation, list(harness.ranks), 0
    for worker in waiting:  # The network breaks before the first heartbeat.
        harness.lose(worker)
    while waiting:
        num_tries += 1
        assert num_tries <= 2 * len(harness.ranks), "they are rejected for good"
        worker = waiting.pop(0)
        try:
            harness.hello(worker.reconnecting())
        except RejectedWorkerError as error:
            assert error.kind == "hello_generation"  # noqa: PT017 - or none is raised
            waiting.append(worker)
    beat(harness)
    assert harness.pool.layouts.current.generation == generation
    assert harness.pool.layouts.committed.same_placement(harness.ranks[0].layout)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_fewer_than_most_ranks_that_reconnect_are_rejected_however_often(
    make_harness, serving_harness, skewed
):
    harness = switched_unseen(make_harness, serving_harness, skewed)
    for worker in harness.ranks:
        harness.lose(worker)
    for _ in range(3):
        for worker in harness.ranks[:2]:
            with pytest.raises(RejectedWorkerError, match="runs generation"):
                harness.hello(worker.reconnecting())
    assert harness.pool.layouts.current.generation == 1


def staged_layout(worker):
    return worker.layout


def test_fewer_than_most_ranks_teach_nothing(make_harness, serving_harness):
    harness = make_harness()
    harness.workers, harness.now = serving_harness.workers, serving_harness.now
    for worker in harness.ranks:
        harness.hello(worker.reconnecting())
    for rank in (LIAR, RAISER):
        worker = harness.ranks[rank]
        harness.say(worker, replace(worker.heartbeat(), generation=9, layout_digest=b"x" * 16))
    reason = harness.pool.diagnosis().reason
    assert "rank 2 (worker-1) runs generation 9, but the pool runs generation 1" in reason
    assert "rank 3 (worker-3) runs generation 9, but the pool runs generation 1" in reason
    assert not harness.sent_to("worker-0", Abort)
