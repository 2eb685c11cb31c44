import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.balance import balancedness, balancedness_per_layer, rank_loads
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.placing.stay import align
from equipoise.planning.placing.twins import repair_twins
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb


def pool(*, num_layers=3, num_experts=16, num_groups=4, num_nodes=2, ranks_per_node=2, slots=5):
    model = ModelShape(
        num_layers=num_layers, num_experts=num_experts, num_groups=num_groups, expert_bytes=100
    )
    topology = Topology(
        node_of_rank=tuple(
            f"node-{rank // ranks_per_node}" for rank in range(num_nodes * ranks_per_node)
        ),
        slots_per_rank=slots,
    )
    return model, topology


def start_of(model, topology):
    return contiguous_layout(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        slots_per_rank=topology.slots_per_rank,
    )


def as_layout(table, model, topology, generation=2):
    """Construction is the check: a layout that is not valid cannot be built."""
    return Layout(
        generation=generation,
        num_experts=model.num_experts,
        num_ranks=topology.num_ranks,
        expert_of_slot=table,
    )


@st.composite
def pools(draw):
    num_groups = draw(st.integers(1, 4))
    num_experts = num_groups * draw(st.integers(1, 6))
    num_nodes, ranks_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    least = -(-num_experts // (num_nodes * ranks_per_node))
    return pool(
        num_layers=draw(st.integers(1, 3)),
        num_experts=num_experts,
        num_groups=num_groups,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        slots=least + draw(st.integers(0, 4)),
    )


@st.composite
def pools_with_load(draw):
    model, topology = draw(pools())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.pareto(draw(st.floats(0.3, 3.0)), size=(model.num_layers, model.num_experts))
    load[rng.random(model.num_layers) < 0.2] = 0.0
    return model, topology, load


@given(pools_with_load(), st.sampled_from(list(Algorithm)))
@settings(max_examples=200, deadline=None)
def test_every_plan_is_valid_and_never_worse_than_the_current_layout(case, algorithm):
    model, topology, load = case
    start = start_of(model, topology)
    made = plan(load, model=model, topology=topology, current=start, algorithm=algorithm)
    as_layout(made.expert_of_slot, model, topology)
    before, after = (
        balancedness_per_layer(rank_loads(table, load=load, num_ranks=topology.num_ranks))
        for table in (start.expert_of_slot, made.expert_of_slot)
    )
    if not made.returned_layers and algorithm is not Algorithm.AUTO:
        assert (after >= before).all()
    if algorithm is Algorithm.AUTO:
        assert after.mean() >= before.mean()


@given(pools_with_load())
@settings(max_examples=100, deadline=None)
def test_planning_again_for_the_same_load_moves_nothing(case):
    model, topology, load = case
    chosen = {"model": model, "topology": topology, "algorithm": Algorithm.GLOBAL}
    first = plan(load, current=None, **chosen)
    layout = as_layout(first.expert_of_slot, model, topology)
    second = plan(load, current=layout, **chosen)
    np.testing.assert_array_equal(second.expert_of_slot, first.expert_of_slot)


def test_a_layer_without_load_keeps_its_place():
    model, topology = pool(num_layers=2)
    load = np.random.default_rng(1).lognormal(sigma=1.5, size=(2, 16))
    load[1] = 0.0
    chosen = {"model": model, "topology": topology, "algorithm": Algorithm.GLOBAL}
    unusual = plan(np.random.default_rng(2).lognormal(size=(2, 16)), current=None, **chosen)
    current = as_layout(unusual.expert_of_slot, model, topology)
    made = plan(load, current=current, **chosen)
    np.testing.assert_array_equal(made.expert_of_slot[1], current.expert_of_slot[1])
    assert (made.expert_of_slot[0] != current.expert_of_slot[0]).any()


def test_a_skewed_load_is_balanced_by_replicas():
    model, topology = pool(num_layers=4, slots=8)
    load = np.random.default_rng(3).lognormal(sigma=2.0, size=(4, 16))
    trivial = balancedness(
        rank_loads(start_of(model, topology).expert_of_slot, load=load, num_ranks=4)
    )
    made = plan(load, model=model, topology=topology, current=None, algorithm=Algorithm.GLOBAL)
    assert trivial < 0.8
    assert made.balancedness > 0.95


def test_hierarchical_keeps_each_group_within_a_node():
    model, topology = pool()
    load = np.random.default_rng(4).lognormal(sigma=1.5, size=(3, 16))
    made = plan(
        load, model=model, topology=topology, current=None, algorithm=Algorithm.HIERARCHICAL
    )
    assert made.algorithm is Algorithm.HIERARCHICAL
    changed = (made.expert_of_slot != start_of(model, topology).expert_of_slot).any(axis=1)
    assert changed.any()
    for layer in made.expert_of_slot[changed]:
        left, right = (set(slots // 4) for slots in layer.reshape(2, -1))
        assert not left & right


def groups_on_nodes(table):
    """Whether each group of four experts is on one of two nodes only, in every layer."""
    halves = (table // 4).reshape(len(table), 2, -1)
    return all(not set(left) & set(right) for left, right in halves.tolist())


@pytest.mark.parametrize("chosen", [{"algorithm": Algorithm.HIERARCHICAL}, {"locality": 0.0}])
def test_hierarchical_plans_are_hierarchical_from_any_layout_and_in_new_pools(chosen):
    model, topology = pool(slots=5)
    even = np.ones((3, 16))
    even[2] = 0.0
    new = plan(even, model=model, topology=topology, current=None, **chosen)
    assert groups_on_nodes(new.expert_of_slot)
    load = np.random.default_rng(4).lognormal(sigma=1.5, size=(3, 16))
    load[2] = 0.0
    free = plan(load, model=model, topology=topology, algorithm=Algorithm.GLOBAL)
    assert not groups_on_nodes(free.expert_of_slot)
    current = as_layout(free.expert_of_slot, model, topology)
    made = plan(load, model=model, topology=topology, current=current, **chosen)
    assert groups_on_nodes(made.expert_of_slot)
    assert made.moves > 0
    assert f"{made.returned_layers} of them to return expert groups to their nodes" in made.reason
    held = as_layout(made.expert_of_slot, model, topology)
    again = plan(load, model=model, topology=topology, current=held, **chosen)
    assert (again.moves, again.returned_layers) == (0, 0)


def test_auto_takes_the_more_balanced_plan_and_reports_the_other():
    model, topology = pool()
    load = np.random.default_rng(5).lognormal(sigma=1.5, size=(3, 16))
    by = {
        algorithm: plan(load, model=model, topology=topology, current=None, algorithm=algorithm)
        for algorithm in Algorithm
    }
    hierarchical, other = by[Algorithm.HIERARCHICAL], by[Algorithm.GLOBAL]
    assert by[Algorithm.AUTO].balancedness == max(hierarchical.balancedness, other.balancedness)
    assert f"{hierarchical.balancedness:.3f}" in by[Algorithm.AUTO].reason
    assert f"{other.balancedness:.3f}" in by[Algorithm.AUTO].reason


@pytest.mark.parametrize(
    ("nodes", "num_groups", "slots", "obstacle"),
    [
        (("a", "a", "b", "b"), 1, 5, "1 groups do not divide evenly over 2 nodes"),
        (("a", "b", "a", "b"), 4, 5, "equally many consecutive ranks"),
        (("a", "b", "b", "b"), 4, 5, "equally many consecutive ranks"),
        (("a", "a", "b", "b"), 4, 9, "more slots than the 8 experts of a node"),
    ],
)
def test_if_groups_cannot_be_assigned_to_nodes_the_plan_is_global_with_a_reason(
    nodes, num_groups, slots, obstacle
):
    model, _ = pool(num_groups=num_groups)
    topology = Topology(node_of_rank=nodes, slots_per_rank=slots)
    load = np.random.default_rng(6).lognormal(size=(3, 16))
    for algorithm in (Algorithm.AUTO, Algorithm.HIERARCHICAL):
        made = plan(load, model=model, topology=topology, current=None, algorithm=algorithm)
        assert made.algorithm is Algorithm.GLOBAL
        assert obstacle in made.reason


@pytest.mark.parametrize("algorithm", [Algorithm.GLOBAL, Algorithm.HIERARCHICAL])
def test_renaming_experts_within_their_groups_only_renames_the_plan(algorithm):
    model, topology = pool(num_layers=4, slots=6)
    rng = np.random.default_rng(8)
    load = rng.lognormal(size=(4, 16))
    name = np.concatenate([4 * group + rng.permutation(4) for group in range(4)])
    renamed = np.empty_like(load)
    renamed[:, name] = load
    made, other = (
        plan(of, model=model, topology=topology, algorithm=algorithm).expert_of_slot
        for of in (load, renamed)
    )
    np.testing.assert_array_equal(_by_rank(name[made]), _by_rank(other))


def test_plans_are_deterministic():
    model, topology = pool(num_layers=4)
    load = np.random.default_rng(9).lognormal(size=(4, 16))
    first, second = (plan(load, model=model, topology=topology) for _ in range(2))
    np.testing.assert_array_equal(first.expert_of_slot, second.expert_of_slot)
    assert first.reason == second.reason


def test_a_plan_counts_its_moves_and_has_an_upper_bound():
    model, topology = pool(num_layers=4)
    start = start_of(model, topology)
    load = np.random.default_rng(10).lognormal(sigma=1.5, size=(4, 16))
    made = plan(load, model=model, topology=topology, current=start, algorithm=Algorithm.GLOBAL)
    assert made.moves == (made.expert_of_slot != start.expert_of_slot).sum() > 0
    assert made.ranks == (0, 1, 2, 3)
    assert made.balancedness == pytest.approx(made.balancedness_of_layer.mean())
    assert made.balancedness <= made.bound <= 1.0


def test_too_few_slots_are_rejected_with_a_remedy():
    model, topology = pool(slots=3)
    with pytest.raises(InvalidLayoutError, match="give each rank at least 4 slots"):
        plan(
            np.ones((3, 16)),
            model=model,
            topology=topology,
            current=None,
            algorithm=Algorithm.AUTO,
        )


def test_plans_stay_close_to_the_layout_in_use():
    model, topology = pool(num_layers=8, num_experts=32, slots=10)
    chosen = {"model": model, "topology": topology, "algorithm": Algorithm.GLOBAL}
    rng = np.random.default_rng(7)
    load = rng.lognormal(size=(8, 32))
    layout = as_layout(plan(load, current=None, **chosen).expert_of_slot, model, topology)
    nearby = load * rng.lognormal(sigma=0.3, size=load.shape)
    table = plan(nearby, current=layout, **chosen).expert_of_slot
    careless = eplb(
        nearby, num_slots=40, num_groups=1, num_nodes=1, num_ranks=4, hierarchical=False
    )
    changed = (table != layout.expert_of_slot).any(axis=1)
    assert changed.sum() > 4
    unnamed = align(
        repair_twins(careless, load=nearby, num_ranks=4),
        layout.expert_of_slot,
        first_slot=layout.first_slot,
    )
    by_plan, by_careless, by_unnamed = (
        (made != layout.expert_of_slot)[changed].sum() for made in (table, careless, unnamed)
    )
    assert by_plan < by_unnamed < by_careless


def _by_rank(table):
    """Each of four ranks' experts, whatever the order of its slots."""
    return np.sort(table.reshape(len(table), 4, -1), axis=2)
