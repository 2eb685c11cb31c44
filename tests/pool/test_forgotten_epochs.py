"""The store forgets an epoch that ranks have taken up: the pool still ends up serving."""

import random
from dataclasses import replace

import pytest

from equipoise.planning.change import LayoutChange
from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.pool.layouts import MAX_KNOWN
from equipoise.pool.records import DecisionRecord, EpochMembers, PoolMemory
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import GroupLost, LayoutRejected
from tests.support.deaths import trouble
from tests.support.joining_workers import Fleet, JoiningWorker, memory_of

AN_OUTAGE_S = 30
"""Worker's requests fail after this without a group: `outage_timeout_s`."""

A_START_S = 70
"""More than a pool waits for its first ranks: `start_timeout_s`."""


@pytest.fixture
def fleet(make_harness):
    """A pool that served in epoch 1 and whose ranks have taken up epoch 2, and do not serve."""
    fleet = Fleet(make_harness)
    fleet.live(seconds=5)
    check(fleet)
    assert fleet.harness.pool.roster.epoch == 1
    fleet.kill("worker-3")
    fleet.live(seconds=6, forms=False)
    assert {worker.epoch for worker in fleet.alive} == {2}
    assert not any(worker.serves for worker in fleet.alive)
    return fleet


def check(fleet):
    """All living workers are the ranks of one epoch, and serve."""
    pool = fleet.harness.pool
    assert trouble(pool) == ""
    assert {worker.epoch for worker in fleet.alive} == {pool.roster.epoch}
    assert all(worker.serves for worker in fleet.alive)
    assert {one.layout.generation for one in fleet.alive} == {pool.layouts.stored_generation}
    assert [one.rank for one in fleet.harness.pool.roster.seated()] == list(range(len(fleet.alive)))


def survives_a_death(fleet):
    """What the pool is for: one more rank may die."""
    fleet.restart("worker-3")
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)
    fleet.kill("worker-0")
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)
    assert len(fleet.alive) == 3


@pytest.mark.parametrize("lost", ["the latest epoch", "everything"])
@pytest.mark.parametrize("restarted", [("worker-0",), ("worker-0", "worker-1")])
def test_no_number_is_used_again_that_only_absent_ranks_know(make_harness, lost, restarted):
    """Two ranks serve in an epoch that neither the store nor the two workers here know."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    fleet.live(seconds=5)
    present, absent = ("worker-0", "worker-1"), ("worker-2", "worker-3")
    kept = len(fleet.harness.writes)
    fleet.cut("worker-1")
    fleet.kill("worker-0")
    fleet.live(seconds=AN_OUTAGE_S)
    known = [fleet.workers[name] for name in absent]
    assert fleet.opened()[-1] == known[0].epoch == known[1].epoch
    writes = fleet.harness.writes[:kept] if lost == "the latest epoch" else []
    fleet.succeed(memory_of(writes))
    for name in present:
        (fleet.restart if name in restarted else fleet.connect)(name)
    fleet.live(seconds=A_START_S)
    served = [fleet.workers[name] for name in present]
    assert all(worker.serves for worker in (*known, *served)), "two groups"
    assert {one.epoch for one in served}.isdisjoint(one.epoch for one in known)
    numbers = {one.layout.generation for one in served}
    assert numbers.isdisjoint(one.layout.generation for one in known)
    fleet.connect(*absent)
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)


def test_a_balancer_gives_other_ranks_other_numbers(make_harness):
    """It may have forgotten the pool in between, and the ranks it had before."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    fleet.live(seconds=5)
    memory = memory_of(fleet.harness.writes)
    opened = []
    for names in ("worker-0", "worker-1"), ("worker-2", "worker-3"):
        fleet.succeed(memory, term=2)
        for name in names:
            fleet.restart(name)
        fleet.live(seconds=A_START_S)
        opened += fleet.opened()
    assert len(set(opened)) == len(opened) == 2


