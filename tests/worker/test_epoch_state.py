"""Which epochs a worker joins, and what it reports when it loses one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.worker.epoch_state import EpochState
from tests.support.worker_parts import join_epoch_of


def epoch(number, *, generation=1):
    layout = SimpleNamespace(generation=generation)
    return join_epoch_of("a:1", epoch=number, layout=layout)


@pytest.fixture
def layout():
    return contiguous_layout(
        num_layers=2, num_experts=6, num_ranks=2, slots_per_rank=4, generation=3
    )


def test_only_newer_epochs_are_taken_up():
    state = EpochState()
    assert not state.has_begun
    assert [state.take_up(epoch(number)) for number in (2, 2, 1, 5)] == [True, False, False, True]
    assert state.has_begun
    assert state.is_newest(epoch(5))
    assert not state.is_newest(epoch(2))


def test_it_reports_what_it_has_taken_up_whether_or_not_it_serves():
    state = EpochState()
    assert (state.highest_epoch, state.highest_generation) == (0, 0)
    state.take_up(epoch(58, generation=7))
    assert (state.highest_epoch, state.highest_generation) == (58, 7)


def test_an_epoch_that_is_not_newer_is_answered_unless_it_repeats_the_newest(layout):
    state, newest = EpochState(), join_epoch_of("a:1", "b:1", epoch=58, layout=layout)
    state.take_up(newest)
    assert state.rejection(replace(newest, term=9)) is None
    moved = replace(layout, expert_of_slot=layout.expert_of_slot[:, ::-1].copy())
    for other in replace(newest, rank=1), replace(newest, layout=moved), replace(newest, epoch=1):
        answer = state.rejection(other)
        assert (answer.epoch, answer.rank, answer.highest_epoch) == (other.epoch, other.rank, 58)
        assert "a later one must be opened" in answer.reason


def test_a_lost_group_reports_the_highest_generation_ever_used():
    state = EpochState()
    state.use(9)
    lost = state.lose(epoch(1, generation=4), "a peer died", expert_of_slot=None)
    assert (lost.epoch, lost.generation, lost.reason) == (1, 9, "a peer died")
    assert state.lost is lost
    assert state.lose(epoch(2, generation=11), "", expert_of_slot=None).generation == 11
