import numpy as np

from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads


def test_an_experts_load_splits_evenly_over_its_replicas():
    table = np.array([[0, 1, 0, 2]], dtype=np.int32)
    load = np.array([[8.0, 1.0, 2.0]])
    np.testing.assert_array_equal(
        rank_loads(table, load=load, num_ranks=2), [[4.0 + 1.0, 4.0 + 2.0]]
    )


def test_no_load_is_lost_on_the_way_to_the_ranks():
    rng = np.random.default_rng(0)
    load = rng.random((5, 8))
    table = np.array([rng.permutation(np.arange(12) % 8) for _ in range(5)], dtype=np.int32)
    by_rank = rank_loads(table, load=load, num_ranks=4)
    np.testing.assert_allclose(by_rank.sum(axis=1), load.sum(axis=1))


def test_balancedness_is_mean_over_max_and_averages_layers_with_traffic():
    rank_load = np.array([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(balancedness_per_layer(rank_load), [2 / 3, 1.0, 1.0])
    assert balancedness(rank_load) == (2 / 3 + 1.0) / 2


def test_no_traffic_at_all_is_balanced():
    assert balancedness(np.zeros((2, 4))) == 1.0
