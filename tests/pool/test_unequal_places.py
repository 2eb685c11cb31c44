"""Pools whose workers have room for different numbers of experts, which layers share."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.arrays import EMPTY
from equipoise.planning.policy import Algorithm, SlotUse
from equipoise.pool.effects import WriteAudit
from equipoise.pool.health import Health
from equipoise.pool.requests import AdminRequest, Pin
from equipoise.wire.balancer_messages import Rejection
from equipoise.wire.messages import GroupLost
from tests.support.pool_harness import POLICY
from tests.support.scripted_worker import MODEL

SLOTS = 12
PLACES = {"worker-0": 36, "worker-1": 24, "worker-2": 33, "worker-3": 21}
"""114 for 3 layers x 32 experts. Nodes alternate, so worker-2 is rank 1."""
PLACES_OF_RANK = [36, 33, 24, 21]


@pytest.fixture
def harness_of(make_harness):
    def build(places=PLACES, **policy):
        harness = make_harness(policy=replace(POLICY, min_gain=0.0, **policy))
        for name, worker in harness.workers.items():
            worker.hello = replace(worker.hello, slots_per_rank=SLOTS, num_places=places[name])
        return harness

    return build


def slots_in_use(layout):
    """[layers, ranks]."""
    used = layout.expert_of_slot != EMPTY
    return used.reshape(layout.num_layers, layout.num_ranks, -1).sum(axis=2)


def check_layouts(harness, places=tuple(PLACES_OF_RANK)):
    """Neither what ranks run nor what they stage or joined with exceeds their places."""
    for worker in harness.ranks:
        layouts = [worker.layout, worker.join_epoch.layout]
        layouts += [worker.staged.layout] if worker.staged else []
        for layout in layouts:
            assert (slots_in_use(layout).sum(axis=0) <= places).all()


@pytest.mark.parametrize("slots", list(SlotUse))
def test_each_rank_holds_at_most_its_own_places_through_all_waves(harness_of, skewed, slots):
    harness = harness_of(slots=slots, algorithm=Algorithm.GLOBAL, cooldown_s=0.0)
    harness.serve()
    check_layouts(harness)
    assert harness.pool.roster.topology().places_of_rank == tuple(PLACES_OF_RANK)
    for seed in range(4):
        load = skewed(seed)
        load[1] = load[1].mean()  # Needs no replicas.
        for _ in range(15):
            harness.run_traffic(load, seconds=1, carry_out=False)
            while all(worker.staged for worker in harness.workers.values()):
                check_layouts(harness)
                harness.stage_all()
                harness.step += 10
                for worker in harness.ranks:
                    harness.say(worker, worker.switch(step=harness.step))
                check_layouts(harness)
    assert harness.pool.rollouts.completed >= 2
    used = slots_in_use(harness.pool.layouts.current)
    if slots is SlotUse.PER_LAYER:
        assert (used == np.array(PLACES_OF_RANK) // MODEL.num_layers).all()
    else:
        assert len({tuple(row) for row in used.tolist()}) > 1, "layers differ"


def test_status_shows_the_places_of_each_rank_and_how_many_are_filled(harness_of):
    harness = harness_of()
    harness.serve()
    status = pool_status(harness.pool, now=harness.now)
    assert [rank.num_places for rank in status.ranks] == PLACES_OF_RANK
    used = slots_in_use(harness.pool.layouts.current).sum(axis=0)
    assert [rank.used_places for rank in status.ranks] == used.tolist()


def test_the_worker_without_places_is_named(harness_of):
    harness = harness_of(dict.fromkeys(PLACES, 33) | {"worker-1": 0, "worker-2": 36})
    harness.assemble()
    for _ in range(int(POLICY.start_timeout_s) + 1):
        for worker in harness.workers.values():
            harness.say(worker, worker.heartbeat())
        harness.tick(1.0)
    assert "worker-1" in {one.worker for one in harness.pool.quarantine.workers}
    (rejection,) = harness.sent_to("worker-1", Rejection)
    assert (
        "its memory for experts is slots of each layer, but 3 workers of the pool have shared by "
        "layers (--places)"
    ) in rejection.reason
    assert harness.pool.roster.num_ranks == 3


def test_places_that_do_not_suffice_together_are_counted(harness_of):
    harness = harness_of({"worker-0": 36, "worker-1": 20, "worker-2": 20, "worker-3": 19})
    harness.assemble()
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DOWN
    assert (
        "with 95 places cannot hold 32 experts in each of 3 layers: 96 are needed"
    ) in diagnosis.reason


@pytest.mark.parametrize(("lost", "is_down"), [("worker-0", True), ("worker-3", False)])
def test_which_rank_may_be_lost_depends_on_its_places(harness_of, lost, is_down):
    harness = harness_of(dict(PLACES, **{"worker-1": 36}))  # 126 places
    harness.serve()
    harness.lose(harness.workers[lost])
    harness.disconnected.add(lost)
    del harness.workers[lost]
    for worker in harness.ranks:
        held = worker.own(worker.layout.expert_of_slot)
        harness.say(worker, GroupLost(epoch=1, reason="a peer left", expert_of_slot=held))
    diagnosis = harness.pool.diagnosis()
    assert (diagnosis.health is Health.DOWN) == is_down
    if is_down:
        assert "90 places cannot hold" in diagnosis.reason
    else:
        check_layouts(harness, places=(36, 33, 36))


def test_workers_that_come_back_with_fewer_places_get_a_layout_that_fits(harness_of):
    harness = harness_of(dict.fromkeys(PLACES, 33))
    harness.serve()
    for number, worker in enumerate(list(harness.ranks)):
        harness.lose(worker)
        worker.hello = replace(worker.hello, boot_id="boot-2", num_places=24 + 3 * (number > 0))
        worker.join_epoch = None
    for worker in harness.workers.values():
        harness.hello(worker.hello)
    assert harness.pool.roster.topology().places_of_rank == (24, 27, 27, 27)
    check_layouts(harness, places=(24, 27, 27, 27))


def test_a_pin_that_one_rank_has_no_places_for_is_rejected_with_the_places(harness_of):
    harness = harness_of()
    harness.serve()
    current = harness.pool.layouts.current
    mirrored = current.with_placement(
        np.ascontiguousarray(current.expert_of_slot[:, ::-1]), generation=1
    )
    request = AdminRequest(
        ticket=1, who="ann", reason="", what="pin", operation=Pin(layout=mirrored)
    )
    harness.perform(harness.controller.administer(request, now=harness.now))
    (answer,) = [one.answer for one in harness.writes if isinstance(one, WriteAudit)]
    assert not answer.accepted
    assert "48 slots and 21 to 36 places a rank" in answer.reason