def test_balancers_that_know_the_same_give_the_same_ranks_other_numbers(make_harness):
    """The store may lose the first epoch of the balancer before, which no rank was sent yet."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    fleet.live(seconds=5)
    memory = memory_of(fleet.harness.writes)
    names = ("worker-0", "worker-1")
    hellos = {name: fleet.workers[name].hello for name in names}
    opened = []
    for _ in range(2):
        fleet.succeed(memory)
        for name in names:
            fleet.workers[name].restart()
            fleet.workers[name].hello = hellos[name]  # The same process, which has heard nothing.
            fleet.connect(name)
        fleet.live(seconds=A_START_S)
        opened += fleet.opened()
    assert len(set(opened)) == len(opened) == 2


def test_ranks_taken_over_use_no_generation_that_a_later_group_runs(make_harness):
    """The store lost the later epoch, and who is in it is absent: two groups serve."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    earlier, later = ("worker-0", "worker-1"), ("worker-2", "worker-3")
    for name in later:
        fleet.cut(name)
    fleet.live(seconds=A_START_S)
    kept = len(fleet.harness.writes)
    for name in earlier:
        fleet.cut(name)
    fleet.connect(*later)
    fleet.live(seconds=A_START_S)
    known = {fleet.workers[name].layout.generation for name in later}
    fleet.succeed(memory_of(fleet.harness.writes[:kept]))
    fleet.connect(*earlier)
    fleet.live(seconds=A_START_S)
    assert all(worker.serves for worker in fleet.alive)
    assert fleet.harness.pool.roster.complete
    assert {fleet.workers[name].epoch for name in earlier} == {fleet.harness.pool.roster.epoch}
    assert fleet.harness.pool.layouts.current.generation < min(known)
    assert fleet.harness.pool.layouts.next_generation > max(known)
    fleet.connect(*later)
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)


def test_other_processes_of_the_same_names_get_other_numbers(make_harness):
    """Nodes that cannot be reached: their workers live on, and others have their names."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    opened = []
    for _ in range(2):
        fleet.succeed(term=2)
        for name in ("worker-0", "worker-1"):
            fleet.workers[name].restart()
            fleet.connect(name)
        fleet.live(seconds=A_START_S)
        opened += fleet.opened()
    assert len(set(opened)) == len(opened) == 2


def roll_out(fleet, *names):
    """The ranks `names`, all of the epoch, are led to another layout."""
    harness, pool = fleet.harness, fleet.harness.pool
    current = pool.layouts.current
    others = (current.expert_of_slot + 1) % current.num_experts
    target = current.with_placement(others, generation=pool.layouts.next_generation)
    decision = DecisionRecord(
        time_unix_s=harness.now,
        accepted=True,
        reason="a test",
        base_generation=current.generation,
    )
    change = LayoutChange.between(current, target)
    harness.perform(pool.rollouts.start([change], base=current, decision=decision, now=harness.now))
    ranks = sorted((fleet.workers[name] for name in names), key=lambda worker: worker.rank)
    for worker in ranks:
        harness.say(worker, worker.answer_staged())
    for worker in ranks:
        harness.say(worker, worker.switch())
    assert pool.layouts.current.generation == target.generation


def test_a_group_is_taken_over_that_runs_an_earlier_generation_than_many_since(make_harness):
    """It was parted from the balancer, and two other workers were ranks meanwhile."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    fleet.live(seconds=1)
    earlier = tuple(fleet.workers)
    for name in earlier:
        fleet.cut(name)
    later = ("worker-8", "worker-9")
    for name in later:
        hello = replace(
            fleet.workers["worker-0"].hello,
            worker=name,
            address=f"{name}:1",
            rendezvous_address=f"{name}:2",
        )
        fleet.workers[name] = JoiningWorker(hello)
    fleet.connect(*later)
    fleet.live(seconds=A_START_S)
    assert all(worker.serves for worker in fleet.alive), "two groups"
    for _ in range(MAX_KNOWN + 1):
        roll_out(fleet, *later)
    for name in later:
        fleet.kill(name)
    fleet.connect(*earlier)
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)
    assert fleet.harness.pool.roster.epoch == 1
    roll_out(fleet, *earlier)


@pytest.mark.parametrize("forms", ["before they connect", "after they connect", "in between"])
def test_an_emptied_store_while_ranks_join_costs_one_epoch(fleet, forms):
    fleet.succeed()
    if forms == "before they connect":
        fleet.live(seconds=1)
    fleet.connect(*["worker-0"] if forms == "in between" else [])
    fleet.live(seconds=1)
    fleet.connect(*[] if forms != "in between" else ["worker-1", "worker-2"])
    fleet.live(seconds=A_START_S)
    check(fleet)
    assert fleet.harness.pool.roster.epoch >= 2
    assert fleet.harness.pool.counters.rejections.all() == () or forms == "in between"
    survives_a_death(fleet)


@pytest.mark.parametrize("forgotten", range(5))
def test_a_failover_that_lost_writes_while_ranks_join_costs_one_epoch(fleet, forgotten):
    fleet.succeed(memory_of(fleet.harness.writes, forgotten=forgotten))
    fleet.connect()
    fleet.live(seconds=20)
    check(fleet)
    survives_a_death(fleet)


