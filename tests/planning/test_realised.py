import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.planning.realised import MIN_ASSIGNMENTS, realised_shares
from equipoise.planning.shares import WHOLE

QUARTER = WHOLE // 4


def layout_of(generation=1, shares=(QUARTER, WHOLE, WHOLE, 3 * QUARTER)):
    return Layout(
        generation=generation,
        num_experts=3,
        num_ranks=2,
        expert_of_slot=np.array([[0, 1, 2, 0]], dtype=np.int32),
        share_of_slot=None if shares is None else np.array([shares], dtype=np.int32),
    )


def test_realised_shares_are_compared_with_planned_ones():
    found = realised_shares(np.array([[300.0, 50.0, 9.0, 700.0]]), layout_of(generation=4))
    assert (found.generation, found.layer, found.expert, found.assignments) == (4, 0, 0, 1000.0)
    assert found.slot in {0, 3}
    assert abs(found.realised - found.planned) == pytest.approx(0.05)
    assert found.misplaced == pytest.approx(0.05)
    assert found.uneven_layers == 1


def test_even_splits_are_measured_too():
    found = realised_shares(np.array([[450.0, 0.0, 0.0, 550.0]]), layout_of(shares=None))
    assert (found.planned, found.uneven_layers) == (0.5, 0)
    assert found.misplaced == pytest.approx(0.05)


def test_experts_with_too_few_assignments_are_ignored():
    few = np.array([[MIN_ASSIGNMENTS - 1, 1e6, 1e6, 0.0]])
    assert realised_shares(few, layout_of()) is None
