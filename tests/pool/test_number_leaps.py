"""A worker of the pool lies about the numbers it has taken up, and a store forgets them."""

from dataclasses import replace

import pytest

from equipoise.pool.hello_checks import RejectedWorkerError
from equipoise.wire.checks import MAX_COUNT
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import GroupLost, LayoutRejected
from tests.support.deaths import trouble
from tests.support.joining_workers import Fleet, memory_of

TODAY_S = 1.8e9
"""A time of this decade, unix seconds."""

LIAR = "worker-0"
LIES_PER_ROUND = 4
RECOVERY_S = 80


@pytest.fixture
def make_fleet(make_harness):
    """A pool of some workers that serves; all but one of them can hold all experts."""

    def make(num_workers):
        def harness(**changes):
            made = make_harness(**changes)
            made.now = TODAY_S
            return made

        slots = 32 if num_workers <= 2 else 16
        fleet = Fleet(harness, num_ranks=num_workers, slots_per_rank=slots)
        fleet.live(seconds=5)
        check(fleet)
        return fleet

    return make


def check(fleet):
    """All living workers are the ranks of one epoch, and serve."""
    pool = fleet.harness.pool
    assert trouble(pool) == ""
    assert {worker.epoch for worker in fleet.alive} == {pool.roster.epoch}
    assert all(worker.serves for worker in fleet.alive)


def claims(fleet):
    """Numbers that a liar tries, the worst first."""
    pool = fleet.harness.pool
    known = min(pool.roster.highest_epoch, pool.layouts.next_generation - 1)
    return MAX_COUNT, MAX_COUNT // 2, 2**50, int(fleet.harness.now * 1000), known + 2**32, known + 1


def lie(fleet, *, epochs=True, generations=True, served_s=20):
    """Restart the liar, which reports the highest numbers that are believed, and then serves.

    Returns the number of the lie; the next epoch is above it.
    """
    liar = fleet.workers[LIAR]
    honest = type(liar).greeting
    for claim in claims(fleet):
        lies = {"highest_epoch": claim} if epochs else {}
        lies |= {"highest_generation": claim} if generations else {}
        liar.greeting = lambda lies=lies: replace(honest(liar), **lies)
        fleet.restart(LIAR)
        if LIAR not in fleet.rejected:
            break
    del liar.greeting
    fleet.live(seconds=served_s)
    check(fleet)
    return claim


def spread_lies(fleet):
    for _ in range(LIES_PER_ROUND):
        lie(fleet)


def no_honest_worker_was_rejected(fleet):
    assert {name for name, _ in fleet.rejections} <= {LIAR}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("liar", ["comes first", "comes last", "is gone"])
def test_after_lies_and_a_lost_store_all_honest_workers_serve(make_fleet, num_workers, liar):
    fleet = make_fleet(num_workers)
    for _ in range(3):
        spread_lies(fleet)
        fleet.rejections.clear()
        fleet.succeed()  # The store was emptied, and another balancer leads.
        names = sorted(fleet.workers)
        if liar == "comes last":
            names.reverse()
        elif liar == "is gone" and num_workers > 1:
            fleet.kill(LIAR)
        fleet.connect(*names)
        fleet.live(seconds=RECOVERY_S)
        check(fleet)
        no_honest_worker_was_rejected(fleet)
        if liar == "is gone":
            fleet.restart(LIAR)
            fleet.live(seconds=RECOVERY_S)
            check(fleet)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize("forgotten", [0, 1, 2, "all"])
@pytest.mark.parametrize("liar_returns", [False, True])
def test_after_lies_a_store_that_forgets_while_ranks_join_costs_one_epoch(
    make_fleet, num_workers, forgotten, liar_returns
):
    fleet = make_fleet(num_workers)
    spread_lies(fleet)
    fleet.kill(LIAR)
    fleet.live(seconds=6, forms=False)
    assert not any(worker.serves for worker in fleet.alive)
    taken_up = max(worker.state.highest_epoch for worker in fleet.alive)
    writes = fleet.harness.writes
    fleet.rejections.clear()
    fleet.succeed(memory_of(writes, forgotten=len(writes) if forgotten == "all" else forgotten))
    fleet.connect()
    if liar_returns:
        fleet.restart(LIAR)
    fleet.live(seconds=RECOVERY_S)
    check(fleet)
    no_honest_worker_was_rejected(fleet)
    assert fleet.harness.pool.roster.epoch > taken_up


