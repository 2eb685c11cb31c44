"""A plan after noise moves nothing; a plan after a change of traffic does."""

import numpy as np
import pytest

from equipoise.planning.balance import balancedness_per_layer
from equipoise.planning.layout import Layout
from equipoise.planning.placing.chance import balancedness_by_chance
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology

NUM_LAYERS, NUM_EXPERTS, SAMPLES = 20, 64, 200_000
MODEL = ModelShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_groups=8, expert_bytes=1)
TOPOLOGY = Topology(node_of_rank=("a",) * 8 + ("b",) * 8, slots_per_rank=5)
ALGORITHMS = [Algorithm.GLOBAL, Algorithm.INCREMENTAL]


@pytest.mark.parametrize("num_ranks", [2, 4, 32, 320, 4096])
@pytest.mark.parametrize("mean", [0.01, 0.1, 1, 6.25, 100, 10_000])
def test_evenly_loaded_ranks_look_as_balanced_as_chance_allows(num_ranks, mean):
    counts = np.random.default_rng(0).poisson(mean, size=(58, num_ranks)).astype(np.float64)
    busy = counts[counts.any(axis=1)]
    by_chance = balancedness_by_chance(busy).mean()
    assert by_chance <= balancedness_per_layer(busy).mean()
    assert by_chance > 0.95 or mean < 10_000


def test_one_hot_rank_looks_less_balanced_than_chance_allows():
    means = np.full((58, 320), 200.0)
    means[:, 7] *= 2.0
    counts = np.random.default_rng(0).poisson(means).astype(np.float64)
    measured = balancedness_per_layer(counts).mean()
    assert measured < 0.7 * balancedness_by_chance(counts).mean()


def shares(seed):
    load = np.random.default_rng(seed).lognormal(size=(NUM_LAYERS, NUM_EXPERTS))
    return load / load.sum(axis=1, keepdims=True)


def counted(of_expert, *, seed, samples=SAMPLES):
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(samples, row) for row in of_expert]).astype(np.float64)


def planned(load, current, algorithm, samples):
    return plan(
        load,
        model=MODEL,
        topology=TOPOLOGY,
        current=current,
        algorithm=algorithm,
        samples=samples,
    )


@pytest.fixture
def current():
    """The layout planned for one sample of the load."""
    made = planned(counted(shares(0), seed=1), None, Algorithm.GLOBAL, SAMPLES)
    return Layout(
        generation=1, num_experts=NUM_EXPERTS, num_ranks=16, expert_of_slot=made.expert_of_slot
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(2, 7))
def test_another_sample_of_the_same_load_moves_nothing(current, algorithm, seed):
    made = planned(counted(shares(0), seed=seed), current, algorithm, SAMPLES)
    assert made.moves == 0
    assert "with 200,000 assignments per layer" in made.reason


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sample_that_is_small_in_one_layer_moves_nothing_there(current, algorithm):
    """The modules that draft tokens run for few requests only."""
    load = counted(shares(0), seed=3)
    load[-1] = counted(shares(0)[-1:], seed=4, samples=SAMPLES // 1000)[0]
    made = planned(load, current, algorithm, load.sum(axis=1).mean())
    assert made.moves == 0, made.reason


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_a_sample_size_a_plan_follows_noise(current, algorithm):
    made = planned(counted(shares(0), seed=2), current, algorithm, None)
    assert made.moves > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_traffic_moves_experts_in_every_layer(current, algorithm):
    made = planned(counted(shares(8), seed=2), current, algorithm, SAMPLES)
    assert (made.expert_of_slot != current.expert_of_slot).any(axis=1).all()
    # Small steps stop where chance hides what is left: at about 2 %.
    assert made.balancedness > (0.97 if algorithm is Algorithm.INCREMENTAL else 0.99)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_shift_in_a_single_layer_is_distinguished_from_noise_in_the_others(current, algorithm):
    changed = shares(0)
    changed[4] = shares(8)[4]
    made = planned(counted(changed, seed=2), current, algorithm, SAMPLES)
    moved = (made.expert_of_slot != current.expert_of_slot).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(moved), [4])


def test_larger_samples_distinguish_smaller_gains_from_noise(current):
    nearly = shares(0) * np.random.default_rng(3).uniform(0.97, 1.03, size=shares(0).shape)
    nearly /= nearly.sum(axis=1, keepdims=True)
    few, many = (
        planned(counted(nearly, seed=2, samples=samples), current, Algorithm.GLOBAL, samples)
        for samples in (10_000, 10**9)
    )
    assert few.moves == 0
    assert many.moves > 0
