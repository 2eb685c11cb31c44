"""The planner's core against recorded outputs of the published program."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import count_replicas
from tests.support.eplb import eplb
from tests.support.planner_peers import published

CASES = json.loads((Path(__file__).parent / "data" / "eplb_golden.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_plans_are_those_of_the_published_program(case):
    load = np.array(case["weight"], dtype=np.float64)
    table = eplb(
        load,
        num_slots=case["num_replicas"],
        num_groups=case["num_groups"],
        num_nodes=case["num_nodes"],
        num_ranks=case["num_gpus"],
        hierarchical=case["num_groups"] % case["num_nodes"] == 0,
    )
    np.testing.assert_array_equal(table, case["physical_to_logical"])
    replicas = count_replicas(table, num_experts=load.shape[1])
    np.testing.assert_array_equal(replicas, case["replica_count"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_baseline_of_benchmarks_equals_the_published_program(case):
    hierarchical = case["num_groups"] % case["num_nodes"] == 0
    table = published(
        np.array(case["weight"], dtype=np.float64),
        num_slots=case["num_replicas"],
        num_groups=case["num_groups"] if hierarchical else 1,
        num_nodes=case["num_nodes"] if hierarchical else 1,
        num_ranks=case["num_gpus"],
    )
    np.testing.assert_array_equal(table, case["physical_to_logical"])


def test_all_recorded_cases_are_here():
    assert len(CASES) == 35


@given(
    num_nodes=st.integers(1, 3),
    ranks_per_node=st.integers(1, 4),
    groups_per_node=st.integers(1, 3),
    group_size=st.integers(1, 4),
    spare=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_hierarchical_placement_keeps_every_group_within_one_node(
    num_nodes, ranks_per_node, groups_per_node, group_size, spare, seed
):
    experts_per_node = groups_per_node * group_size
    slots_per_rank = -(-experts_per_node // ranks_per_node) + spare
    num_groups = groups_per_node * num_nodes
    load = np.random.default_rng(seed).lognormal(size=(2, num_groups * group_size))
    table = eplb(
        load,
        num_slots=num_nodes * ranks_per_node * slots_per_rank,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_nodes * ranks_per_node,
        hierarchical=True,
    )
    assert (count_replicas(table, num_experts=load.shape[1]) >= 1).all()
    for layer in table:
        groups_of_node = [set(slots // group_size) for slots in layer.reshape(num_nodes, -1)]
        assert sum(len(groups) for groups in groups_of_node) == num_groups


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_renaming_experts_only_renames_the_plan(seed):
    rng = np.random.default_rng(seed)
    load = rng.lognormal(size=(3, 16))
    new_name = rng.permutation(16)
    renamed_load = np.empty_like(load)
    renamed_load[:, new_name] = load
    sizes = {"num_slots": 24, "num_groups": 1, "num_nodes": 1, "num_ranks": 8}
    table = eplb(load, hierarchical=False, **sizes)
    renamed = eplb(renamed_load, hierarchical=False, **sizes)
    np.testing.assert_array_equal(_by_rank(new_name[table], 8), _by_rank(renamed, 8))


def _by_rank(table, num_ranks):
    """Each rank's experts, whatever the order of its slots."""
    return np.sort(table.reshape(len(table), num_ranks, -1), axis=2)
