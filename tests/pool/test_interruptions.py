"""Workers that end one epoch after another: the pool serves without them, for a while."""

from dataclasses import replace

import pytest

from equipoise.pool.health import Health
from equipoise.pool.interruptions import MAX_WORKERS
from equipoise.pool.member import Member
from equipoise.wire.messages import LayoutRejected
from tests.support.deaths import come, die, lost, notice, with_spare_slots
from tests.support.scripted_worker import make_hello


@pytest.fixture
def harness(make_harness):
    harness = with_spare_slots(make_harness())
    harness.serve()
    return harness


def live(harness, *, seconds, serves=True):
    """Time passes; ranks of the newest epoch serve in it."""
    for _ in range(seconds):
        for worker in harness.workers.values():
            if worker.hello.worker in harness.pool.roster.members:
                harness.say(worker, worker.heartbeat())
        harness.tick(seconds=1.0)
        if serves:
            for member in harness.pool.roster.seated():
                worker = harness.workers[member.name]
                if worker.join_epoch is not None and worker.epoch == harness.pool.roster.epoch:
                    harness.say(worker, worker.serving())


def end_epoch(harness, culprit):
    """One rank ends its group; the others notice that."""
    notice(harness, culprit)
    for worker in list(harness.workers.values()):
        if worker is not culprit and worker.epoch == culprit.epoch:
            harness.say(worker, lost(worker, reason="a peer left"))


def seated(harness):
    return sorted(member.name for member in harness.pool.roster.seated())


def interrupt(harness, culprit, *, epochs, served_s=2):
    for _ in range(epochs):
        if culprit.hello.worker not in seated(harness):
            break
        live(harness, seconds=served_s)
        end_epoch(harness, culprit)
    live(harness, seconds=1)


def test_a_worker_that_ends_every_epoch_is_left_out_by_name_and_the_others_serve(harness):
    culprit = harness.ranks[2]
    name = culprit.hello.worker
    interrupt(harness, culprit, epochs=50)
    assert harness.pool.roster.epoch <= 4
    assert seated(harness) == sorted(set(harness.workers) - {name})
    assert harness.pool.roster.complete
    diagnosis = harness.pool.diagnosis()
    assert diagnosis.health is Health.DEGRADED
    assert diagnosis.reason.startswith(
        f"{name} gets no rank: it ended 3 epochs after less than 60 s although no other rank was "
        "missing; it may return at 00:"
    )
    assert diagnosis.reason.endswith(" UTC; 3 of 4 ranks")
    assert any(f"worker {name} is excluded" in line for line in harness.logs)


def test_a_worker_that_ends_every_epoch_while_the_others_wait_for_it_is_left_out(harness):
    culprit = harness.ranks[2]
    name = culprit.hello.worker
    end_epoch(harness, culprit)
    for _ in range(20):
        live(harness, seconds=1, serves=False)
        if name not in seated(harness):
            break
        notice(harness, culprit)  # The others are in the rendezvous, for a minute by default.
        live(harness, seconds=7, serves=False)
    live(harness, seconds=1)
    assert harness.pool.roster.epoch <= 5
    assert seated(harness) == sorted(set(harness.workers) - {name})
    assert harness.pool.roster.complete
    assert harness.pool.diagnosis().reason.startswith(f"{name} gets no rank: it ended 3 epochs")


def test_it_may_return_and_is_left_out_twice_as_long_if_it_does_the_same_again(harness):
    culprit = harness.ranks[1]
    interrupt(harness, culprit, epochs=3)
    absences = []
    for _ in range(3):
        began_s = harness.now
        while culprit.hello.worker not in seated(harness):
            live(harness, seconds=1)
            assert harness.now < began_s + 1000
        absences.append(harness.now - began_s)
        live(harness, seconds=2)
        assert harness.pool.diagnosis().health is Health.SERVING
        end_epoch(harness, culprit)
        live(harness, seconds=1)
    assert absences == pytest.approx([30, 60, 120], abs=3)


