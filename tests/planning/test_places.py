"""Plans for ranks whose layers share places."""

import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.moves import waves
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.placing.bound import upper_bound_of_places
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, SlotUse, Weighting
from equipoise.planning.recovery import recover
from equipoise.planning.topology import ModelShape, Topology

NUM_POOLS = int(os.environ.get("EQUIPOISE_RANDOM_POOLS", "200"))
SEED = int(os.environ.get("EQUIPOISE_FUZZ_SEED", "0"))
POOLED, PER_LAYER = SlotUse.POOLED, SlotUse.PER_LAYER


def skewed(rng, *, num_layers, num_experts):
    """Loads of layers that are skewed differently, some experts idle."""
    sigma = rng.uniform(0.1, 2.0, (num_layers, 1))
    load = np.exp(sigma * rng.standard_normal((num_layers, num_experts)))
    return load * (rng.random(load.shape) > 0.05)


def laid_out(made, *, num_experts):
    return Layout(
        generation=1,
        num_experts=num_experts,
        num_ranks=len(made.ranks),
        expert_of_slot=made.expert_of_slot,
        share_of_slot=made.share_of_slot,
    )


def random_pool(rng):
    """A pool with hardly more places than experts, or some more; most pools are small."""
    is_large = rng.random() < 0.1
    num_ranks = int(rng.integers(2, 9 if is_large else 5))
    num_layers = int(rng.integers(1, 9 if is_large else 5))
    num_experts = int(rng.integers(num_ranks, 25 if is_large else 9))
    least = -(-num_experts * num_layers // num_ranks)
    # At least as many as for one slot of each layer.
    places = max(least, -(-num_experts // num_ranks) * num_layers) + int(rng.integers(0, 9))
    slots = -(-places // num_layers) + int(rng.integers(0, 4))
    is_unequal = rng.random() < 0.2
    more = rng.integers(0, 5, num_ranks) * is_unequal
    model = ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)
    topology = Topology(
        node_of_rank=tuple(str(rank // 2) for rank in range(num_ranks)),
        slots_per_rank=slots,
        places_of_rank=tuple(np.minimum(places + more, num_layers * slots).tolist()),
    )
    return model, topology


def random_wishes(rng, *, model, topology):
    can_be_per_layer = sum(topology.slots_of_layer(model.num_layers)) >= model.num_experts
    return Wishes(
        slots=PER_LAYER if can_be_per_layer and rng.random() < 0.3 else POOLED,
        algorithm=Algorithm.GLOBAL if rng.random() < 0.5 else Algorithm.INCREMENTAL,
        weighted=Weighting.OFF if rng.random() < 0.5 else Weighting.ON,
    )


def check_way(before, after, *, most_moves, places):
    """No wave between two layouts exceeds places or staging."""
    one = before
    for change in waves(before, after, expert_bytes=1, max_wave_bytes=most_moves):
        two = change.applied_to(one)
        assert (np.array(two.used_places) <= places).all()
        staged = is_moved(one.expert_of_slot, two.expert_of_slot)
        of_layer = np.add.reduceat(staged, two.first_slot[:-1], axis=1, dtype=np.int64)
        assert of_layer.sum(axis=0).max() <= most_moves or of_layer.any(axis=1).sum() <= 1
        one = two
    assert one.same_placement(after)


def lose_a_rank(current, load, *, lost, model, topology):
    """The layout of the next epoch, without a rank, and its topology."""
    ranks = tuple(rank for rank in range(topology.num_ranks) if rank != lost)
    fewer = topology.only(ranks)
    held = [current.expert_of_slot[:, current.own_slots(rank)] for rank in ranks]
    where = {"load": load, "model": model, "topology": fewer}
    return recover(held, committed=current, generation=1, **where), fewer


def check_random_pool(rng):
    """Plan for a pool, thrice, and switch to each plan by waves; sometimes a rank is lost."""
    model, topology = random_pool(rng)
    current = None
    for _ in range(3):
        load = skewed(rng, num_layers=model.num_layers, num_experts=model.num_experts)
        if current is not None and topology.num_ranks > 2 and rng.random() < 0.2:
            lost = int(rng.integers(topology.num_ranks))
            try:
                current, topology = lose_a_rank(
                    current, load, lost=lost, model=model, topology=topology
                )
            except InvalidLayoutError:  # Only too few places are a reason.
                num_left = sum(topology.places_of_rank) - topology.places_of_rank[lost]
                assert num_left < load.size
        places = np.array(topology.places_of_rank)
        wishes = random_wishes(rng, model=model, topology=topology)
        made = plan_in_places(load, wishes, model=model, topology=topology, current=current)
        planned = laid_out(made, num_experts=model.num_experts)
        assert (np.array(planned.used_places) <= places).all()
        assert made.balancedness == pytest.approx(balancedness(layout_loads(planned, load)))
        assert made.balancedness <= made.bound + 1e-9
        if current is not None:
            assert (np.array(current.used_places) <= places).all()
            check_way(current, planned, most_moves=int(rng.integers(1, 9)), places=places)
        current = planned


@pytest.mark.parametrize("part", range(4))
def test_no_rank_exceeds_its_places_in_any_wave_of_any_plan(part):
    for number in range(part, NUM_POOLS, 4):
        try:
            check_random_pool(np.random.default_rng([SEED, number]))
        except BaseException as error:
            error.add_note(f"EQUIPOISE_FUZZ_SEED={SEED}, pool {number}")
            raise


def test_layers_that_need_more_replicas_get_them_from_those_that_need_fewer():
    rng = np.random.default_rng(0)
    sigma = np.array([[0.05]] * 4 + [[1.6]] * 4)
    load = np.exp(sigma * rng.standard_normal((8, 64)))
    model = ModelShape(num_layers=8, num_experts=64, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 32, slots_per_rank=5, places_of_rank=(8 * 3,) * 32)
    balance = {}
    for slots in (PER_LAYER, POOLED):
        made = plan_in_places(
            load, Wishes(slots=slots), model=model, topology=topology, current=None
        )
        in_use = (made.expert_of_slot >= 0).sum(axis=1)
        assert in_use.sum() <= 8 * 3 * 32
        balance[slots] = made.balancedness
    assert in_use[4:].min() > in_use[:4].max()
    assert balance[POOLED] > balance[PER_LAYER] + 0.02


def test_without_places_a_plan_is_that_of_the_planner():
    rng = np.random.default_rng(0)
    load = skewed(rng, num_layers=3, num_experts=16)
    model = ModelShape(num_layers=3, num_experts=16, num_groups=4, expert_bytes=1)
    topology = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=5)
    wanted = plan(load, model=model, topology=topology, algorithm=Algorithm.GLOBAL)
    for slots in (POOLED, PER_LAYER):
        made = plan_in_places(
            load, Wishes(slots=slots), model=model, topology=topology, current=None
        )
        assert np.array_equal(made.expert_of_slot, wanted.expert_of_slot)
        assert made.reason == wanted.reason


def test_traffic_as_before_moves_nothing():
    rng = np.random.default_rng(0)
    load = skewed(rng, num_layers=6, num_experts=32)
    model = ModelShape(num_layers=6, num_experts=32, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 8, slots_per_rank=8, places_of_rank=(6 * 5,) * 8)
    for slots in (POOLED, PER_LAYER):
        where = {"model": model, "topology": topology}
        first = plan_in_places(load, Wishes(slots=slots), current=None, **where)
        current = laid_out(first, num_experts=32)
        again = plan_in_places(
            load, Wishes(slots=slots, algorithm=Algorithm.INCREMENTAL), current=current, **where
        )
        # Small steps may find what a placement from scratch did not.
        is_better = again.balancedness > first.balancedness + 2e-4
        assert again.moves == 0 or is_better
        assert is_better or np.array_equal(again.expert_of_slot, first.expert_of_slot)


def test_an_incremental_plan_moves_fewer_experts_than_one_from_scratch():
    rng = np.random.default_rng(0)
    loads = skewed(rng, num_layers=6, num_experts=32) * np.exp(
        0.3 * rng.standard_normal((2, 6, 32))
    )
    model = ModelShape(num_layers=6, num_experts=32, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 8, slots_per_rank=8, places_of_rank=(6 * 5,) * 8)
    where = {"model": model, "topology": topology}
    first = plan_in_places(loads[0], Wishes(slots=POOLED), current=None, **where)
    where["current"] = laid_out(first, num_experts=32)
    few = Wishes(slots=POOLED, algorithm=Algorithm.INCREMENTAL, target_balancedness=0.95)
    some = plan_in_places(loads[1], few, **where)
    anew = plan_in_places(loads[1], replace(few, algorithm=Algorithm.GLOBAL), **where)
    assert some.balancedness >= 0.95
    assert 0 < some.moves < anew.moves / 2


def two_services():
    """A pool in use by one kind of traffic, and the loads of that kind and of another."""
    rng = np.random.default_rng(5)
    model = ModelShape(num_layers=6, num_experts=32, num_groups=1, expert_bytes=1)
    topology = Topology(
        node_of_rank=("a", "a", "b", "b"), slots_per_rank=11, places_of_rank=(60,) * 4
    )
    kinds = [skewed(rng, num_layers=6, num_experts=32) for _ in range(2)]
    kinds = [load / load.sum(axis=1, keepdims=True) for load in kinds]
    made = plan_in_places(
        kinds[0], Wishes(slots=POOLED), model=model, topology=topology, current=None
    )
    return kinds, {"model": model, "topology": topology, "current": laid_out(made, num_experts=32)}


def test_no_move_is_made_that_gains_less_than_it_costs():
    (_, load), pool = two_services()
    wishes = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED)
    made = [
        plan_in_places(load, replace(wishes, least_gain_per_move=price), **pool)
        for price in (0.0, 0.002, 1.0)
    ]
    assert [one.moves == 0 for one in made] == [False, False, True]
    before = balancedness(layout_loads(pool["current"], load))
    net = [one.balancedness - 0.002 * one.moves for one in made]
    assert max(net) == net[1] > before


def test_one_layout_serves_several_kinds_of_traffic():
    kinds, pool = two_services()
    wishes = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED)
    weights = np.array([0.5, 0.5])

    def reached(made):
        layout = laid_out(made, num_experts=32)
        return [balancedness(layout_loads(layout, load)) for load in kinds]

    of_both = plan_in_places(np.stack(kinds), replace(wishes, weights=weights), **pool)
    of_mean = plan_in_places(sum(kinds) / 2, wishes, **pool)
    assert of_both.balancedness == pytest.approx(np.mean(reached(of_both)))
    assert np.mean(reached(of_both)) > np.mean(reached(of_mean))


def test_a_pooled_layout_serves_several_kinds_of_traffic_as_well_as_one_per_layer():
    rng, num_ranks, num_layers = np.random.default_rng(5), 8, 6
    model = ModelShape(num_layers=num_layers, num_experts=32, num_groups=1, expert_bytes=1)
    topology = Topology(
        node_of_rank=("node",) * num_ranks,
        slots_per_rank=6,
        places_of_rank=(5 * num_layers,) * num_ranks,
    )
    pool = {"model": model, "topology": topology}
    kinds = np.exp(0.7 * rng.standard_normal((2, num_layers, 32)))
    per_layer = Wishes(algorithm=Algorithm.INCREMENTAL)
    of_mean = plan_in_places(kinds.mean(axis=0), per_layer, current=None, **pool)
    pool["current"] = laid_out(of_mean, num_experts=32)
    of_both = replace(per_layer, weights=np.array([0.5, 0.5]))
    one, other = (
        plan_in_places(kinds, replace(of_both, slots=slots), **pool)
        for slots in (PER_LAYER, POOLED)
    )
    held = [balancedness(layout_loads(pool["current"], load)) for load in kinds]
    assert one.balancedness > np.mean(held) + 0.05
    assert other.balancedness >= one.balancedness - 0.003


def test_a_lost_rank_s_experts_go_to_the_places_of_the_others():
    rng = np.random.default_rng(0)
    load = skewed(rng, num_layers=6, num_experts=32)
    model = ModelShape(num_layers=6, num_experts=32, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 8, slots_per_rank=8, places_of_rank=(6 * 5,) * 8)
    first = plan_in_places(load, Wishes(slots=POOLED), model=model, topology=topology, current=None)
    made = plan_in_places(
        load,
        Wishes(slots=POOLED),
        model=model,
        topology=topology,
        current=laid_out(first, num_experts=32),
        exclude_ranks=frozenset({3}),
    )
    layout = laid_out(made, num_experts=32)
    assert layout.num_ranks == 7
    assert max(layout.used_places) <= 30


def test_too_few_places_are_an_error_that_says_how_many_are_needed():
    model = ModelShape(num_layers=4, num_experts=8, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a", "a"), slots_per_rank=6, places_of_rank=(15, 15))
    with pytest.raises(InvalidLayoutError, match="at least 16 places"):
        plan_in_places(
            np.ones((4, 8)), Wishes(slots=POOLED), model=model, topology=topology, current=None
        )


def test_ranks_whose_slots_differ_use_equally_many_in_each_layer():
    model = ModelShape(num_layers=3, num_experts=8, num_groups=1, expert_bytes=1)
    topology = Topology(
        node_of_rank=("a",) * 3, slots_per_rank=5, slots_of_rank=(4, 3, 5), places_of_rank=(9, 9, 9)
    )
    load = skewed(np.random.default_rng(0), num_layers=3, num_experts=8)
    made, other = (
        plan_in_places(load, Wishes(slots=slots), model=model, topology=topology, current=None)
        for slots in (POOLED, PER_LAYER)
    )
    assert np.array_equal(made.expert_of_slot, other.expert_of_slot)
    assert ((made.expert_of_slot >= 0).sum(axis=1) == 9).all()


def test_a_bound_of_places_is_that_of_slots_where_layers_are_alike():
    rng = np.random.default_rng(0)
    row = np.exp(1.5 * rng.standard_normal(16))
    load = np.tile(row, (4, 1))
    few, many = (
        upper_bound_of_places(load, num_places=places, num_slots=24, num_ranks=8)
        for places in (4 * 16, 4 * 24)
    )
    assert few < many <= 1.0


def test_topologies_say_how_many_slots_of_each_layer_are_in_use_per_layer():
    topology = Topology(node_of_rank=("a", "a"), slots_per_rank=6, places_of_rank=(15, 17))
    assert topology.slots_of_layer(4) == (3, 4)
    assert topology.slots_of_layer(2) == (6, 6)
    assert replace(topology, places_of_rank=()).slots_of_layer(4) == (6, 6)
    with pytest.raises(ValueError, match="places_of_rank"):
        replace(topology, places_of_rank=(1,))


def test_pooled_layers_are_improved_within_a_move_budget():
    """Those that lose most come first; without a budget, the same plan moves more."""
    rng = np.random.default_rng(3)
    model = ModelShape(num_layers=4, num_experts=16, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 4, slots_per_rank=7, places_of_rank=(20,) * 4)
    first, then = (skewed(rng, num_layers=4, num_experts=16) for _ in range(2))
    wishes = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED)
    made = plan_in_places(first, wishes, model=model, topology=topology, current=None)
    current = laid_out(made, num_experts=16)

    def planned(max_moves):
        asked = replace(wishes, max_moves=max_moves)
        return plan_in_places(then, asked, model=model, topology=topology, current=current)

    free, few, none = planned(None), planned(6), planned(0)
    assert 0 < few.moves <= 6 < free.moves
    assert none.moves == 0
    assert none.balancedness < few.balancedness < free.balancedness


def test_a_pooled_placement_that_fits_the_budget_is_found_behind_one_that_does_not():
    """Placements are tried by the layers that they place again: not each moves more than before."""
    rng = np.random.default_rng(101)
    model = ModelShape(num_layers=3, num_experts=8, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 4, slots_per_rank=4, places_of_rank=(8,) * 4)
    first, then = (rng.dirichlet(np.full(8, 0.4), size=3) * 1e4 for _ in range(2))
    wishes = Wishes(algorithm=Algorithm.INCREMENTAL, slots=POOLED)
    made = plan_in_places(first, wishes, model=model, topology=topology, current=None)
    current = laid_out(made, num_experts=8)

    def planned(max_moves):
        asked = replace(wishes, max_moves=max_moves)
        return plan_in_places(then, asked, model=model, topology=topology, current=current)

    curve = planned(None).curve
    for (fewer, less), (more, most) in pairwise(curve):
        assert fewer < more
        assert less < most
    moves, balancedness = curve[-1]
    assert planned(moves).balancedness == pytest.approx(balancedness)


def test_the_bound_of_a_pooled_plan_for_several_kinds_is_the_mean_of_theirs():
    """0.42 and 1 for three experts on three ranks; that of their mean load is 0.59."""
    model = ModelShape(num_layers=1, num_experts=3, num_groups=1, expert_bytes=1)
    topology = Topology(node_of_rank=("a",) * 3, slots_per_rank=2, places_of_rank=(1,) * 3)
    load = np.array([[[8.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]]])
    wishes = Wishes(slots=POOLED, weights=np.array([0.5, 0.5]))
    made = plan_in_places(load, wishes, model=model, topology=topology, current=None)
    assert made.balancedness == pytest.approx(17 / 24)
    assert made.bound >= made.balancedness - 1e-9