def test_lies_exhaust_no_numbers(make_fleet):
    """However often they are sent, in whichever message."""
    fleet = make_fleet(3)
    for _ in range(20):
        lie(fleet, epochs=False, served_s=62)
        lie(fleet, generations=False, served_s=62)
    harness, liar = fleet.harness, fleet.workers[LIAR]
    epoch = harness.pool.roster.epoch
    for claim in claims(fleet):
        lost = GroupLost(epoch=epoch, reason="x", expert_of_slot=None, generation=claim)
        rejected = LayoutRejected(
            epoch=epoch, rank=liar.rank, generation=1, reason="x", highest_epoch=claim
        )
        for message in (lost, replace(lost, epoch=claim, generation=1), rejected):
            try:
                harness.say(liar, message)
            except InvalidMessageError as error:
                assert f"worker {LIAR} reports " in str(error)  # noqa: PT017 - some are believed
    fleet.restart(LIAR)
    fleet.live(seconds=RECOVERY_S)
    check(fleet)
    assert harness.pool.roster.highest_epoch < MAX_COUNT / 1000
    assert harness.pool.layouts.next_generation < MAX_COUNT / 1000


def test_who_makes_numbers_leap_is_named(make_fleet):
    fleet = make_fleet(3)
    claim = lie(fleet)
    lines = [one for one in fleet.harness.logs if "far above" in one]
    assert f"worker {LIAR} reports epoch {claim}" in lines[0]
    assert f"worker {LIAR} reports generation {claim}" in lines[1]


@pytest.mark.parametrize(("ahead_s", "is_named"), [(-60, False), (60, False), (2**21, True)])
def test_another_engines_numbers_are_named_only_if_they_are_above_the_clock(
    make_harness, ahead_s, is_named
):
    """Its ranks number their first epoch by the clock."""
    harness = make_harness()
    harness.now = TODAY_S
    hello = next(iter(harness.workers.values())).hello
    epoch = int(TODAY_S) + ahead_s
    harness.hello(
        replace(hello, engine="vLLM 0.33.0", highest_epoch=epoch, highest_generation=epoch)
    )
    assert any("far above" in one for one in harness.logs) == is_named
    assert harness.pool.roster.highest_epoch >= epoch


def test_who_makes_numbers_leap_in_many_small_reports_is_named(make_fleet):
    fleet = make_fleet(3)
    harness, liar = fleet.harness, fleet.workers[LIAR]
    for _ in range(4):
        claim = harness.pool.roster.highest_epoch + 2**19
        harness.say(liar, GroupLost(epoch=claim, reason="x", expert_of_slot=None, generation=1))
    (line,) = (one for one in harness.logs if "far above" in one)
    assert line.startswith(f"worker {LIAR} reports epoch ")
    assert f"it has raised it by {3 * 2**19}" in line


def test_a_number_that_no_pool_can_have_reached_is_rejected_with_the_remedy(make_fleet):
    fleet = make_fleet(3)
    harness = fleet.harness
    hello = replace(fleet.workers[LIAR].greeting(), highest_epoch=int(harness.now * 1000) + 1)
    with pytest.raises(
        RejectedWorkerError, match=r"reports epoch 18\d+, .* no pool .*: restart it"
    ) as rejected:
        harness.hello(hello)
    assert rejected.value.kind == "hello_epoch_leap"


def test_a_balancer_whose_clock_is_not_set_believes_ordinary_numbers(make_harness):
    harness = make_harness()
    harness.now = 1.0
    worker = harness.workers[LIAR]
    harness.hello(replace(worker.hello, highest_epoch=2**32, highest_generation=2**32))
    assert 2**32 < harness.pool.roster.highest_epoch < 2**32 + 2**16


def test_leaders_that_hear_the_same_claim_use_different_numbers(make_harness):
    """Each may have ranks of the same pool, and the store has lost what the first one used."""
    used = []
    for term in (1, 2):
        harness = make_harness(term=term)
        harness.now = TODAY_S
        claim = {"highest_epoch": 2**32, "highest_generation": 2**32}
        harness.hello(replace(harness.workers[LIAR].hello, **claim))
        used += [(harness.pool.roster.highest_epoch, harness.pool.layouts.next_generation)]
    (epoch, generation), (other_epoch, other_generation) = used
    assert epoch != other_epoch
    assert generation != other_generation
