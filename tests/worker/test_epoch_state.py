"""Which epochs a worker takes up, and what it reports when it loses one."""

from types import SimpleNamespace

from equipoise.worker.epoch_state import EpochState
from tests.support.worker_parts import join_epoch_of


def epoch(number, *, generation=1):
    layout = SimpleNamespace(generation=generation)
    return join_epoch_of("a:1", epoch=number, layout=layout)


def test_only_newer_epochs_are_taken_up():
    state = EpochState()
    assert not state.has_begun
    assert [state.take_up(epoch(number)) for number in (2, 2, 1, 5)] == [True, False, False, True]
    assert state.has_begun
    assert state.is_newest(epoch(5))
    assert not state.is_newest(epoch(2))


def test_a_lost_group_reports_the_highest_generation_ever_used():
    state = EpochState()
    state.use(9)
    lost = state.lose(epoch(1, generation=4), "a peer died", expert_of_slot=None)
    assert (lost.epoch, lost.generation, lost.reason) == (1, 9, "a peer died")
    assert state.lost is lost
    assert state.lose(epoch(2, generation=11), "", expert_of_slot=None).generation == 11
