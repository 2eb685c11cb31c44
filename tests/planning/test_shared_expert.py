import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.shared_expert import (
    plan_with_shared_ranks,
    shape_with_shared_expert,
    with_shared_expert,
)
from equipoise.planning.topology import ModelShape, Topology, expert_name, expert_text

ROUTED = ModelShape(num_layers=2, num_experts=256, num_groups=8, expert_bytes=1)
MODEL = shape_with_shared_expert(ROUTED)


def ranks(number, *, slots_per_rank=1):
    return Topology(
        node_of_rank=tuple(f"n{rank // 8}" for rank in range(number)),
        slots_per_rank=slots_per_rank,
    )


def skewed_load(seed, sigma=0.8):
    return np.random.default_rng(seed).lognormal(sigma=sigma, size=(2, 256))


def layout_of(made, num_ranks):
    return Layout(
        generation=1, num_experts=257, num_ranks=num_ranks, expert_of_slot=made.expert_of_slot
    )


def test_every_token_loads_the_shared_expert_once():
    load = with_shared_expert(np.array([[6.0, 2.0, 8.0]]), top_k=4)
    np.testing.assert_array_equal(load, [[6.0, 2.0, 8.0, 4.0]])
    windows = with_shared_expert(np.ones((5, 2, 256)), top_k=8)
    assert windows.shape == (5, 2, 257)
    assert (windows[..., -1] == 32.0).all()


def test_even_traffic_gives_the_published_unit_of_32_shared_and_32_redundant_replicas():
    load = with_shared_expert(np.ones((2, 256)), top_k=8)
    made = plan(load, model=MODEL, topology=ranks(320))
    replicas = layout_of(made, 320).replica_counts()
    assert (replicas[:, 256] == 32).all()
    assert (replicas[:, :256].sum(axis=1) == 256 + 32).all()


@given(st.integers(0, 10_000), st.floats(0.0, 2.0), st.integers(257, 400))
@settings(max_examples=40, deadline=None)
@example(2, 2.0, 258)  # A hair above what a pool that holds nothing would begin with.
def test_with_one_slot_a_rank_no_placement_is_more_balanced(seed, sigma, num_ranks):
    load = with_shared_expert(skewed_load(seed, sigma), top_k=8)
    made = plan(load, model=MODEL, topology=ranks(num_ranks))
    layout_of(made, num_ranks)
    assert made.balancedness == pytest.approx(made.bound, rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 64), st.sets(st.integers(0, 319), max_size=9))
@settings(max_examples=40, deadline=None)
def test_ranks_for_the_shared_expert_hold_it_alone_and_the_others_every_routed_one(
    seed, num_shared_ranks, lost
):
    load = with_shared_expert(skewed_load(seed), top_k=8)
    chosen = {"model": MODEL, "topology": ranks(320), "exclude_ranks": frozenset(lost)}
    if 320 - len(lost) - num_shared_ranks < 256:
        with pytest.raises(InvalidLayoutError, match="cannot hold 256 experts"):
            plan_with_shared_ranks(load, num_shared_ranks=num_shared_ranks, **chosen)
        return
    made = plan_with_shared_ranks(load, num_shared_ranks=num_shared_ranks, **chosen)
    assert len(made.ranks) == 320 - len(lost)
    layout_of(made, len(made.ranks))
    is_shared = made.expert_of_slot == 256
    assert is_shared[:, -num_shared_ranks:].all()
    assert not is_shared[:, :-num_shared_ranks].any()
    assert made.balancedness <= plan(load, **chosen).balancedness + 1e-9


def test_planning_again_beside_ranks_for_the_shared_expert_moves_nothing():
    load = with_shared_expert(skewed_load(1), top_k=8)
    chosen = {"model": MODEL, "topology": ranks(320), "num_shared_ranks": 32}
    current = layout_of(plan_with_shared_ranks(load, **chosen), 320)
    again = plan_with_shared_ranks(load, current=current, **chosen)
    assert again.moves == 0
    np.testing.assert_array_equal(again.expert_of_slot, current.expert_of_slot)


def test_slots_that_come_to_hold_the_shared_expert_count_as_moves():
    load = with_shared_expert(skewed_load(2), top_k=8)
    freely = layout_of(plan(load, model=MODEL, topology=ranks(320)), 320)
    made = plan_with_shared_ranks(
        load,
        model=MODEL,
        topology=ranks(320),
        num_shared_ranks=32,
        current=freely,
        algorithm=Algorithm.INCREMENTAL,
    )
    assert made.moves == np.count_nonzero(made.expert_of_slot != freely.expert_of_slot)
    assert made.moves >= np.count_nonzero(freely.expert_of_slot[:, -32:] != 256)


def test_ranks_for_the_shared_expert_have_one_slot():
    load = with_shared_expert(skewed_load(3), top_k=8)
    with pytest.raises(InvalidLayoutError, match="1 slot per rank, not 5"):
        plan_with_shared_ranks(
            load, model=MODEL, topology=ranks(64, slots_per_rank=5), num_shared_ranks=8
        )


def test_with_several_slots_per_rank_no_rank_has_the_shared_expert_twice():
    load = with_shared_expert(skewed_load(4), top_k=8)
    made = plan(load, model=MODEL, topology=ranks(32, slots_per_rank=9))
    layout_of(made, 32)
    assert made.balancedness > 0.99


def test_the_last_expert_is_the_shared_one_and_is_named():
    routed = ModelShape(num_layers=1, num_experts=256, num_groups=8, expert_bytes=1)
    assert routed.shared_expert is None
    shared = shape_with_shared_expert(routed).shared_expert
    assert shared == 256
    assert [expert_name(one, shared=shared) for one in (255, 256)] == ["255", "shared"]
    assert [expert_text(one, shared=shared) for one in (255, 256)] == [
        "expert 255",
        "the shared expert",
    ]
    assert expert_name(256, shared=None) == "256"


def test_a_shared_expert_is_in_no_group():
    with pytest.raises(ValueError, match="needs one group, which the shared expert is not in"):
        ModelShape(
            num_layers=1, num_experts=4, num_groups=2, expert_bytes=1, has_shared_expert=True
        )
