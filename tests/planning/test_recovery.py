"""The layout of a new epoch: complete, close to what survived, and fetched from its holders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning import recovery
from equipoise.planning.arrays import EMPTY
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.moves import CheckpointSource, RankSource
from equipoise.planning.placing import cover
from equipoise.planning.placing.cover import fill
from equipoise.planning.recovery import recover, recovery_moves
from equipoise.planning.topology import ModelShape, Topology


def shape(num_layers, num_experts):
    return ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)


def topology(num_ranks, slots_per_rank):
    return Topology(node_of_rank=("node",) * num_ranks, slots_per_rank=slots_per_rank)


def parts(layout):
    return np.split(layout.expert_of_slot, layout.num_ranks, axis=1)


def checksums(model):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (model.num_layers, model.num_experts, 16), dtype=np.uint8)


@st.composite
def losses(draw):
    """What members of a pool hold (None: nothing) after some were lost and others came."""
    num_ranks, slots_per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, num_ranks * slots_per_rank))
    before = contiguous_layout(
        num_layers=2,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        generation=7,
    )
    kept = draw(st.lists(st.sampled_from(parts(before)), max_size=num_ranks))
    held = [*kept, *([None] * draw(st.integers(0, 3)))]
    held = draw(st.permutations(held or [None]))
    load = np.random.default_rng(draw(st.integers(0, 99))).pareto(1.0, size=(2, num_experts))
    return held, load, slots_per_rank, before


@settings(deadline=None)
@given(losses())
def test_all_experts_are_covered_or_there_are_too_few_slots(loss):
    held, load, slots_per_rank, before = loss
    model, ranks = shape(*load.shape), topology(len(held), slots_per_rank)

    def recovered():
        return recover(held, load=load, model=model, topology=ranks, committed=before, generation=8)

    if ranks.num_slots < model.num_experts:
        with pytest.raises(InvalidLayoutError):
            recovered()
        return
    layout = recovered()
    assert layout.replica_counts().min() >= 1
    assert layout is before or layout.generation == 8
    moves = recovery_moves(held, target=layout, topology=ranks, checksums=checksums(model))
    filled = np.full_like(layout.expert_of_slot, -1)
    for rank, table in enumerate(held):
        if table is not None:
            filled[:, rank * slots_per_rank : (rank + 1) * slots_per_rank] = table
    for of_rank in moves.values():
        for move in of_rank:
            for source in move.sources[:-1]:
                assert move.expert in held[source.rank][move.layer]
            assert move.sources[-1] == CheckpointSource()
            filled[move.layer, move.slot] = move.expert
    np.testing.assert_array_equal(filled, layout.expert_of_slot)


def test_survivors_change_no_more_slots_than_experts_were_lost():
    before = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=12)
    survivors = [part for rank, part in enumerate(parts(before)) if rank != 1]
    lost = 32 - len(np.unique(np.concatenate([part[0] for part in survivors])))
    layout = recover(
        survivors,
        load=np.ones((3, 32)),
        model=shape(3, 32),
        topology=topology(3, 12),
        committed=before,
        generation=2,
    )
    changed = layout.expert_of_slot != np.concatenate(survivors, axis=1)
    assert lost == 8
    assert changed.sum() == 3 * lost


def test_the_committed_layout_stays_when_its_workers_return_to_their_ranks():
    before = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=12)
    for held in ([None] * 4, [*parts(before)[:2], None, None]):
        layout = recover(
            held,
            load=np.ones((3, 32)),
            model=shape(3, 32),
            topology=topology(4, 12),
            committed=before,
            generation=2,
        )
        assert layout is before


def test_an_empty_fleet_of_another_size_starts_balanced_for_the_known_load():
    before = contiguous_layout(num_layers=1, num_experts=8, num_ranks=2, slots_per_rank=6)
    load = np.array([[100.0, 100, 100, 100, 1, 1, 1, 1]])
    layout = recover(
        [None] * 3,
        load=load,
        model=shape(1, 8),
        topology=topology(3, 4),
        committed=before,
        generation=2,
    )
    share = (load / layout.replica_counts())[0]
    carried = [share[part[0]].sum() for part in parts(layout)]
    assert max(carried) < 1.2 * np.mean(carried)


def test_a_new_worker_gets_replicas_of_the_heaviest_experts_from_all_holders():
    before = contiguous_layout(num_layers=1, num_experts=8, num_ranks=2, slots_per_rank=4)
    load = np.array([[1.0, 9, 1, 9, 1, 9, 1, 9]])
    held = [*parts(before), None]
    layout = recover(
        held,
        load=load,
        model=shape(1, 8),
        topology=topology(3, 4),
        committed=before,
        generation=2,
    )
    assert set(layout.expert_of_slot[0, 8:]) == {1, 3, 5, 7}
    moves = recovery_moves(
        held, target=layout, topology=topology(3, 4), checksums=checksums(shape(1, 8))
    )
    assert not moves[0]
    assert not moves[1]
    assert {move.sources[0] for move in moves[2]} == {RankSource(rank=0), RankSource(rank=1)}


def test_a_rank_that_reports_an_expert_twice_gets_another_one_instead():
    before = contiguous_layout(num_layers=2, num_experts=8, num_ranks=2, slots_per_rank=5)
    held = [part.copy() for part in parts(before)]
    held[1][0, 4] = held[1][0, 0]
    layout = recover(
        held,
        load=np.ones((2, 8)),
        model=shape(2, 8),
        topology=topology(2, 5),
        committed=before,
        generation=2,
    )
    assert layout.expert_of_slot[0, 5] == held[1][0, 0]
    assert len(set(layout.expert_of_slot[0, 5:])) == 5


def emptiest_first(slots, load, slots_per_rank):
    """What `fill` promises, one look at everything after the other."""
    slots = slots.copy()
    while (slots == EMPTY).any():
        ranks = slots.reshape(-1, slots_per_rank)
        rank = int((ranks == EMPTY).sum(axis=1).argmax())
        replicas = np.bincount(slots[slots != EMPTY], minlength=len(load))
        of_one = np.where(replicas == 0, np.inf, load / np.maximum(replicas, 1))
        expert = min(
            range(len(load)),
            key=lambda one: ((ranks[rank] == one).sum(), -of_one[one], -load[one], replicas[one]),
        )
        ranks[rank, int((ranks[rank] == EMPTY).argmax())] = expert
    return slots


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_empty_slots_are_filled_one_by_one_on_the_emptiest_rank(num_ranks, slots_per_rank, data):
    num_experts = data.draw(st.integers(1, num_ranks * slots_per_rank))
    size = num_ranks * slots_per_rank
    of_slot = st.lists(st.integers(EMPTY, num_experts - 1), min_size=size, max_size=size)
    slots = np.array(data.draw(of_slot), dtype=np.int32)
    of_expert = st.lists(st.integers(0, 3), min_size=num_experts, max_size=num_experts)
    load = np.array(data.draw(of_expert), dtype=np.float64)
    wanted = emptiest_first(slots, load, slots_per_rank)
    fill(slots, load, topology(num_ranks, slots_per_rank))
    np.testing.assert_array_equal(slots, wanted)


def test_an_empty_slot_passes_over_no_more_experts_than_its_rank_holds(monkeypatch):
    taken = []
    pop = cover.heappop
    monkeypatch.setattr(cover, "heappop", lambda queue: taken.append(1) or pop(queue))
    for num_ranks in (16, 64):
        taken.clear()
        slots = np.full(num_ranks * 8, EMPTY, dtype=np.int32)
        fill(slots, np.ones(64), topology(num_ranks, 8))
        assert 0 < len(taken) <= len(slots) * 8 + num_ranks, "however many ranks there are"


@pytest.mark.parametrize("num_ranks", [4, 5], ids=["the same ranks", "one more"])
def test_ranks_that_hold_hardly_anything_of_use_start_over_instead_of_being_mended(
    monkeypatch, num_ranks
):
    before = contiguous_layout(num_layers=2, num_experts=32, num_ranks=4, slots_per_rank=12)
    held = [np.zeros((2, 12), dtype=np.int32)] * num_ranks
    about = {"load": np.ones((2, 32)), "model": shape(2, 32), "topology": topology(num_ranks, 12)}
    mended = recover(held, committed=before, generation=2, **about)
    assert (mended.expert_of_slot.reshape(2, num_ranks, 12) == 0).any(axis=2).all(), "it stays"
    monkeypatch.setattr(recovery, "MAX_REPAIR_WORK", 100)
    fresh = recover(held, committed=before, generation=2, **about)
    assert fresh.replica_counts().min() >= 1
    assert (fresh is before) == (num_ranks == 4)
    assert not (fresh.expert_of_slot.reshape(2, num_ranks, 12) == 0).any(axis=2).all()


def test_moves_without_number_are_left_to_the_checkpoint(monkeypatch):
    before = contiguous_layout(num_layers=2, num_experts=32, num_ranks=4, slots_per_rank=12)
    about = {"topology": topology(4, 12), "checksums": checksums(shape(2, 32))}
    held = [None, *parts(before)[1:]]
    monkeypatch.setattr(recovery, "MAX_MOVES", 24)
    assert sum(map(len, recovery_moves(held, target=before, **about).values())) == 24
    monkeypatch.setattr(recovery, "MAX_MOVES", 23)
    assert recovery_moves(held, target=before, **about) == {}
