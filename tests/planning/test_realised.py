import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.planning.load import LoadDelta
from equipoise.planning.realised import LEAST_TOKENS, SlotWindow, realised_shares
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


def delta(rank, *tokens):
    of_slot = np.array([tokens], dtype=np.float64)
    return LoadDelta(
        rank=rank,
        num_experts=3,
        expert_of_slot=np.zeros(of_slot.shape, dtype=np.int32),
        tokens_of_slot=of_slot,
    )


def test_what_slots_served_is_held_against_what_they_should():
    told = realised_shares(np.array([[300.0, 50.0, 9.0, 700.0]]), layout_of(generation=4))
    assert (told.generation, told.layer, told.expert, told.tokens) == (4, 0, 0, 1000.0)
    assert told.slot in {0, 3}
    assert abs(told.realised - told.planned) == pytest.approx(0.05)
    assert told.misplaced == pytest.approx(0.05)
    assert told.uneven_layers == 1


def test_even_splits_are_measured_too():
    told = realised_shares(np.array([[450.0, 0.0, 0.0, 550.0]]), layout_of(shares=None))
    assert (told.planned, told.uneven_layers) == (0.5, 0)
    assert told.misplaced == pytest.approx(0.05)


def test_too_few_tokens_say_nothing():
    few = np.array([[LEAST_TOKENS - 1, 1e6, 1e6, 0.0]])
    assert realised_shares(few, layout_of()) is None


def test_a_window_adds_up_and_brings_ranks_to_a_common_span():
    window, layout = SlotWindow(), layout_of()
    window.add(delta(0, 125, 7), layout)
    window.add(delta(0, 125, 7), layout)
    # Rank 1 has reported for twice as many steps.
    window.add(delta(1, 7, 1500), layout)
    told = window.close(np.array([1.0, 0.5]))
    assert told.tokens == 1000.0
    assert told.misplaced == pytest.approx(0.0)
    assert window.close(np.ones(2)) is None


def test_a_window_with_two_generations_says_nothing_and_the_next_one_does():
    window = SlotWindow()
    window.add(delta(0, 500, 0), layout_of(generation=1))
    window.add(delta(0, 500, 0), layout_of(generation=2))
    assert window.close(np.ones(2)) is None
    window.add(delta(0, 250, 0), layout_of(generation=2))
    window.add(delta(1, 0, 750), layout_of(generation=2))
    assert window.close(np.ones(2)).generation == 2
