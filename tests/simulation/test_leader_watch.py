"""`LeaderWatch` on leaders that do, and do not, what it looks for."""

from types import SimpleNamespace

import pytest

from equipoise.planning.rollout import State
from equipoise.pool.records import EpochMembers
from tests.simulation.fleet import POOL
from tests.simulation.leader_watch import LOOK_S, WRITTEN_S, LeaderWatch

WORKERS = ("w0", "w1")


class Rollouts:
    """Plans of one wave each."""

    def __init__(self):
        self.current = None

    def start(self, generation):
        target, policy = SimpleNamespace(generation=generation), SimpleNamespace(stage_timeout_s=9)
        self.current = SimpleNamespace(
            target=target, policy=policy, state=State.STAGING, entered_s=0.0
        )

    def resume(self, generation):
        self.start(generation)


class Process:
    """A balancer that runs."""

    name, paused = "b0", False


class Fleet:
    """A leader and a store that works, and what was found."""

    def __init__(self):
        self.now_s, self.found = 0.0, []
        self.loop = SimpleNamespace(time=lambda: self.now_s)
        self.observer = SimpleNamespace(violate=lambda kind, _text: self.found.append(kind))
        self.store = SimpleNamespace(
            data={}, is_down=False, hangs=False, is_full=False, answers_late=False
        )
        self.network = SimpleNamespace(is_cut=lambda *_ends: False, delay_factor=1.0)
        self.process = Process()
        self.watch = LeaderWatch(self)
        self.lead(1)

    def lead(self, term, *, epoch=1):
        """As a balancer does that takes over what it finds."""
        self.roster = SimpleNamespace(
            epoch=epoch,
            opened_here=False,
            complete=True,
            epoch_members=lambda: EpochMembers(epoch=self.roster.epoch, workers=WORKERS),
            seated=lambda: (),
        )
        self.rollouts = Rollouts()
        windows = SimpleNamespace(advice=None, _demand=None)
        pool = SimpleNamespace(roster=self.roster, rollouts=self.rollouts, windows=windows)
        pool.attendance = SimpleNamespace(silent_after_s=9.0)
        self.led = SimpleNamespace(
            term=term, names=lambda: (POOL,), find=lambda _name: SimpleNamespace(pool=pool)
        )

    def open_epoch(self, *, writes):
        self.roster.epoch, self.roster.opened_here = self.roster.epoch + 1, True
        if writes:
            members = self.roster.epoch_members()
            self.store.data["members", POOL] = members
            self.watch.accepted(self.led.term, members)

    def lose_contents(self):
        self.store.data = {}

    def living_balancers(self):
        return [self.leader()]

    def leader(self):
        seat = SimpleNamespace(led=self.led)
        return SimpleNamespace(process=self.process, seat=seat, clock=lambda: 0.0)

    def look_for(self, seconds):
        for _ in range(int(seconds / LOOK_S) + 1):
            self.now_s += LOOK_S
            self.watch._look()
        return self.found


@pytest.fixture
def fleet():
    found = Fleet()
    found.open_epoch(writes=True)
    assert found.look_for(2.0) == []
    return found


def test_a_generation_of_a_plan_that_ended_with_its_term_may_be_used_again(fleet):
    fleet.rollouts.start(generation=2)
    assert fleet.look_for(1.0) == []
    fleet.lead(2, epoch=fleet.roster.epoch)
    fleet.open_epoch(writes=True)
    fleet.look_for(LOOK_S)
    fleet.rollouts.start(generation=2)
    assert fleet.look_for(1.0) == []


@pytest.mark.parametrize("begin", ["start", "resume"])
def test_a_wave_of_the_epoch_before_is_found_even_if_it_was_not_seen_in_it(fleet, begin):
    getattr(fleet.rollouts, begin)(generation=2)
    fleet.open_epoch(writes=True)
    assert fleet.look_for(0.0) == ["wave-of-another-epoch"]


def test_an_epoch_that_is_never_written_is_found(fleet):
    fleet.open_epoch(writes=False)
    assert "epoch-not-written" in fleet.look_for(WRITTEN_S + 1.0)


def test_an_epoch_that_the_store_lost_is_excused_and_the_next_one_is_not(fleet):
    fleet.lose_contents()
    assert fleet.look_for(WRITTEN_S + 1.0) == []
    fleet.open_epoch(writes=False)
    assert "epoch-not-written" in fleet.look_for(WRITTEN_S + 1.0)


def test_an_epoch_found_by_a_later_leader_is_excused_if_the_store_lost_it(fleet):
    fleet.lose_contents()
    fleet.lead(2, epoch=fleet.roster.epoch)
    assert fleet.look_for(WRITTEN_S + 1.0) == []


def test_a_leader_that_waits_for_ranks_has_no_epoch_to_write(fleet):
    fleet.lose_contents()
    fleet.lead(2, epoch=0)
    assert fleet.look_for(WRITTEN_S + 1.0) == []


def test_a_found_epoch_is_to_be_written_once_all_its_ranks_are_known(fleet):
    fleet.lose_contents()
    fleet.lead(2, epoch=fleet.roster.epoch + 1)
    fleet.roster.complete = False
    assert fleet.look_for(WRITTEN_S + 1.0) == []
    fleet.roster.complete = True
    assert "epoch-not-written" in fleet.look_for(WRITTEN_S + 1.0)


def test_a_number_and_workers_of_a_lost_epoch_do_not_excuse_that_of_a_later_term(fleet):
    fleet.lose_contents()
    fleet.lead(2, epoch=fleet.roster.epoch - 1)
    fleet.open_epoch(writes=False)
    assert "epoch-not-written" in fleet.look_for(WRITTEN_S + 1.0)