@pytest.mark.parametrize("forgotten", range(5))
@pytest.mark.parametrize("heard", [(), ("worker-0",), ("worker-1", "worker-2")])
def test_a_balancer_that_dies_before_all_ranks_have_their_epoch_is_succeeded(
    fleet, forgotten, heard
):
    """Epoch 3 is recorded, and sent to some only; the store may have lost that again."""
    harness = fleet.harness
    fleet.live(seconds=1)
    fleet.workers["worker-3"].restart()
    fleet.workers["worker-3"].alive = True
    fleet.connect("worker-3")
    harness.disconnected |= set(fleet.workers) - set(heard)
    harness.tick(seconds=1.0)
    assert fleet.opened()[-1] == 3
    assert {name for name, one in fleet.workers.items() if one.state.highest_epoch == 3} == {*heard}
    fleet.succeed(memory_of(harness.writes, forgotten=forgotten))
    fleet.connect()
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)
    fleet.kill("worker-0")
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)


@pytest.mark.parametrize("forgotten", [1, 2, 4, 1000])
@pytest.mark.parametrize("restarted", ["worker-0", "worker-2"])
def test_a_worker_that_restarts_meanwhile_does_not_hide_the_epoch_of_the_others(
    fleet, forgotten, restarted
):
    writes = fleet.harness.writes
    fleet.succeed(memory_of(writes, forgotten=min(forgotten, len(writes))))
    fleet.restart(restarted)
    fleet.live(seconds=2)
    fleet.connect(*{one.hello.worker for one in fleet.alive} - {restarted})
    fleet.live(seconds=A_START_S)
    check(fleet)
    survives_a_death(fleet)


def test_no_generation_that_a_joining_rank_starts_in_is_used_again(fleet):
    taken_up = fleet.workers["worker-0"].layout.generation
    fleet.succeed()
    fleet.connect()
    fleet.live(seconds=A_START_S)
    check(fleet)
    assert fleet.harness.pool.layouts.current.generation > taken_up


def test_a_new_pool_without_all_its_ranks_uses_no_number_that_the_others_may_know(make_harness):
    """Two balancers that know nothing each begin with half of the workers."""
    fleet = Fleet(make_harness, slots_per_rank=16)
    opened = []
    for names in ("worker-0", "worker-1"), ("worker-2", "worker-3"):
        fleet.succeed()
        for name in names:
            fleet.restart(name)
        fleet.live(seconds=A_START_S)
        opened += fleet.opened()
    assert len(set(opened)) == len(opened) == 2
    fleet.connect()
    fleet.live(seconds=AN_OUTAGE_S)
    check(fleet)


def test_a_store_with_another_layout_under_the_ranks_generation_does_not_mislead_them(fleet):
    """It was emptied, the pool began anew, and the store was set back to what it had first."""
    stored = memory_of(fleet.harness.writes)
    known = fleet.workers["worker-0"].state.highest_generation
    others = (stored.committed.expert_of_slot + 1) % stored.committed.num_experts
    other = replace(stored.committed, generation=known, expert_of_slot=others)
    fleet.succeed(replace(stored, committed=other, next_generation=known + 1))
    for worker in fleet.alive:  # They hold nothing, so that the stored layout suits them.
        fleet.restart(worker.hello.worker)
    fleet.live(seconds=A_START_S)
    check(fleet)
    assert fleet.harness.pool.layouts.current.generation > known


def test_a_hello_that_its_process_sent_before_is_rejected_and_changes_nothing(fleet):
    """A balancer that was suspended reads the Hellos of streams that were given up meanwhile."""
    outdated = fleet.workers["worker-0"].hello
    assert not outdated.highest_epoch
    fleet.live(seconds=10)
    check(fleet)
    fleet.succeed(memory_of(fleet.harness.writes))
    fleet.connect("worker-0", "worker-1")
    with pytest.raises(RejectedWorkerError, match=r"outdated Hello .* epoch 2 by now") as rejected:
        fleet.harness.hello(outdated)
    assert rejected.value.kind == "hello_outdated"
    fleet.connect("worker-2")
    fleet.live(seconds=1)
    check(fleet)
    assert fleet.harness.pool.roster.epoch == 2


