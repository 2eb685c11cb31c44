import numpy as np

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.reconcile import reconcile
from equipoise.planning.rollout import PersistCommitted, RankSwitched, SendAbort, State


def layout(generation):
    return Layout(
        generation=generation,
        num_experts=2,
        num_ranks=2,
        expert_of_slot=np.array([[0, 1]], dtype=np.int32),
    )


def found(running, staged=(0, 0), *, proposed=None, committed=7):
    return reconcile(
        generations_of_ranks=dict(enumerate(running)),
        staged_of_ranks=dict(enumerate(staged)),
        proposed=None if proposed is None else layout(proposed),
        committed=layout(committed),
        policy=Policy(),
        now=5.0,
    )


def test_a_pool_without_a_rollout_continues_unchanged():
    result = found((7, 7))
    assert (result.generation, result.wave, result.commands) == (7, None, ())
    assert "the committed one" in result.reason


def test_a_generation_staged_by_all_ranks_resumes():
    result = found((7, 7), (8, 8), proposed=8)
    assert result.generation == 7
    assert result.wave.state is State.STAGED
    assert result.commands == ()


def test_a_generation_staged_by_some_ranks_is_dropped():
    result = found((7, 7), (8, 0), proposed=8)
    assert result.wave.state is State.ABORTED
    assert [command.generation for command in result.commands] == [8]
    assert "8 is dropped" in result.reason


def test_a_switch_that_crosses_that_abort_is_accepted():
    wave = found((7, 7), (8, 0), proposed=8).wave
    for rank in (1, 0):
        switched = RankSwitched(rank=rank, generation=8, step=3, stall_us=1)
        wave, commands = wave.step(switched, now=6.0)
    assert wave.state is State.SWITCHED
    assert [type(command) for command in commands] == [PersistCommitted]


def test_a_staged_generation_that_the_store_does_not_have_is_dropped():
    result = found((7, 7), (9, 9))
    assert result.wave is None
    assert [type(command) for command in result.commands] == [SendAbort]
    assert [command.generation for command in result.commands] == [9]


def test_a_switch_that_was_not_committed_is_committed():
    result = found((8, 8), proposed=8)
    assert result.generation == 8
    assert result.wave.state is State.SWITCHED
    assert [command.layout.generation for command in result.commands] == [8]


def test_a_switch_reported_by_some_ranks_waits_for_the_others():
    result = found((8, 7), (0, 8), proposed=8)
    assert result.generation == 8
    assert result.wave.state is State.STAGED
    assert result.wave.switched_ranks == {0}
    switched = RankSwitched(rank=1, generation=8, step=3, stall_us=1)
    wave, commands = result.wave.step(switched, now=6.0)
    assert wave.state is State.SWITCHED
    assert [type(command) for command in commands] == [PersistCommitted]


def test_a_store_that_lost_its_data_is_restored_from_the_ranks():
    result = found((12, 12))
    assert (result.generation, result.wave) == (12, None)
    assert "taken from the ranks" in result.reason


def test_a_stale_proposal_is_ignored():
    result = found((7, 7), proposed=6)
    assert (result.wave, result.commands) == (None, ())


def test_ranks_that_run_different_generations_need_a_new_epoch():
    for result in (found((7, 9)), found((8, 9), proposed=8), found((6, 7), proposed=8)):
        assert result.generation is None
        assert "the pool needs a new epoch" in result.reason
