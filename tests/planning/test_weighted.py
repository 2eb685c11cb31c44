import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.arrays import EMPTY
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.placing.weighted import WeightedPlacement, needs_weights, place_weighted
from tests.support.eplb import eplb


def loads_of_ranks(placement: WeightedPlacement, load: np.ndarray, num_ranks: int) -> np.ndarray:
    served = (
        np.take_along_axis(load, placement.expert_of_slot.astype(np.int64), axis=1)
        * placement.share_of_slot
    )
    return served.reshape(len(load), num_ranks, -1).sum(axis=2)


@st.composite
def pools(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_ranks = draw(st.integers(2, 24))
    slots_per_rank = draw(st.integers(2, 6))
    num_slots = num_ranks * slots_per_rank
    # With two slots per rank there may be as many redundant ones as experts, and more.
    most = num_slots - 2 if slots_per_rank == 2 else min(num_ranks - 1, num_slots // 2)
    redundant = draw(st.integers(1, max(most, 1)))
    num_experts = num_slots - redundant
    seed, skew = draw(st.integers(0, 2**32 - 1)), draw(st.floats(0.1, 4.0))
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0.0, skew, (2, num_experts))
    load[:, rng.random(num_experts) < draw(st.floats(0.0, 0.5))] = 0.0
    return load, num_slots, num_ranks


@settings(max_examples=300, deadline=None)
@given(pools())
def test_every_expert_is_served_once_in_parts_and_never_twice_on_a_rank(
    pool: tuple[np.ndarray, int, int],
) -> None:
    load, num_slots, num_ranks = pool
    placement = place_weighted(load, num_slots=num_slots, num_ranks=num_ranks)
    for layer in range(len(load)):
        experts, shares = placement.expert_of_slot[layer], placement.share_of_slot[layer]
        assert (shares >= 0).all()
        is_used = experts != EMPTY
        assert not shares[~is_used].any()
        parts = np.zeros(load.shape[1])
        np.add.at(parts, experts[is_used], shares[is_used])
        np.testing.assert_allclose(parts, 1.0)
        on_rank = np.sort(experts.reshape(num_ranks, -1), axis=1)
        assert ((on_rank[:, 1:] != on_rank[:, :-1]) | (on_rank[:, 1:] == EMPTY)).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(0, 60), st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_a_redundant_slot_for_each_of_two_makes_all_ranks_level(
    num_ranks: int, beyond: int, seed: int, skew: float
) -> None:
    num_experts = max(num_ranks - beyond, 2)
    load = np.random.default_rng(seed).lognormal(0.0, skew, (2, num_experts))
    placement = place_weighted(load, num_slots=2 * num_ranks, num_ranks=num_ranks)
    of_ranks = loads_of_ranks(placement, load, num_ranks)
    np.testing.assert_allclose(of_ranks, of_ranks.mean(axis=1, keepdims=True).repeat(num_ranks, 1))


def test_two_equal_chains_come_out_level() -> None:
    # Two chains of two ranks: 5 + 1 + 2 and 4 + 3 + 1, each 4 a rank.
    load = np.array([[5.0, 4.0, 3.0, 2.0, 1.0, 1.0]])
    placement = place_weighted(load, num_slots=8, num_ranks=4)
    np.testing.assert_allclose(loads_of_ranks(placement, load, 4), 4.0)


def test_uneven_shares_beat_even_ones_where_replicas_are_few() -> None:
    rng = np.random.default_rng(0)
    load = rng.lognormal(0.0, 0.6, (12, 256))
    placement = place_weighted(load, num_slots=288, num_ranks=144)
    even = eplb(load, num_slots=288, num_groups=1, num_nodes=1, num_ranks=144, hierarchical=False)
    weighted = balancedness(loads_of_ranks(placement, load, 144))
    assert weighted > balancedness(rank_loads(even, load=load, num_ranks=144)) + 0.01


def test_labels_of_experts_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    load = rng.lognormal(0.0, 1.0, (1, 60))
    names = rng.permutation(60)
    one = place_weighted(load, num_slots=64, num_ranks=16)
    other = place_weighted(load[:, names], num_slots=64, num_ranks=16)
    np.testing.assert_array_equal(names[other.expert_of_slot], one.expert_of_slot)
    np.testing.assert_allclose(other.share_of_slot, one.share_of_slot)


def test_an_idle_layer_is_shared_evenly() -> None:
    placement = place_weighted(np.zeros((1, 6)), num_slots=8, num_ranks=4)
    np.testing.assert_allclose(loads_of_ranks(placement, np.ones((1, 6)), 4), 1.5)


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "num_ranks", "expected"),
    [
        (288, 256, 144, True),
        (512, 256, 256, True),
        (768, 256, 256, False),
        (288, 256, 32, False),
        (256, 256, 32, False),
        (9, 8, 9, False),
    ],
)
def test_weights_are_for_few_redundant_slots_or_two_slots_per_rank(
    num_slots: int, num_experts: int, num_ranks: int, expected: bool
) -> None:
    needed = needs_weights(num_slots=num_slots, num_experts=num_experts, num_ranks=num_ranks)
    assert needed is expected
