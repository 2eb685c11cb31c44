"""Layouts that serve several kinds of traffic at once."""

import numpy as np
import pytest

from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.proposal import hedges
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.traffic import ExpectedTraffic

NUM_RANKS = 8
MODEL = ModelShape(num_layers=3, num_experts=32, num_groups=8, expert_bytes=1)
TOPOLOGY = Topology(node_of_rank=("a",) * 4 + ("b",) * 4, slots_per_rank=5)
KINDS = np.random.default_rng(3).dirichlet(np.full(32, 1.5), size=(3, 3))


def expecting(*weights):
    kinds = KINDS[: len(weights)]
    return ExpectedTraffic(shares=kinds, weights=np.array(weights), samples=1e9)


def start():
    return contiguous_layout(num_layers=3, num_experts=32, num_ranks=NUM_RANKS, slots_per_rank=5)


def planned(expected, *, current=None, **given):
    current = start() if current is None else current
    made = plan(
        np.tensordot(expected.weights, expected.shares, axes=1),
        model=MODEL,
        topology=TOPOLOGY,
        current=current,
        algorithm=Algorithm.INCREMENTAL,
        expected=expected,
        **given,
    )
    return current.with_placement(made.expert_of_slot, generation=2), made


def reached(layout):
    return [balancedness(layout_loads(layout, kind)) for kind in KINDS]


def test_one_layout_serves_kinds_that_plans_for_one_or_for_the_mean_do_not():
    hedged, made = planned(expecting(0.5, 0.5))
    for_one, _ = planned(expecting(1.0))
    mean = ExpectedTraffic(shares=KINDS[:2].mean(axis=0)[None], weights=np.ones(1), samples=1e9)
    for_mean, _ = planned(mean)
    assert min(reached(hedged)[:2]) > 0.93
    assert min(reached(for_one)[:2]) < 0.8
    assert min(reached(hedged)[:2]) > min(reached(for_mean)[:2]) + 0.05
    assert "for 2 kinds of traffic" in made.reason


def test_what_serves_two_kinds_serves_their_mixtures():
    hedged, _ = planned(expecting(0.5, 0.5))
    least = min(reached(hedged)[:2])
    for part in (0.2, 0.5, 0.8):
        mixture = part * KINDS[0] + (1 - part) * KINDS[1]
        assert balancedness(layout_loads(hedged, mixture)) >= least - 1e-9


@pytest.mark.parametrize(
    ("num_ranks", "slots_per_rank", "hedged"),
    [(32, 9, True), (72, 4, True), (144, 2, False), (320, 4, False)],
)
def test_large_pools_and_those_with_few_slots_follow_the_average(num_ranks, slots_per_rank, hedged):
    topology = Topology(node_of_rank=("a",) * num_ranks, slots_per_rank=slots_per_rank)
    assert hedges(topology) is hedged


def test_a_kind_that_is_expected_more_is_served_better():
    mostly_first, _ = planned(expecting(0.9, 0.05, 0.05))
    mostly_last, _ = planned(expecting(0.05, 0.05, 0.9))
    assert reached(mostly_first)[0] > reached(mostly_last)[0]
    assert reached(mostly_last)[2] > reached(mostly_first)[2]


def test_a_layout_that_serves_all_kinds_stays():
    hedged, _ = planned(expecting(0.5, 0.5))
    _, made = planned(expecting(0.5, 0.5), current=hedged)
    assert made.moves <= 0.05 * hedged.expert_of_slot.size


@pytest.mark.parametrize("price", [0.0, 0.002, 0.01])
def test_moves_that_gain_less_than_their_price_are_not_made(price):
    hedged, made = planned(expecting(0.5, 0.5), least_gain_per_move=price)
    gain = np.mean(reached(hedged)[:2]) - np.mean(reached(start())[:2])
    assert made.moves > 0
    assert gain >= price * made.moves


def test_lost_experts_are_restored_at_any_price():
    current, _ = planned(expecting(0.5, 0.5))
    made = plan(
        KINDS[0],
        model=MODEL,
        topology=TOPOLOGY,
        current=current,
        algorithm=Algorithm.INCREMENTAL,
        exclude_ranks=frozenset({3}),
        expected=expecting(0.5, 0.5),
        least_gain_per_move=1.0,
    )
    for row in made.expert_of_slot:
        assert set(row.tolist()) == set(range(32))
    assert made.moves <= 3 * 5, "only what was lost moves"
