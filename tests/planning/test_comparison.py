"""Two layouts compared on a load: the numbers are those of `layout_loads` and `balancedness`."""

import numpy as np
import pytest

from equipoise.planning.balance import balancedness, balancedness_per_layer, compare, layout_loads
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.shares import whole_shares


@pytest.mark.parametrize("slots_per_rank", [1, 5, 40])
def test_a_comparison_has_the_balancedness_of_both_layouts(slots_per_rank):
    random = np.random.default_rng(slots_per_rank)
    current, target = layouts(random, slots_per_rank=slots_per_rank)
    loads = random.gamma(0.7, size=(2, 3, current.num_experts))
    loads[:, 1] = 0.0
    for load, found in zip(loads, compare(current, target, *loads), strict=True):
        before, after = (layout_loads(layout, load) for layout in (current, target))
        assert found.before == pytest.approx(balancedness(before), rel=1e-12)
        assert found.after == pytest.approx(balancedness(after), rel=1e-12)
        gain = balancedness_per_layer(after) - balancedness_per_layer(before)
        np.testing.assert_allclose(found.gain_of_layer, gain, atol=1e-12)


def test_shares_count():
    random = np.random.default_rng(0)
    current, other = layouts(random, slots_per_rank=5)
    parts = random.random(other.expert_of_slot.shape)
    for layer, experts in enumerate(other.expert_of_slot):
        parts[layer] /= np.bincount(experts, weights=parts[layer])[experts]
    shares = whole_shares(parts, other.expert_of_slot, num_experts=other.num_experts)
    target = other.with_placement(other.expert_of_slot, generation=3, share_of_slot=shares)
    load = random.gamma(0.7, size=(3, current.num_experts))
    (found,) = compare(current, target, load)
    assert found.after == balancedness(layout_loads(target, load))
    assert found.after != compare(current, other, load)[0].after


def layouts(random, *, slots_per_rank):
    """Two layouts with the experts in order and permuted."""
    num_experts = 4 * slots_per_rank - 2 if slots_per_rank > 1 else 4
    current = contiguous_layout(
        num_layers=3, num_experts=num_experts, num_ranks=4, slots_per_rank=slots_per_rank
    )
    renamed = np.array([random.permutation(num_experts) for _ in range(3)], dtype=np.int32)
    table = np.take_along_axis(renamed, current.expert_of_slot, axis=1)
    return current, current.with_placement(table, generation=2)