def test_a_long_epoch_makes_up_for_short_ones(harness):
    culprit = harness.ranks[1]
    interrupt(harness, culprit, epochs=2)
    live(harness, seconds=70)
    interrupt(harness, culprit, epochs=2)
    assert culprit.hello.worker in seated(harness)
    live(harness, seconds=5)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_who_reports_a_loss_first_is_not_left_out_while_peers_die(harness, worker_of):
    reporter = harness.ranks[0]
    for number in range(6):
        live(harness, seconds=2)
        others = [one for one in harness.ranks if one.hello.worker != reporter.hello.worker]
        victim = others[number % len(others)]
        die(harness, victim)
        end_epoch(harness, reporter)
        live(harness, seconds=1)
        come(harness, worker_of, replace(victim.hello, boot_id=f"boot-{number + 2}"))
        live(harness, seconds=3)
        assert len(seated(harness)) == 4
    assert harness.pool.diagnosis().health is Health.SERVING


def test_who_reports_a_loss_first_is_not_left_out_while_a_peer_hangs(harness):
    reporter, hung, *others = harness.ranks
    for _ in range(4):
        live(harness, seconds=2)
        notice(harness, reporter, *others)
        live(harness, seconds=6, serves=False)
        notice(harness, hung)
        live(harness, seconds=3)
    assert seated(harness) == sorted(harness.workers)


def test_losses_that_different_ranks_report_leave_nobody_out(harness):
    for number in range(8):
        live(harness, seconds=6)
        end_epoch(harness, harness.ranks[number % 4])
    live(harness, seconds=3)
    assert seated(harness) == sorted(harness.workers)
    assert harness.pool.diagnosis().health is Health.SERVING


def test_a_worker_that_is_needed_stays_and_the_pool_keeps_trying(make_harness):
    harness = make_harness()
    harness.serve()
    culprit = harness.ranks[3]
    for _ in range(6):
        live(harness, seconds=2)
        end_epoch(harness, culprit)
    live(harness, seconds=3)
    assert len(seated(harness)) == 4
    assert harness.pool.roster.complete
    assert any(line.startswith("worker worker-3 is needed after all: ") for line in harness.logs)


@pytest.mark.parametrize("slots_per_rank", [12, 32])
def test_a_worker_that_reports_a_loss_in_every_heartbeat_and_keeps_stepping_is_left_out(
    make_harness, slots_per_rank
):
    """Whether or not its slots alone could hold all experts."""
    harness = make_harness()
    for worker in harness.workers.values():
        worker.hello = replace(worker.hello, slots_per_rank=slots_per_rank)
    harness.serve()
    liar = harness.ranks[2]
    name = liar.hello.worker
    others = sorted(set(harness.workers) - {name})
    num_served = 0
    for _ in range(300):
        harness.say(liar, lost(liar, reason="a lie"))
        live(harness, seconds=1)
        assert set(others) <= set(seated(harness))
        num_served += harness.pool.roster.complete and seated(harness) == others
    assert num_served > 200
    assert harness.pool.roster.epoch < 20
    assert f"{name} gets no rank: it ended" in harness.pool.diagnosis().reason
    assert any(
        f"{name} lost the group (a lie), but {', '.join(others)} still serve in it after 5 s"
        in line
        for line in harness.logs
    )


@pytest.mark.parametrize("how", ["a new stream", "a rejected epoch"])
def test_other_ways_to_end_an_epoch_count_alike(harness, how):
    culprit = harness.ranks[3]
    name = culprit.hello.worker
    end_epoch(harness, harness.ranks[0])
    for _ in range(10):
        if name not in seated(harness):
            break
        if how == "a new stream":
            live(harness, seconds=2)
            harness.hello(replace(culprit.hello, group_lost=lost(culprit)))
            notice(harness, *(one for one in harness.ranks if one is not culprit))
        else:
            rejected = LayoutRejected(
                epoch=culprit.epoch,
                rank=culprit.rank,
                generation=culprit.layout.generation,
                reason="",
                highest_epoch=culprit.epoch + 1,
            )
            harness.say(culprit, rejected)
            live(harness, seconds=2, serves=False)
    live(harness, seconds=3)
    assert seated(harness) == sorted(set(harness.workers) - {name})
    assert harness.pool.roster.complete
    assert f"{name} gets no rank" in harness.pool.diagnosis().reason


def test_names_are_not_collected_without_end(harness):
    interruptions = harness.pool.interruptions
    for number in range(10 * MAX_WORKERS):
        member = Member(hello=make_hello(f"x-{number}"), last_heard_s=0, since_s=0)
        interruptions.note_end(member, lost=None, now=harness.now)
        interruptions.judge(silent=(), is_hanging=False, now=harness.now)
        interruptions.begin_epoch(now=harness.now)
        assert not interruptions.excluded
    assert len(interruptions._short) == MAX_WORKERS
