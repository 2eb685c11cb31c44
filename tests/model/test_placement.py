import numpy as np
import pytest

from equipoise_model.placement import PlacementTables


def random_table(rng, *, num_layers=3, num_experts=8, num_slots=12):
    rows = []
    for _ in range(num_layers):
        extra = rng.integers(0, num_experts, num_slots - num_experts)
        rows.append(rng.permutation(np.concatenate([np.arange(num_experts), extra])))
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_tables_list_exactly_the_slots_that_hold_an_expert(seed):
    table = random_table(np.random.default_rng(seed))
    placement = PlacementTables.from_layout(table, num_experts=8, num_ranks=4, generation=7)
    for layer in range(3):
        for expert in range(8):
            slots = [slot for slot in range(12) if table[layer, slot] == expert]
            count = int(placement.replica_count[layer, expert])
            listed = placement.slots_of_expert[layer, expert].tolist()
            assert count == len(slots)
            assert listed[:count] == slots
            assert set(listed[count:]) <= {-1}


def test_a_placement_knows_its_pools_shape():
    table = random_table(np.random.default_rng(0))
    placement = PlacementTables.from_layout(table, num_experts=8, num_ranks=4, generation=7)
    assert (placement.num_layers, placement.num_slots, placement.slots_per_rank) == (3, 12, 3)
    assert (placement.num_ranks, placement.generation) == (4, 7)


def test_the_identity_puts_each_expert_into_the_slot_of_its_number():
    placement = PlacementTables.identity(num_layers=2, num_experts=5)
    assert placement.slots_of_expert.tolist() == [[[e] for e in range(5)]] * 2
    assert placement.replica_count.eq(1).all()


def test_later_changes_of_the_callers_table_do_not_reach_the_placement():
    table = random_table(np.random.default_rng(3))
    placement = PlacementTables.from_layout(table, num_experts=8)
    before = placement.slots_of_expert.clone()
    table[:] = 0
    assert placement.slots_of_expert.equal(before)


def test_a_layout_without_one_of_the_experts_is_a_programmers_fault():
    with pytest.raises(AssertionError):
        PlacementTables.from_layout([[0, 1, 1, 3]], num_experts=4)


def test_shares_end_where_they_sum_up_to_in_the_order_of_slots():
    placement = PlacementTables.from_layout(
        [[1, 0, 1, 2, 1]],
        num_experts=3,
        share_of_slot=[[10_000, 32_768, 0, 32_768, 22_768]],
    )
    assert placement.slots_of_expert[0, 1].tolist() == [0, 2, 4]
    assert placement.share_ends[0].tolist() == [
        [32_768, 32_768, 32_768],
        [10_000, 10_000, 32_768],
        [32_768, 32_768, 32_768],
    ]


def test_shares_that_do_not_sum_up_are_a_programmers_fault():
    with pytest.raises(AssertionError):
        PlacementTables.from_layout([[0, 1]], num_experts=2, share_of_slot=[[32_768, 32_767]])
