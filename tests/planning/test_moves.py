from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.moves import (
    CHECKSUM_BYTES,
    MAX_RANK_SOURCES,
    CheckpointSource,
    RankSource,
    moves_into,
    waves,
)
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.holders import ranks_of_expert


def checksums_of(num_layers, num_experts):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_layers, num_experts, CHECKSUM_BYTES), dtype=np.uint8)


def one_layer(*experts, num_ranks, generation=1):
    return Layout(
        generation=generation,
        num_experts=max(experts) + 1,
        num_ranks=num_ranks,
        expert_of_slot=np.array([experts], dtype=np.int32),
    )


def ranks_of(move):
    return [source.rank for source in move.sources if isinstance(source, RankSource)]


@st.composite
def changes(draw):
    """A layout, and another one of the same pool that a plan could ask for."""
    num_ranks, slots_per_rank = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    num_experts = draw(st.integers(1, num_ranks * slots_per_rank))
    num_layers = draw(st.integers(1, 5))
    current = contiguous_layout(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
    )
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    made = plan(
        rng.pareto(1.0, size=(num_layers, num_experts)),
        model=ModelShape(
            num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1
        ),
        topology=Topology(node_of_rank=("node",) * num_ranks, slots_per_rank=slots_per_rank),
        current=current,
        algorithm=Algorithm.GLOBAL,
    )
    return current, current.with_placement(made.expert_of_slot, generation=2)


@given(changes())
@settings(max_examples=100, deadline=None)
def test_moves_applied_to_the_current_layout_give_the_target(change):
    current, target = change
    topology = Topology(
        node_of_rank=tuple(f"node-{rank % 2}" for rank in range(current.num_ranks)),
        slots_per_rank=current.slots_per_rank,
    )
    checksums = checksums_of(current.num_layers, current.num_experts)
    moves = moves_into(current.expert_of_slot, target, topology=topology, checksums=checksums)
    table = current.expert_of_slot.copy()
    assert list(moves) == list(range(current.num_ranks))
    for rank, of_rank in moves.items():
        for move in of_rank:
            own = current.own_slots(rank)
            assert own.start <= move.slot < own.stop
            assert move.checksum == bytes(checksums[move.layer, move.expert])
            assert move.sources[-1] == CheckpointSource()
            holders = ranks_of_expert(current, layer=move.layer, expert=move.expert)
            assert len(ranks_of(move)) == min(len(holders), MAX_RANK_SOURCES)
            assert set(ranks_of(move)) <= set(holders)
            assert table[move.layer, move.slot] != move.expert
            table[move.layer, move.slot] = move.expert
    np.testing.assert_array_equal(table, target.expert_of_slot)


def test_the_nearest_holder_is_the_first_source():
    # Expert 1 is on ranks 1 (other node), 2 (own node) and 3 (own rank, in another slot).
    current = one_layer(0, 2, 1, 0, 1, 2, 1, 2, num_ranks=4)
    target = one_layer(0, 2, 1, 0, 1, 2, 0, 1, num_ranks=4, generation=2)
    topology = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=2)
    moves = moves_into(
        current.expert_of_slot, target, topology=topology, checksums=checksums_of(1, 3)
    )
    fetched = next(move for move in moves[3] if move.expert == 1)
    assert ranks_of(fetched) == [3, 2, 1]
    assert moves[0] == moves[1] == moves[2] == ()


def test_first_sources_are_spread_over_holders():
    # Ranks 0 and 1 hold expert 0; the six others all want it.
    current = one_layer(0, 0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, num_ranks=14)
    wanted = [0, 0, 1, 2, 3, 4, 5, 6] + [0] * 6
    target = one_layer(*wanted, num_ranks=14, generation=2)
    topology = Topology(node_of_rank=("a",) * 14, slots_per_rank=1)
    moves = moves_into(
        current.expert_of_slot, target, topology=topology, checksums=checksums_of(1, 7)
    )
    first_choice = Counter(ranks_of(move)[0] for of_rank in moves.values() for move in of_rank)
    assert first_choice == {0: 3, 1: 3}


