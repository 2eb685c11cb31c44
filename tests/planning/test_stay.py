import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import rank_loads
from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.placing.stay import align, relabel


def layout(*, num_layers=2, num_experts=12, num_ranks=4, slots_per_rank=4):
    return contiguous_layout(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
    )


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_renamed_layout_is_recognised_and_nothing_moves(seed):
    rng = np.random.default_rng(seed)
    # Twelve experts once each, so that no two ranks are alike.
    current = layout(slots_per_rank=3)
    sets = current.expert_of_slot.reshape(2, 4, 3)
    shuffled = rng.permuted(sets[:, rng.permutation(4)], axis=2).reshape(2, 12)
    renamed = stay(shuffled, current)
    np.testing.assert_array_equal(renamed, current.expert_of_slot)


@given(st.integers(0, 10_000), st.integers(1, 2))
@settings(max_examples=50, deadline=None)
def test_staying_in_place_changes_no_ranks_load_but_its_owner(seed, num_nodes):
    rng = np.random.default_rng(seed)
    current = layout()
    table = np.stack([rng.permutation(row) for row in current.expert_of_slot]).astype(np.int32)
    load = rng.random((2, 12))
    moved = stay(table, current, num_nodes=num_nodes)
    np.testing.assert_allclose(
        np.sort(rank_loads(moved, load=load, num_ranks=4), axis=1),
        np.sort(rank_loads(table, load=load, num_ranks=4), axis=1),
    )


def test_experts_that_share_a_node_keep_sharing_one():
    current = layout(slots_per_rank=3)
    sets = current.expert_of_slot.reshape(2, 4, 3)
    # Each node's first rank is most like a rank of the other node.
    wanted = sets[:, [2, 1, 0, 3]].reshape(2, 12)
    by_node = relabel(
        wanted, current.expert_of_slot, first_slot=current.first_slot, num_nodes=2
    ).reshape(2, 2, 6)
    together = [set(experts) for experts in wanted.reshape(2, 2, 6)[0]]
    assert all(set(experts) in together for experts in by_node[0])


def test_an_expert_that_stays_on_its_rank_stays_in_its_slot():
    current = Layout(
        generation=1,
        num_experts=4,
        num_ranks=2,
        expert_of_slot=np.array([[0, 1, 2, 3]], dtype=np.int32),
    )
    aligned = align(
        np.array([[1, 3, 0, 2]], dtype=np.int32), current.expert_of_slot, first_slot=(0, 2, 4)
    )
    np.testing.assert_array_equal(aligned, [[3, 1, 2, 0]])


def test_twins_that_are_allowed_keep_their_slots_too():
    current = Layout(
        generation=1,
        num_experts=2,
        num_ranks=1,
        expert_of_slot=np.array([[0, 1, 0]], dtype=np.int32),
    )
    aligned = align(
        np.array([[0, 0, 1]], dtype=np.int32), current.expert_of_slot, first_slot=(0, 3)
    )
    np.testing.assert_array_equal(aligned, [[0, 1, 0]])


def test_a_rank_with_more_slots_keeps_what_it_holds():
    held = np.array([[0, 1, 2, 3, 4]], dtype=np.int32)
    wanted = np.array([[3, 4, 2, 1, 0]], dtype=np.int32)
    placed = relabel(wanted, held, first_slot=(0, 2, 3, 5))
    np.testing.assert_array_equal(align(placed, held, first_slot=(0, 2, 3, 5)), held)


def stay(table, current, *, num_nodes=1):
    held, first_slot = current.expert_of_slot, current.first_slot
    placed = relabel(table, held, first_slot=first_slot, num_nodes=num_nodes)
    return align(placed, held, first_slot=first_slot)
