"""Waves between layouts whose layers share places: no rank ever exceeds its places or staging."""

import os
from itertools import pairwise

import numpy as np
import pytest

from equipoise.planning.layout import Layout, count_moves, is_moved
from equipoise.planning.moves import waves
from equipoise.planning.shares import even_shares, whole_shares

NUM_PLANS = int(os.environ.get("EQUIPOISE_RANDOM_PLANS", "400"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "0"))


def random_layout(rng, *, num_layers, num_experts, num_ranks, num_slots, places, weighted):
    """Any valid layout in which no rank holds more than its places."""
    table = np.full((num_layers, num_ranks, num_slots), -1, dtype=np.int32)
    left = np.full(num_ranks, places)
    for layer in range(num_layers):
        # All experts of later layers must still fit.
        for expert in rng.permutation(num_experts).tolist():
            open_ranks = np.flatnonzero((left > 0) & (table[layer] < 0).any(axis=1))
            if not len(open_ranks):
                return None
            rank = rng.choice(open_ranks[left[open_ranks] >= left[open_ranks].max() - 1])
            table[layer, rank, rng.choice(np.flatnonzero(table[layer, rank] < 0))] = expert
            left[rank] -= 1
    for _ in range(rng.integers(0, left.sum() + 1)):
        layer, rank = rng.integers(num_layers), rng.integers(num_ranks)
        free = np.flatnonzero(table[layer, rank] < 0)
        absent = np.setdiff1d(np.arange(num_experts), table[layer, rank])
        if left[rank] and len(free) and len(absent):
            table[layer, rank, rng.choice(free)] = rng.choice(absent)
            left[rank] -= 1
    flat = table.reshape(num_layers, -1)
    shares = None
    if weighted:
        parts = rng.random(flat.shape)
        sums = np.zeros((num_layers, num_experts + 1))
        rows = np.arange(num_layers)[:, None]
        np.add.at(sums, (rows, flat), parts)
        shares = whole_shares(parts / sums[rows, flat], flat, num_experts=num_experts)
    return Layout(
        generation=1,
        num_experts=num_experts,
        num_ranks=num_ranks,
        expert_of_slot=flat,
        share_of_slot=shares,
    )


