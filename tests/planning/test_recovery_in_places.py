"""The first layout of an epoch whose ranks have places that their layers share."""

import numpy as np
import pytest

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, contiguous_layout, count_moves
from equipoise.planning.places import Wishes, plan_in_places
from equipoise.planning.policy import SlotUse
from equipoise.planning.recovery import recover, recovery_moves
from equipoise.planning.topology import ModelShape, Topology

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, NUM_PLACES = 5, 16, 9, 28
MODEL = ModelShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_groups=1, expert_bytes=1)


def topology_of(num_ranks):
    return Topology(
        node_of_rank=("a",) * num_ranks,
        slots_per_rank=NUM_SLOTS,
        places_of_rank=(NUM_PLACES,) * num_ranks,
    )


def pooled_layout(load, num_ranks):
    made = plan_in_places(
        load,
        Wishes(slots=SlotUse.POOLED),
        model=MODEL,
        topology=topology_of(num_ranks),
        current=None,
    )
    return Layout(
        generation=1,
        num_experts=NUM_EXPERTS,
        num_ranks=num_ranks,
        expert_of_slot=made.expert_of_slot,
    )


def parts_of(layout):
    return [layout.expert_of_slot[:, layout.own_slots(rank)] for rank in range(layout.num_ranks)]


def load_of(seed):
    rng = np.random.default_rng(seed)
    return rng.lognormal(sigma=1.0, size=(NUM_LAYERS, NUM_EXPERTS))


def recovered(held, load, *, committed=None):
    return recover(
        held,
        load=load,
        model=MODEL,
        topology=topology_of(len(held)),
        committed=committed,
        generation=7,
    )


def test_a_new_pool_starts_with_equally_many_slots_in_every_layer():
    layout = recovered([None] * 4, np.zeros((NUM_LAYERS, NUM_EXPERTS)))
    used = (layout.expert_of_slot >= 0).reshape(NUM_LAYERS, 4, NUM_SLOTS).sum(axis=2)
    assert (used == NUM_PLACES // NUM_LAYERS).all()


def test_a_new_pool_with_hardly_more_places_than_experts_starts_all_the_same():
    """3 ranks of 28 places have 5 slots per layer each if all layers are alike: 1 too few."""
    layout = recovered([None] * 3, np.zeros((NUM_LAYERS, NUM_EXPERTS)))
    assert max(layout.used_places) <= NUM_PLACES
    load = load_of(0)
    where = {"model": MODEL, "topology": topology_of(3), "current": layout}
    with pytest.raises(InvalidLayoutError, match=r"are 15 slots, too few for 16 .* or pool them"):
        plan_in_places(load, Wishes(slots=SlotUse.PER_LAYER), **where)
    assert plan_in_places(load, Wishes(slots=SlotUse.POOLED), **where).moves


def test_ranks_that_hold_the_committed_layout_keep_it():
    load = load_of(0)
    layout = pooled_layout(load, 4)
    assert recovered(parts_of(layout), load, committed=layout) is layout


@pytest.mark.parametrize("seed", range(20))
def test_the_experts_of_a_lost_rank_go_to_the_others_and_no_other_expert_moves(seed):
    load = load_of(seed)
    before = pooled_layout(load, 4)
    lost = seed % 4
    held = [part for rank, part in enumerate(parts_of(before)) if rank != lost]
    after = recovered(held, load, committed=before)
    assert after.num_ranks == 3
    assert max(after.used_places) <= NUM_PLACES
    stood = np.concatenate(held, axis=1)
    missing = sum(NUM_EXPERTS - len(np.setdiff1d(np.unique(row), [-1])) for row in stood)
    assert count_moves(stood, after.expert_of_slot) == missing
    checksums = np.zeros((NUM_LAYERS, NUM_EXPERTS, 16), dtype=np.uint8)
    moves = recovery_moves(held, target=after, topology=topology_of(3), checksums=checksums)
    assert sum(map(len, moves.values())) == missing


@pytest.mark.parametrize("seed", range(20))
def test_experts_are_placed_anew_where_the_places_left_are_in_the_wrong_ranks(seed):
    """Exactly as many places as experts: a rank with an empty slot of a layer may be full."""
    tables = [
        [[0, 1, -1], [0, 1, -1], [0, 1, -1]],
        [[6, 3, -1], [7, 3, -1], [2, 5, -1]],
        [[2, 7, -1], [6, 4, -1], [6, 7, -1]],
    ]
    where = {"num_layers": 3, "num_experts": 8}
    after = recover(
        [np.array(table, dtype=np.int32) for table in tables],
        load=np.random.default_rng(seed).random((3, 8)) * (seed > 0),
        model=ModelShape(num_groups=1, expert_bytes=1, **where),
        topology=Topology(node_of_rank=("a",) * 3, slots_per_rank=3, places_of_rank=(8,) * 3),
        committed=contiguous_layout(num_ranks=4, slots_per_rank=3, **where),
        generation=7,
    )
    assert after.used_places == (8, 8, 8)


def test_a_rank_that_holds_nothing_joins_with_its_part_of_the_committed_layout():
    load = load_of(0)
    before = pooled_layout(load, 4)
    held = parts_of(before)
    held[2] = None
    assert recovered(held, load, committed=before) is before


def test_too_few_ranks_for_all_experts_are_an_error():
    load = load_of(0)
    before = pooled_layout(load, 4)
    with pytest.raises(InvalidLayoutError, match="2 ranks with 56 places cannot hold 16 experts"):
        recovered(parts_of(before)[:2], load, committed=before)


def test_ranks_of_unequal_places_start_with_what_each_has_room_for():
    places = (40, 15, 20, 20)
    topology = Topology(node_of_rank=("a",) * 4, slots_per_rank=NUM_SLOTS, places_of_rank=places)
    nothing = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    layout = recover(
        [None] * 4, load=nothing, model=MODEL, topology=topology, committed=None, generation=1
    )
    assert (np.array(layout.used_places) <= places).all()


@pytest.mark.parametrize("of_first", [16, 24])
def test_a_rank_that_comes_back_with_fewer_places_drops_what_it_held(of_first):
    load = load_of(0)
    committed = pooled_layout(load, 4)
    assert min(committed.used_places) > 24
    places = (of_first, NUM_PLACES, NUM_PLACES, NUM_PLACES)
    topology = Topology(node_of_rank=("a",) * 4, slots_per_rank=NUM_SLOTS, places_of_rank=places)
    held = [None, *parts_of(committed)[1:]]
    layout = recover(
        held, load=load, model=MODEL, topology=topology, committed=committed, generation=7
    )
    assert (np.array(layout.used_places) <= places).all()
    assert layout.generation == 7
