import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, contiguous_layout, count_replicas


def layout_of(*rows, num_experts, num_ranks, generation=1):
    return Layout(
        generation=generation,
        num_experts=num_experts,
        num_ranks=num_ranks,
        expert_of_slot=np.array(rows, dtype=np.int32),
    )


@given(
    num_experts=st.integers(1, 12), num_ranks=st.integers(1, 6), slots_per_rank=st.integers(1, 20)
)
def test_the_contiguous_layout_is_always_valid(num_experts, num_ranks, slots_per_rank):
    def build():
        return contiguous_layout(
            num_layers=2,
            num_experts=num_experts,
            num_ranks=num_ranks,
            slots_per_rank=slots_per_rank,
        )

    if num_ranks * slots_per_rank < num_experts:
        with pytest.raises(InvalidLayoutError, match="give each rank at least"):
            build()
    else:
        replicas = build().replica_counts()
        assert replicas.min() >= 1
        assert replicas.max() - replicas.min() <= 1


def unequal(row, slots_of_rank, *, num_experts=3):
    return Layout(
        generation=1,
        num_experts=num_experts,
        num_ranks=len(slots_of_rank),
        expert_of_slot=np.array([row], dtype=np.int32),
        slots_of_rank=slots_of_rank,
    )


def test_ranks_may_have_unequal_slots():
    layout = unequal([0, 1, 2, 0], (1, 3))
    assert layout.first_slot == (0, 1, 4)
    assert layout.with_placement(layout.expert_of_slot, generation=2).slots_of_rank == (1, 3)
    assert not layout.same_placement(unequal([0, 1, 2, 0], (2, 2)))


def test_a_twin_on_a_rank_with_more_slots_is_found():
    with pytest.raises(InvalidLayoutError, match="layer 0: rank 1 holds expert 2 more than 1"):
        unequal([0, 1, 2, 2], (1, 3))


@pytest.mark.parametrize("slots_of_rank", [(1, 2), (0, 4), (4, 1)])
def test_slots_of_rank_that_do_not_sum_to_the_table_are_rejected(slots_of_rank):
    with pytest.raises(InvalidLayoutError, match="slots_of_rank"):
        unequal([0, 1, 2, 0], slots_of_rank)


def test_a_table_without_an_expert_is_rejected_by_layer_and_expert():
    with pytest.raises(InvalidLayoutError, match="layer 1 has no slot for expert 2"):
        layout_of([0, 1, 2], [0, 1, 1], num_experts=3, num_ranks=3)


def test_an_expert_that_does_not_exist_is_rejected_by_slot():
    with pytest.raises(InvalidLayoutError, match="layer 0, slot 2 holds expert 3"):
        layout_of([0, 1, 3], num_experts=3, num_ranks=3)


def test_a_needless_twin_is_rejected_by_rank():
    with pytest.raises(InvalidLayoutError, match="rank 1 holds expert 2"):
        layout_of([0, 1, 2, 2], num_experts=3, num_ranks=2)


def test_a_twin_is_allowed_where_a_rank_has_more_slots_than_there_are_experts():
    assert layout_of([0, 1, 0, 1, 1, 0], num_experts=2, num_ranks=2).slots_per_rank == 3


def test_slots_that_do_not_divide_over_ranks_are_rejected():
    with pytest.raises(InvalidLayoutError, match="3 slots do not divide evenly over 2 ranks"):
        layout_of([0, 1, 2], num_experts=3, num_ranks=2)


@pytest.mark.parametrize("table", [np.zeros(4, np.int32), np.zeros((0, 4), np.int32)])
def test_a_table_that_is_not_layers_by_slots_is_rejected(table):
    with pytest.raises(InvalidLayoutError, match=r"\[layers, slots\]"):
        Layout(generation=1, num_experts=1, num_ranks=4, expert_of_slot=table)


def test_generations_count_from_one():
    with pytest.raises(InvalidLayoutError, match="generation must be at least 1"):
        layout_of([0, 1], num_experts=2, num_ranks=2, generation=0)


def test_a_layout_cannot_be_changed_from_outside():
    table = np.array([[0, 1]], dtype=np.int32)
    layout = Layout(generation=1, num_experts=2, num_ranks=2, expert_of_slot=table)
    table[0, 0] = 1
    assert layout.expert_of_slot[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        layout.expert_of_slot[0, 0] = 1


def test_replicas_of_experts_are_counted():
    layout = layout_of([0, 1, 2, 0], num_experts=3, num_ranks=2)
    np.testing.assert_array_equal(layout.replica_counts(), [[2, 1, 1]])


def test_same_placement_ignores_the_generation():
    layout = layout_of([0, 1], num_experts=2, num_ranks=2)
    assert layout.same_placement(layout.with_placement(layout.expert_of_slot, generation=9))
    swapped = np.array([[1, 0]], dtype=np.int32)
    assert not layout.same_placement(layout.with_placement(swapped, generation=2))


def test_replicas_are_counted_per_layer():
    table = np.array([[0, 0, 1], [2, 1, 1]], dtype=np.int32)
    np.testing.assert_array_equal(count_replicas(table, num_experts=3), [[2, 1, 0], [0, 2, 1]])