def random_pair(rng):
    num_experts, num_ranks = int(rng.integers(2, 9)), int(rng.integers(2, 6))
    num_layers = int(rng.integers(1, 7))
    least = -(-num_experts * num_layers // num_ranks)
    num_slots = int(rng.integers(-(-num_experts // num_ranks), num_experts + 1))
    places = min(least + int(rng.integers(0, 4)), num_layers * num_slots)
    shape = {
        "num_layers": num_layers,
        "num_experts": num_experts,
        "num_ranks": num_ranks,
        "num_slots": num_slots,
        "places": places,
    }
    made = [random_layout(rng, weighted=rng.random() < 0.3, **shape) for _ in range(2)]
    return None if None in made else (*made, places)


def steps_between(before, after, *, most_moves):
    """The layouts on the way, each as a rank makes it of the one before."""
    layouts = [before]
    for change in waves(before, after, expert_bytes=1, max_wave_bytes=most_moves):
        layouts.append(change.applied_to(layouts[-1]))
    return layouts


def staged_by_layer(before, after):
    """Experts that the rank with the most stages: over all layers, and whether in one layer."""
    staged = is_moved(before.expert_of_slot, after.expert_of_slot)
    of_layer = np.add.reduceat(staged, after.first_slot[:-1], axis=1, dtype=np.int64)
    return int(of_layer.sum(axis=0).max()), int(of_layer.any(axis=1).sum()) <= 1


@pytest.mark.parametrize("part", range(8))
def test_no_wave_of_any_plan_exceeds_places_or_staging(part):
    rng = np.random.default_rng([SEED, part])
    planned = moved = tried = 0
    while tried < NUM_PLANS // 8:
        pair = random_pair(rng)
        if pair is None:
            continue
        before, after, places = pair
        tried += 1
        most_moves = int(rng.integers(0, 9))
        way = steps_between(before, after, most_moves=most_moves)
        assert way[-1].same_placement(after)
        planned += count_moves(before.expert_of_slot, after.expert_of_slot)
        for one, two in pairwise(way):
            assert max(two.used_places) <= places
            assert not one.same_placement(two)
            most_staged, is_one_layer = staged_by_layer(one, two)
            assert most_staged <= max(1, most_moves) or is_one_layer
            moved += count_moves(one.expert_of_slot, two.expert_of_slot)
    # Few experts move twice, although ranks have hardly more places than there are experts.
    assert moved <= 1.1 * planned


def test_full_ranks_of_a_large_pool_exchange_experts_within_their_staging():
    """As many places as experts, ranks that differ in each layer: no layer can change alone."""
    rng = np.random.default_rng(0)
    num_layers, num_ranks, num_experts, num_slots = 12, 16, 64, 7
    layouts = []
    for _ in range(2):
        # 4 experts of each layer per rank, then exchanges of sizes between pairs of layers.
        sizes = np.full((num_layers, num_ranks), 4)
        for _ in range(300):
            (a, b), (r, s) = (rng.choice(size, 2, replace=False) for size in sizes.shape)
            change = np.zeros_like(sizes)
            change[a, r] = change[b, s] = 1
            change[a, s] = change[b, r] = -1
            if ((sizes + change >= 0) & (sizes + change <= num_slots)).all():
                sizes += change
        is_used = np.arange(num_slots) < sizes[:, :, None]
        table = np.full(is_used.shape, -1, dtype=np.int32)
        table[is_used] = np.concatenate([rng.permutation(num_experts) for _ in range(num_layers)])
        layouts.append(
            Layout(
                generation=1,
                num_experts=num_experts,
                num_ranks=num_ranks,
                expert_of_slot=table.reshape(num_layers, -1),
            )
        )
    way = steps_between(*layouts, most_moves=3)
    assert way[-1].same_placement(layouts[1])
    assert {max(layout.used_places) for layout in way} == {4 * num_layers}
    beyond = [staged_by_layer(*pair) for pair in pairwise(way)]
    assert all(most_staged <= 3 or is_one_layer for most_staged, is_one_layer in beyond)
    assert not all(is_one_layer for _, is_one_layer in beyond)


@pytest.mark.parametrize(("most_moves", "num_waves"), [(2, 1), (1, 2), (0, 2)])
def test_an_exchange_between_two_full_ranks_takes_no_more_staging_than_it_may(
    most_moves, num_waves
):
    before = Layout(
        generation=1,
        num_experts=2,
        num_ranks=2,
        expert_of_slot=np.array([[0, 1, -1, -1], [-1, -1, 0, 1]]),
    )
    after = before.with_placement(before.expert_of_slot[::-1], generation=2)
    way = steps_between(before, after, most_moves=most_moves)
    assert way[-1].same_placement(after)
    assert len(way) == 1 + num_waves
    assert all(max(layout.used_places) == 2 for layout in way)


def test_a_replica_that_leaves_anyway_makes_room_for_a_layer():
    # Rank 0 has three places, all used; layer 0 needs one more there and layer 1 one less.
    before = Layout(
        generation=1,
        num_experts=2,
        num_ranks=2,
        expert_of_slot=np.array([[0, -1, 1, -1], [0, 1, 0, 1]]),
    )
    after = before.with_placement(
        np.array([[0, 1, 1, -1], [1, -1, 0, 1]], dtype=np.int32), generation=2
    )
    way = steps_between(before, after, most_moves=1)
    assert all(max(layout.used_places) <= 3 for layout in way)
    assert way[-1].same_placement(after)


def test_shares_of_a_replica_that_is_given_up_go_to_another():
    rng = np.random.default_rng(1)
    shape = {"num_layers": 3, "num_experts": 4, "num_ranks": 3, "num_slots": 4, "places": 6}
    found = 0
    for _ in range(300):
        made = [random_layout(rng, weighted=True, **shape) for _ in range(2)]
        if None in made:
            continue
        way = steps_between(*made, most_moves=2)
        found += len(way) > 2
        for layout in way:
            even = even_shares(layout.expert_of_slot, num_experts=4)
            assert (layout.shares()[even == 0] == 0).all()
    assert found > 50
