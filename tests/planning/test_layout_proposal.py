"""The waves to a layout that no planner chose."""

import numpy as np
import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import fits, propose_layout
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import ModelShape

MODEL = ModelShape(num_layers=3, num_experts=6, num_groups=2, expert_bytes=1000)


def layout_of(generation, *, shift=0, num_ranks=2):
    first = contiguous_layout(
        num_layers=3, num_experts=6, num_ranks=num_ranks, slots_per_rank=4, generation=generation
    )
    return first.with_placement((first.expert_of_slot + shift) % 6, generation=generation)


def given(current, target, *, window=None, max_wave_bytes=2**20):
    return propose_layout(
        current,
        target,
        window=window,
        model=MODEL,
        policy=Policy(max_wave_bytes=max_wave_bytes),
        first_generation=9,
    )


def test_the_last_wave_has_the_targets_placement_under_a_new_generation():
    target = layout_of(3, shift=1)
    found = given(layout_of(7), target)
    assert [wave.generation for wave in found.waves] == [9]
    assert found.waves[-1].applied_to(layout_of(7)).same_placement(target)
    assert found.moves == 24
    assert found.bytes == 24_000


def test_waves_bound_what_a_rank_stages():
    found = given(layout_of(7), layout_of(3, shift=1), max_wave_bytes=4000)
    assert [wave.generation for wave in found.waves] == [9, 10, 11]


def test_an_equal_target_needs_no_moves():
    found = given(layout_of(7), layout_of(3))
    assert not found.waves
    assert found.moves == 0


def test_the_reported_balance_is_that_of_the_window():
    skewed = np.tile([6.0, 1.0, 1.0, 1.0, 1.0, 1.0], (3, 1))
    found = given(layout_of(7), layout_of(3, shift=1), window=skewed)
    assert found.balancedness_current != found.balancedness_proposed
    assert 0 < found.balancedness_proposed <= 1


def test_an_equal_target_with_uneven_shares_needs_no_moves():
    current = layout_of(7)
    shares = np.array(current.shares())
    slots = np.flatnonzero(current.expert_of_slot[0] == 0)
    shares[0, slots] = [1, WHOLE - 1]
    current = current.with_placement(current.expert_of_slot, generation=7, share_of_slot=shares)
    found = given(current, current)
    assert not found.waves
    assert found.moves == 0


@pytest.mark.parametrize("window", [None, np.zeros((3, 6)), np.ones((2, 6))])
def test_without_a_load_no_balance_is_reported(window):
    found = given(layout_of(7), layout_of(3, shift=1), window=window)
    assert found.balancedness_current == found.balancedness_proposed == 0


@pytest.mark.parametrize(("num_ranks", "same"), [(2, True), (3, False)])
def test_layouts_of_other_ranks_do_not_fit(num_ranks, same):
    assert fits(layout_of(1), layout_of(2, num_ranks=num_ranks)) is same