def test_a_rank_that_joins_waits_until_the_others_have_said_what_they_run(fleet):
    """The Hello that it sent before it served arrives after the one that says that it serves."""
    fleet.live(seconds=10)
    early = replace(fleet.workers["worker-0"].hello, highest_epoch=2)
    fleet.succeed(memory_of(fleet.harness.writes, forgotten=1000))
    fleet.connect("worker-0", "worker-1")
    fleet.live(seconds=AN_OUTAGE_S // 3)
    fleet.harness.hello(early)
    fleet.connect("worker-2")
    fleet.cut("worker-0")  # Its stream ended when another one took its place.
    fleet.connect("worker-0")
    fleet.live(seconds=A_START_S)
    check(fleet)


def taken_up_before(fleet):
    """A balancer without memory, and workers that do not say in their Hello what they took up."""
    fleet.succeed()
    for worker in fleet.alive:
        worker.greeting = lambda worker=worker: replace(worker.hello, group_lost=None)
    fleet.connect()
    fleet.restart("worker-3")  # All are here: to the balancer, the pool is new.
    while not fleet.opened():
        for worker in fleet.alive:
            fleet.harness.say(worker, worker.heartbeat())
        fleet.harness.tick(seconds=1.0)


def test_a_rejected_epoch_is_followed_by_a_higher_one_at_once(fleet):
    taken_up_before(fleet)
    assert fleet.opened() == [1]
    (answer,) = fleet.workers["worker-0"].answers
    assert isinstance(answer, LayoutRejected)
    assert (answer.epoch, answer.highest_epoch) == (1, 2)
    assert "epoch 2 was already taken up" in answer.reason
    fleet.live(seconds=1)
    assert fleet.opened() == [1, 3]
    assert "taken up epoch 2" in fleet.harness.pool.membership.epochs[0].reason
    fleet.live(seconds=5)
    check(fleet)


def test_a_group_lost_in_a_stream_counts_like_one_in_a_hello(fleet):
    taken_up_before(fleet)
    taken_up = max(worker.state.highest_generation for worker in fleet.alive)
    for worker in fleet.alive:
        worker.answers = []  # An older release ignores the epoch, then loses the one it has.
        worker.fail("a peer is gone")
    fleet.live(seconds=10)
    check(fleet)
    assert fleet.harness.pool.roster.epoch == 3
    assert fleet.harness.pool.layouts.next_generation > taken_up


def test_numbers_out_of_reach_are_rejected_by_name_in_every_message(fleet):
    fleet.connect("worker-0")
    worker, harness = fleet.workers["worker-0"], fleet.harness
    for changes in {"highest_epoch": 2**40}, {"highest_generation": 2**40}:
        with pytest.raises(RejectedWorkerError, match=r"worker-0 reports .* 1099511627776"):
            harness.hello(replace(worker.greeting(), **changes))
    lost = GroupLost(epoch=2**40, reason="x", expert_of_slot=None, generation=1)
    rejected = LayoutRejected(epoch=2, rank=0, generation=1, reason="x", highest_epoch=2**40)
    for message in (lost, replace(lost, epoch=2, generation=2**40), rejected):
        with pytest.raises(InvalidMessageError, match=r"worker-0 reports .* 1099511627776"):
            harness.say(worker, message)
    assert harness.pool.roster.highest_epoch == 2
    assert harness.pool.layouts.next_generation < 100


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_forgotten_whenever_the_living_end_up_as_one_group(make_harness, seed):
    draw = random.Random(seed)
    fleet = Fleet(make_harness)
    for _ in range(25):
        name = draw.choice(sorted(fleet.workers))
        writes = fleet.harness.writes
        match draw.choice(["kill", "restart", "restart", "cut", "reconnect", "forget", "idle"]):
            case "kill" if len(fleet.alive) > 1:
                fleet.kill(name)
            case "restart":
                fleet.restart(name)
            case "cut":
                fleet.cut(name)
            case "reconnect":
                fleet.cut(name)
                fleet.connect(name)
            case "forget":
                forgotten = draw.choice([1, 2, 3, 4, len(writes)])
                fleet.succeed(memory_of(writes, forgotten=min(forgotten, len(writes))))
                names = [one for one in fleet.workers if draw.random() < 0.7]
                draw.shuffle(names)
                fleet.connect(*names) if names else None
        fleet.live(seconds=draw.choice([0.5, 1, 3, 8]), forms=draw.random() < 0.5)
    for name, worker in fleet.workers.items():
        if not worker.alive:
            fleet.restart(name)
        elif name in fleet.harness.disconnected:
            fleet.connect(name)
    fleet.live(seconds=100)
    check(fleet)
    survives_a_death(fleet)


def test_an_epoch_that_the_store_has_is_not_opened_again(make_harness):
    members = EpochMembers(epoch=57, workers=("worker-0",))
    fleet = Fleet(make_harness)
    fleet.succeed(PoolMemory(members=members))
    fleet.connect()
    fleet.live(seconds=A_START_S)
    (opened,) = fleet.opened()
    assert opened > 57
