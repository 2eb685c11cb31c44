"""Whether a pool has more redundant experts than its load needs, or fewer."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.policy import Algorithm, Policy, SlotUse
from equipoise.planning.redundancy import (
    MIN_SAMPLES,
    PERSISTENCE,
    RedundancyHistory,
    RedundancyKind,
    judge_redundancy,
)
from equipoise.planning.topology import ModelShape, Topology

MODEL = ModelShape(num_layers=12, num_experts=64, num_groups=4, expert_bytes=1000)
EVEN = np.ones((12, 64))


def hot(times=16.0, *, num_hot=4):
    """Some experts have many times the load of the others."""
    load = EVEN.copy()
    load[:, ::16][:, :num_hot] = times
    return load


def judged(load, slots, *, num_ranks=16, places=0, samples=None, **policy):
    topology = Topology(
        node_of_rank=tuple(f"node-{rank // 4}" for rank in range(num_ranks)),
        slots_per_rank=slots,
        places_of_rank=(places,) * num_ranks if places else (),
    )
    values = replace(Policy(), slots=SlotUse.POOLED if places else SlotUse.PER_LAYER, **policy)
    return judge_redundancy(load, samples=samples, model=MODEL, topology=topology, policy=values)


def test_redundant_slots_that_even_loads_do_not_need_are_wasted():
    found = judged(EVEN, 6)
    assert found.kind is RedundancyKind.WASTED
    assert (found.present, found.advised) == (32, 0)
    assert found.balancedness_advised == pytest.approx(1.0)
    assert found.bytes_per_rank == 32 * 12 * 1000 // 16
    assert found.reason == (
        "0 redundant slots per layer would do: all 32 add 0.0000 of balancedness to 1.0000 on the "
        "average load"
    )


def test_too_few_redundant_slots_for_hot_experts_are_short():
    found = judged(hot(), 4)
    assert found.kind is RedundancyKind.SHORT
    assert (found.present, found.advised) == (0, 16)
    assert found.balancedness_advised > found.balancedness + 0.03
    assert "16 redundant slots per layer instead of 0 would raise" in found.reason
    assert f"from {found.balancedness:.3f} to {found.balancedness_advised:.3f}" in found.reason


def test_a_number_that_is_about_right_is_not_mentioned():
    assert judged(EVEN, 4) is None
    assert judged(hot(8.0), 5) is None


def test_layers_that_share_places_are_judged_by_what_they_have_together():
    wasted = judged(EVEN * np.linspace(1, 1.01, 64), 6, places=12 * 5)
    assert wasted.kind is RedundancyKind.WASTED
    assert (wasted.present, wasted.advised) == (16, 2)
    short = judged(hot(24.0), 7, places=12 * 4 + 2)
    assert short.kind is RedundancyKind.SHORT
    assert (short.present, short.advised) == (2, 6)


def test_groups_that_stay_on_nodes_are_judged_on_nodes():
    """All hot experts are of one group, and slots on its node alone cannot relieve it."""
    load = EVEN.copy()
    load[:, :16] = 4.0
    by_node, anywhere = (
        judged(load, 5, algorithm=algorithm)
        for algorithm in (Algorithm.HIERARCHICAL, Algorithm.GLOBAL)
    )
    assert by_node.balancedness == by_node.balancedness_advised == pytest.approx(7 / 16)
    assert anywhere.balancedness == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (np.zeros((12, 64)), {}),
        (EVEN, {"samples": 64.0 * MIN_SAMPLES - 1}),
    ],
)
def test_without_enough_traffic_nothing_is_said(load, changes):
    assert judged(load, 6, **changes) is None


def test_ranks_of_unequal_places_are_not_judged():
    topology = Topology(
        node_of_rank=("a",) * 16, slots_per_rank=6, places_of_rank=(72, *(60,) * 15)
    )
    policy = replace(Policy(), slots=SlotUse.POOLED)
    found = judge_redundancy(EVEN, samples=None, model=MODEL, topology=topology, policy=policy)
    assert found is None


def history(*found):
    one, shown = RedundancyHistory(), []
    for each in found:
        one = one.after(each)
        shown.append(one.shown)
    return shown


def test_only_what_several_plans_in_a_row_find_is_shown_and_stays():
    wasted, other = judged(EVEN, 6), judged(EVEN, 5)
    other = replace(other, present=wasted.present)
    assert PERSISTENCE == 3
    assert history(wasted, wasted, None, wasted, wasted, wasted) == [None] * 5 + [wasted]
    # It neither goes nor changes by a plan or two that find nothing, or another number.
    few = replace(wasted, advised=16)
    assert history(wasted, wasted, wasted, None, few, None, few)[-4:] == [wasted] * 4
    assert history(wasted, wasted, wasted, few, few, few)[-3:] == [wasted, wasted, few]
    assert history(wasted, wasted, wasted, None, None, None)[-3:] == [wasted, wasted, None]


def test_a_pool_with_another_number_of_slots_begins_anew():
    wasted = judged(EVEN, 6)
    assert history(wasted, wasted, wasted, judged(EVEN, 5))[-2:] == [wasted, None]
