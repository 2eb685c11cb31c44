"""Epochs that fail as soon as their ranks have met: the next one opens ever later, and says why."""

import re

import pytest

from equipoise.pool.health import Health
from tests.support.joining_workers import Fleet, JoiningWorker

REASON = "a peer rank failed or hangs, so this group cannot take a step: no route to host"


class BrokenWorker(JoiningWorker):
    """Its group ends at the first step, or cannot be formed."""

    is_broken = True
    forms = True

    def form(self):
        if self.forms or not self.is_broken:
            super().form()
        if self.is_broken:
            self.fail(REASON)


class ImpatientFleet(Fleet):
    """Ranks notice at once that a peer has given up."""

    PATIENCE_S = 0.0


@pytest.fixture(params=["at the first step", "before they serve"])
def fleet(request, make_harness, monkeypatch):
    monkeypatch.setattr(BrokenWorker, "forms", request.param == "at the first step")
    monkeypatch.setattr(BrokenWorker, "is_broken", True)
    return ImpatientFleet(make_harness, kind=BrokenWorker)


def opened_within(fleet, *, seconds):
    """Epochs that open while time passes."""
    before = len(fleet.opened())
    fleet.live(seconds=seconds)
    return len(fleet.opened()) - before


def test_the_first_epochs_open_at_once_and_later_ones_ever_later(fleet):
    assert opened_within(fleet, seconds=3) >= 3
    # After 1, 2, 4, 8, 16 and 30 seconds.
    assert opened_within(fleet, seconds=70) <= 8
    assert opened_within(fleet, seconds=600) == pytest.approx(20, abs=1)


def test_status_says_how_many_failed_why_and_when_the_next_one_opens(fleet):
    fleet.live(seconds=40)
    diagnosis = fleet.harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    found = re.match(
        r"(\d+) epochs in a row failed within 5 s although no rank was missing "
        rf"\(worker-\d: {REASON}\): epoch (\d+) opens at 00:\d\d:\d\d UTC",
        diagnosis.reason,
    )
    assert found is not None, diagnosis.reason
    assert int(found[1]) >= 6
    assert int(found[2]) == fleet.harness.pool.roster.epoch + 1
    warnings = [line for line in fleet.harness.logs if "epochs in a row failed" in line]
    assert len(warnings) == int(found[1]) - 2  # One for each failure that begins a wait.


def test_all_ranks_serve_soon_after_what_was_broken_works_again(fleet, monkeypatch):
    fleet.live(seconds=300)
    monkeypatch.setattr(BrokenWorker, "is_broken", False)
    fleet.live(seconds=32)
    assert fleet.harness.pool.roster.complete
    epoch = fleet.harness.pool.roster.epoch
    fleet.live(seconds=60)
    assert fleet.harness.pool.roster.epoch <= epoch + 1  # A worker that was excluded returns.


def test_an_epoch_that_serves_clears_the_record(fleet, monkeypatch):
    fleet.live(seconds=300)
    monkeypatch.setattr(BrokenWorker, "is_broken", False)
    fleet.live(seconds=100)
    monkeypatch.setattr(BrokenWorker, "is_broken", True)
    for worker in fleet.alive:
        worker.fail(REASON)
    assert opened_within(fleet, seconds=3) >= 3


def test_ranks_that_die_make_the_next_epoch_wait_for_nothing(make_harness):
    fleet = Fleet(make_harness)
    for number in range(12):
        name = f"worker-{number % 4}"
        fleet.kill(name)
        fleet.live(seconds=2)
        assert sum(worker.serves for worker in fleet.alive) == 3
        fleet.restart(name)
        fleet.live(seconds=7)
    assert not any("epochs in a row" in line for line in fleet.harness.logs)


class UnreachedWorker(BrokenWorker):
    """At first no group works, later none with the last worker, which no peer can reach."""

    bad, is_alone = "worker-3", False
    forms = False

    def form(self):
        if not self.is_alone:
            super().form()
        elif self.bad not in [peer.worker for peer in self.join_epoch.peers]:
            JoiningWorker.form(self)
        else:
            self.fail(REASON, unreached=self.unreached)

    @property
    def unreached(self):
        return (self.bad,) if self.is_alone and self.hello.worker != self.bad else ()


class UnreachedFleet(ImpatientFleet):
    def unreached_by(self, worker):
        return worker.unreached


def test_the_next_epoch_does_not_wait_without_a_worker_that_its_peers_cannot_reach(
    make_harness, monkeypatch
):
    fleet = UnreachedFleet(make_harness, kind=UnreachedWorker)
    fleet.live(seconds=300)
    monkeypatch.setattr(UnreachedWorker, "is_alone", True)
    logs = fleet.harness.logs
    logs.clear()
    while not any(" opens with 4 ranks" in line for line in logs):
        fleet.live(seconds=1)
    fleet.live(seconds=3)
    serving = [name for name, worker in fleet.workers.items() if worker.serves]
    assert serving == ["worker-0", "worker-1", "worker-2"]