def halves(num_ranks, *, nodes=None):
    """Moves of ranks of which half hold experts 0-3 and half 4-7, each of them twice."""
    low = np.repeat(np.arange(4, dtype=np.int32), 2)
    held = np.concatenate([low + 4 * (rank % 2) for rank in range(num_ranks)])[None]
    every = np.tile(np.arange(8, dtype=np.int32), num_ranks)
    target = one_layer(*every.tolist(), num_ranks=num_ranks, generation=2)
    topology = Topology(
        node_of_rank=nodes or tuple(f"node-{rank // 4}" for rank in range(num_ranks)),
        slots_per_rank=8,
    )
    moves = moves_into(held, target, topology=topology, checksums=checksums_of(1, 8))
    return held, topology, [move for of_rank in moves.values() for move in of_rank]


def test_of_many_holders_a_few_are_sources_the_nearest_first_and_all_in_turn():
    held, topology, moves = halves(64)
    assert len(moves) == np.count_nonzero(held != np.arange(512) % 8)
    first_choice = Counter()
    for move in moves:
        rank, ranks = move.slot // 8, ranks_of(move)
        assert len(set(ranks)) == len(ranks) == MAX_RANK_SOURCES
        assert move.sources[-1] == CheckpointSource()
        assert all(move.expert in held[0, 8 * one : 8 * one + 8] for one in ranks)
        nodes = [topology.node_of_rank[one] for one in ranks]
        first_choice[ranks[0]] += 1
        if move.expert in held[0, 8 * rank : 8 * rank + 8]:
            assert ranks[0] == rank
        assert nodes[:2] == [topology.node_of_rank[rank]] * 2, "both of its node that hold it"
    assert max(first_choice.values()) <= min(first_choice.values()) + 6
    assert len(first_choice) == 64


def test_twice_as_many_ranks_that_hold_the_same_cost_twice_as_much_not_four_times():
    class Nodes(tuple):
        looked_at = 0
        __slots__ = ()

        def __getitem__(self, place):
            Nodes.looked_at += 1
            return super().__getitem__(place)

    counted = []
    for num_ranks in (64, 128):
        Nodes.looked_at = 0
        halves(num_ranks, nodes=Nodes(f"node-{rank // 4}" for rank in range(num_ranks)))
        counted.append(Nodes.looked_at)
    assert counted[1] <= 2.1 * counted[0]


@given(changes(), st.integers(1, 6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_waves_are_valid_small_and_end_in_the_target(change, most_moves, by_gain):
    current, target = change
    gain = np.arange(current.num_layers, dtype=np.float64) if by_gain else None
    steps = waves(
        current,
        target.with_placement(target.expert_of_slot, generation=7),
        expert_bytes=10,
        max_wave_bytes=10 * most_moves + 9,
        gain_of_layer=gain,
    )
    before = current
    for generation, step in enumerate(steps, start=7):
        layout = step.applied_to(before)
        assert layout.generation == generation
        changed = before.expert_of_slot != layout.expert_of_slot
        num_layers = changed.any(axis=1).sum()
        worst_rank = changed.reshape(current.num_layers, current.num_ranks, -1).sum((0, 2)).max()
        assert num_layers == 1 or (num_layers > 1 and worst_rank <= most_moves)
        before = layout
    assert before.same_placement(target)
    if by_gain and steps:
        wave = steps[0].applied_to(current)
        first = (current.expert_of_slot != wave.expert_of_slot).any(axis=1)
        every = (current.expert_of_slot != target.expert_of_slot).any(axis=1)
        assert np.flatnonzero(first).max() == np.flatnonzero(every).max()


def test_an_unchanged_layout_has_no_waves():
    current = one_layer(0, 1, num_ranks=2)
    same = one_layer(0, 1, num_ranks=2, generation=2)
    assert not waves(current, same, expert_bytes=1, max_wave_bytes=1)
