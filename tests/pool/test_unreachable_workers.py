"""A worker whose rendezvous address its peers cannot reach: the pool serves without it."""

import pytest

from equipoise.pool.health import Health
from tests.support.joining_workers import Fleet

BAD = "worker-0"
"""Sorts first, so that it hosts the rendezvous."""


class UnreachableFleet(Fleet):
    """Ranks of an epoch that is unmet wait in vain, and give up together."""

    PATIENCE_S = 40.0

    def is_unmet(self, worker):
        raise NotImplementedError

    def _is_broken(self, worker):
        return self.is_unmet(worker) or super()._is_broken(worker)


class NoneReaches(UnreachableFleet):
    """No peer reaches the bad worker, whichever rank it is."""

    def is_unmet(self, worker):
        peers = [peer.worker for peer in worker.join_epoch.peers]
        return len(peers) > 1 and BAD in peers


class NoneReachesItsRendezvous(UnreachableFleet):
    """Only as the host of the rendezvous is the bad worker out of reach."""

    def is_unmet(self, worker):
        peers = worker.join_epoch.peers
        return len(peers) > 1 and peers[0].worker == BAD


def live(fleet, *, seconds):
    """Time passes; returns for how many seconds a group served."""
    served_s = 0
    for _ in range(seconds):
        fleet.live(seconds=1)
        served_s += any(one.serves for one in fleet.alive)
    return served_s


def left_out(fleet):
    return {line.split()[1] for line in fleet.harness.logs if " is excluded: " in line}


def test_the_host_is_left_out_by_name_and_the_others_serve(make_harness):
    fleet = NoneReaches(make_harness)
    live(fleet, seconds=200)
    assert live(fleet, seconds=500) > 450
    assert left_out(fleet) == {BAD}
    diagnosis = fleet.harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason.startswith(f"{BAD} gets no rank: the ranks of epoch ")


def test_a_new_worker_with_which_ranks_never_met_interrupts_them_ever_less_often(make_harness):
    fleet = NoneReaches(make_harness)
    fleet.kill(BAD)
    live(fleet, seconds=80)
    assert all(worker.serves for worker in fleet.alive)
    fleet.restart(BAD)
    assert live(fleet, seconds=600) > 500
    assert left_out(fleet) == {BAD}
    assert (
        "did not meet with it in the group: check that its peers can reach it; "
        in fleet.harness.pool.diagnosis().reason
    )


def test_a_host_that_is_needed_hosts_no_longer(make_harness):
    """Its slots are needed, and it reaches its peers."""
    fleet = NoneReachesItsRendezvous(make_harness, slots_per_rank=8)
    live(fleet, seconds=200)
    pool = fleet.harness.pool
    assert all(worker.serves for worker in fleet.alive)
    assert pool.roster.seated()[0].name != BAD
    assert any(
        f"worker {BAD} is excluded: the ranks of epoch " in line
        and " did not meet at its rendezvous: check that peers can reach --rendezvous-port; "
        in line
        for line in fleet.harness.logs
    )
    assert pool.diagnosis().health is Health.SERVING
    nodes = [member.hello.node for member in pool.roster.seated()]
    assert nodes == sorted(nodes), "ranks of a node are contiguous"


class NoneReachesIt(NoneReaches):
    """Its peers report it, and it reaches them."""

    bad = "worker-2"

    def is_unmet(self, worker):
        peers = [peer.worker for peer in worker.join_epoch.peers]
        return len(peers) > 1 and self.bad in peers

    def unreached_by(self, worker):
        return () if worker.hello.worker == self.bad else (self.bad,)


@pytest.mark.parametrize("bad", ["worker-0", "worker-2", "worker-3"])
def test_a_new_fleet_serves_after_one_failed_epoch_without_the_worker_that_none_reaches(
    make_harness, bad, monkeypatch
):
    monkeypatch.setattr(NoneReachesIt, "bad", bad)
    fleet = NoneReachesIt(make_harness)
    live(fleet, seconds=60)
    assert live(fleet, seconds=500) > 450
    assert left_out(fleet) == {bad}
    reason = fleet.harness.pool.diagnosis().reason
    assert reason.startswith(f"{bad} gets no rank: the ranks of epoch ")
    assert "did not meet, and its peers cannot connect to it: check its network" in reason


def test_workers_that_restarted_with_the_one_that_none_reaches_stay(make_harness):
    fleet = NoneReachesIt(make_harness)
    fleet.kill("worker-2")
    live(fleet, seconds=80)
    assert all(worker.serves for worker in fleet.alive)
    fleet.restart("worker-1")
    fleet.restart("worker-2")
    live(fleet, seconds=60)
    assert left_out(fleet) == {"worker-2"}
    assert all(fleet.workers[name].serves for name in ("worker-0", "worker-1", "worker-3"))


class Accuses(NoneReachesIt):
    """One rank keeps every group from forming, and blames another."""

    liar = "worker-3"

    def is_unmet(self, worker):
        peers = [peer.worker for peer in worker.join_epoch.peers]
        return len(peers) > 1 and self.liar in peers

    def unreached_by(self, worker):
        return ("worker-0",) if worker.hello.worker == self.liar else ()


def test_a_worker_that_blames_a_peer_that_others_reach_is_excluded_itself(make_harness):
    fleet = Accuses(make_harness)
    live(fleet, seconds=60)
    assert live(fleet, seconds=500) > 450
    assert left_out(fleet) == {"worker-3"}
    assert "it cannot connect to peers that others reach" in fleet.harness.pool.diagnosis().reason


class GivesUp(NoneReachesIt):
    """The bad worker serves at once, whoever is missing, and then reports its group as lost.

    Its peers have fewer than the seconds of a timeout to find out that they cannot reach it.
    """

    PATIENCE_S = 6.0
    bad = BAD

    def _live(self, worker, *, forms):
        epoch = worker.join_epoch
        super()._live(worker, forms=forms)
        if worker.hello.worker == BAD and worker.join_epoch is epoch and not worker.is_lost:
            worker.form()
            worker.fail("a lie")


def test_a_worker_that_gives_up_at_once_cannot_keep_its_peers_out_in_turn(make_harness):
    """One of two peers is always left out, because the time to wait for it is over first."""
    fleet = GivesUp(make_harness, num_ranks=3, slots_per_rank=32)
    fleet.live(seconds=2)
    fleet.kill("worker-1")
    fleet.live(seconds=8)
    fleet.restart("worker-1")
    fleet.live(seconds=90)
    assert {name for name, one in fleet.workers.items() if one.serves} == {"worker-1", "worker-2"}
    assert left_out(fleet) == {BAD}
    assert any("did not meet, and its peers cannot connect to it" in x for x in fleet.harness.logs)
