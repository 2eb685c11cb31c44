"""A seat inside an engine: ranks switch after the same pass or stop together, and never wait."""

import numpy as np
import pytest
import torch

from equipoise.engines.lockstep import LockstepError
from tests.engines.seats import Ranks

FIRST = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 0]]
SECOND = [[0, 1, 3, 3, 0, 2], [0, 1, 2, 3, 2, 1]]
THIRD = [[0, 1, 2, 3, 1, 2], [0, 1, 2, 3, 0, 1]]


@pytest.fixture
def ranks():
    return Ranks(FIRST, num_experts=4).until_ready()


def stage(ranks, table, *, after=1, only=(0, 1)):
    layout = ranks.layout(table, after=after)
    for rank in only:
        assert ranks.seats[rank].offer(ranks.staged(rank, layout))
    return layout


def test_ranks_meet_in_the_epoch_of_rank_0_and_share_one_table(ranks):
    first, second = ranks.seats
    assert first.epoch == second.epoch == first.generation > 1_600_000_000
    assert np.array_equal(first.table, second.table)
    assert first.table.shape == (2, 4, 16)
    assert first.workers == second.workers == ("w-0", "w-1")
    assert [len(ranks.committed[rank]) for rank in (0, 1)] == [1, 1]


def test_all_switch_after_the_same_pass_with_bytes_and_tables(ranks):
    layout = stage(ranks, SECOND)
    ranks.step(3)
    assert {(switch.generation, switch.step) for _, switch in ranks.switched} == {
        (layout.generation, ranks.switched[0][1].step)
    }
    assert [rank for rank, _ in ranks.switched] == [0, 1]
    for rank in (0, 1):
        assert ranks.experts(rank) == np.asarray(SECOND)[:, rank * 3 : rank * 3 + 3].tolist()
        assert np.array_equal(ranks.committed[rank][-1].expert_of_slot, SECOND)
        hashed = ranks.seats[rank].held.hash_slot(0, 2)
        assert hashed.found == ranks.seats[rank].table[0, hashed.expert].tobytes()


def test_nobody_switches_while_one_has_not_staged(ranks):
    stage(ranks, SECOND, only=(0,))
    ranks.step(5)
    assert ranks.switched == []
    assert ranks.experts(0) == np.asarray(FIRST)[:, :3].tolist()


def test_a_generation_dropped_after_its_header_was_sent_is_switched_to(ranks):
    layout = stage(ranks, SECOND)
    ranks.step()
    for seat in ranks.seats:
        seat.drop(layout.generation)
    ranks.step()
    assert [rank for rank, _ in ranks.switched] == [0, 1]


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_generation_dropped_before_is_switched_to_by_none(ranks, dropped):
    layout = stage(ranks, SECOND)
    ranks.seats[dropped].drop(layout.generation)
    ranks.step(5)
    assert ranks.switched == []


def test_ranks_never_differ_however_aborts_and_stages_interleave(ranks):
    draw = np.random.default_rng(5)
    tables, after = [FIRST, SECOND, THIRD], 0
    for _ in range(1000):
        seat = ranks.seats[draw.integers(2)]
        if draw.random() < 0.3:
            after += 1
            layout = ranks.layout(tables[draw.integers(3)], after=after)
            for rank in draw.permutation(2)[: draw.integers(1, 3)]:
                ranks.seats[rank].offer(ranks.staged(int(rank), layout))
        elif draw.random() < 0.3 and seat.staged_generation:
            seat.drop(seat.staged_generation)
        ranks.step()
        assert len({seat.generation for seat in ranks.seats}) == 1
    steps = {}
    for _, switch in ranks.switched:
        steps.setdefault(switch.generation, []).append(switch.step)
    assert len(steps) > 20
    assert all(len(both) == 2 and len(set(both)) == 1 for both in steps.values())
    assert not any(seat.stopped for seat in ranks.seats)


def test_layouts_that_differ_under_one_number_are_rejected_by_all(ranks):
    ranks.seats[0].offer(ranks.staged(0, ranks.layout(SECOND)))
    ranks.seats[1].offer(ranks.staged(1, ranks.layout(THIRD)))
    ranks.step(3)
    assert ranks.switched == []
    assert [rank for rank, _ in ranks.rejected] == [0, 1]
    assert "ranks disagree about the staged layout" in ranks.rejected[0][1].reason


def test_a_layout_that_starts_elsewhere_is_not_taken(ranks):
    late = ranks.staged(0, ranks.layout(THIRD, after=2))
    stage(ranks, SECOND)
    ranks.step(3)
    assert not ranks.seats[0].offer(late)


def test_counts_are_conserved_over_a_switch(ranks):
    ranks.step(6)
    before = [seat.progress() for seat in ranks.seats]
    assert before[0].stats.steps > 0
    assert all(len(one.loads) == 1 for one in before)
    first_pass = ranks.seats[0]._passes
    layout = stage(ranks, SECOND)
    ranks.step(40, load=torch.zeros(2, 6, dtype=torch.int32))
    for seat in ranks.seats:
        current, previous = seat.progress().loads
        assert current.generation == layout.generation
        assert current.slot_load_LS.sum() == 0
        # Two ranks counted one assignment for each slot in each pass since the seat was ready.
        assert len(set(previous.slot_load_LS.flatten().tolist())) == 1
        assert int(previous.slot_load_LS[0, 0]) == 2 * (first_pass - ready_pass(ranks))


def ready_pass(ranks):
    """The pass after the one in which the ranks began to gather checksums."""
    rows = ranks.rendezvous.rows
    return 1 + min(number for number in rows if rows[number][0].dtype == torch.uint8)


def test_replicas_that_differ_stop_all_ranks_before_anything_moves():
    seeds = iter(range(100))
    ranks = Ranks(FIRST, num_experts=4, seed_of=lambda layer, expert: next(seeds)).until_ready()
    assert {reason for _, reason in ranks.stopped} == {ranks.seats[0].stopped}
    assert "replicas of expert 0 of layer 0 differ" in ranks.seats[0].stopped
    assert ranks.ready == []


def test_a_rank_that_leaves_stops_all_after_the_same_pass(ranks):
    ranks.seats[1].leave("its weights have changed")
    ranks.step(4)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "w-1 left" in ranks.seats[0].stopped
    assert ranks.seats[1].stopped == "its weights have changed"
    stuck = len(ranks.rendezvous.rows)
    ranks.step(4)
    assert len(ranks.rendezvous.rows) == stuck, "a stopped seat takes part in nothing"


def test_ranks_that_took_different_numbers_of_passes_stop_together(ranks):
    ranks.seats[0]._passes += 1
    ranks.step(3)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "disagree about the step" in ranks.seats[0].stopped


def test_a_broken_exchange_stops_a_rank_that_had_nothing_to_switch_to(ranks):
    ranks.rendezvous.broken = {0}
    ranks.seats[0].on_step(None)
    assert "not all ranks answered" in ranks.seats[0].stopped


def test_a_broken_exchange_that_may_have_agreed_is_fatal(ranks):
    stage(ranks, SECOND)
    ranks.step()
    ranks.rendezvous.broken = {0}
    with pytest.raises(LockstepError):
        ranks.seats[0].on_step(None)
