import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import rank_loads
from equipoise.planning.layout import Layout, count_replicas
from equipoise.planning.placing.twins import repair_twins


@given(
    num_experts=st.integers(1, 10),
    num_ranks=st.integers(1, 6),
    spare=st.integers(0, 8),
    seed=st.integers(0, 100_000),
)
@settings(max_examples=300, deadline=None)
def test_any_covering_table_becomes_valid(num_experts, num_ranks, spare, seed):
    rng = np.random.default_rng(seed)
    num_slots = (-(-num_experts // num_ranks) + spare) * num_ranks
    # A skewed draw, so that experts come with more replicas than there are ranks.
    extra = rng.integers(0, rng.integers(1, num_experts + 1), size=(2, num_slots - num_experts))
    rows = np.concatenate([np.tile(np.arange(num_experts), (2, 1)), extra], axis=1)
    table = rng.permuted(rows, axis=1).astype(np.int32)
    repaired = repair_twins(table, load=rng.random((2, num_experts)), num_ranks=num_ranks)
    layout = Layout(
        generation=1, num_experts=num_experts, num_ranks=num_ranks, expert_of_slot=repaired
    )
    assert layout.num_slots == num_slots


def test_a_table_without_twins_is_left_alone():
    table = np.array([[0, 1, 2, 0]], dtype=np.int32)
    repaired = repair_twins(table, load=np.ones((1, 3)), num_ranks=2)
    np.testing.assert_array_equal(repaired, table)
    assert repaired is not table


def test_a_twin_goes_where_it_costs_least():
    # Rank 0 holds expert 0 twice. Expert 3 carries as much as a replica of 0; expert 5 does not.
    table = np.array([[0, 0, 1, 2, 3, 4, 5, 6, 7]], dtype=np.int32)
    load = np.array([[8.0, 1.0, 2.0, 4.0, 1.0, 0.5, 0.5, 0.5]])
    repaired = repair_twins(table, load=load, num_ranks=3)
    np.testing.assert_array_equal(
        count_replicas(repaired, num_experts=8), count_replicas(table, num_experts=8)
    )
    best = min(
        rank_loads(swapped, load=load, num_ranks=3).max() for swapped in _all_swaps_of(table, 0)
    )
    assert rank_loads(repaired, load=load, num_ranks=3).max() == best


def test_a_twin_stays_on_its_node_where_it_can():
    table = np.array([[0, 0, 1, 2, 3, 4, 5, 6]], dtype=np.int32)
    load = np.array([[9.0, 5.0, 5.0, 0.1, 0.1, 0.1, 0.1]])
    repaired = repair_twins(table, load=load, num_ranks=4, num_nodes=2)
    np.testing.assert_array_equal(repaired[0, 4:], table[0, 4:])


def test_an_expert_that_every_rank_has_gives_its_slot_to_the_hottest_other():
    table = np.array([[0, 0, 1, 0, 2, 3]], dtype=np.int32)
    load = np.array([[1.0, 6.0, 9.0, 1.0]])
    repaired = repair_twins(table, load=load, num_ranks=2)
    np.testing.assert_array_equal(count_replicas(repaired, num_experts=4), [[2, 1, 2, 1]])


def _all_swaps_of(table, slot):
    for other in range(3, table.shape[1]):
        swapped = table.copy()
        swapped[0, [slot, other]] = swapped[0, [other, slot]]
        yield swapped
