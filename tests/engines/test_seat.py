"""A seat inside an engine: ranks switch after the same pass or stop together, and never wait."""

import threading
import time

import numpy as np
import pytest
import torch

from equipoise.engines.lockstep import ROW_WIDTH, LockstepError, MixedLayoutsError, RowForm
from equipoise.engines.seat import ROUND_PASSES
from equipoise.engines.seating import take_seat
from equipoise.engines.settings import settings_from
from equipoise.engines.slots import EngineSlots
from equipoise.rank.errors import NotHeldError
from tests.engines.seats import MemoryLockstep, Ranks, Rendezvous

FIRST = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 0]]
SECOND = [[0, 1, 3, 3, 0, 2], [0, 1, 2, 3, 2, 1]]
THIRD = [[0, 1, 2, 3, 1, 2], [0, 1, 2, 3, 0, 1]]


@pytest.fixture
def ranks():
    return Ranks(FIRST, num_experts=4).until_ready()


def stage(ranks, table, *, after=1, only=(0, 1)):
    layout = ranks.layout(table, after=after)
    for rank in only:
        assert ranks.seats[rank].offer(ranks.staged(rank, layout))
    return layout


def test_ranks_meet_in_the_epoch_of_rank_0_and_share_one_table(ranks):
    first, second = ranks.seats
    assert first.epoch == second.epoch == first.generation > 1_600_000_000
    assert np.array_equal(first.table, second.table)
    assert first.table.shape == (2, 4, 16)
    assert first.workers == second.workers == ("w-0", "w-1")
    assert [len(ranks.committed[rank]) for rank in (0, 1)] == [1, 1]


def test_all_switch_after_the_same_pass_with_bytes_and_tables(ranks):
    layout = stage(ranks, SECOND)
    ranks.step(3)
    assert {(switch.generation, switch.step) for _, switch in ranks.switched} == {
        (layout.generation, ranks.switched[0][1].step)
    }
    assert [rank for rank, _ in ranks.switched] == [0, 1]
    for rank in (0, 1):
        assert ranks.experts(rank) == np.asarray(SECOND)[:, rank * 3 : rank * 3 + 3].tolist()
        assert np.array_equal(ranks.committed[rank][-1].expert_of_slot, SECOND)
        hashed = ranks.seats[rank].held.hash_slot(0, 2)
        assert hashed.found == ranks.seats[rank].table[0, hashed.expert].tobytes()


def test_nobody_switches_while_one_has_not_staged(ranks):
    stage(ranks, SECOND, only=(0,))
    ranks.step(5)
    assert ranks.switched == []
    assert ranks.experts(0) == np.asarray(FIRST)[:, :3].tolist()


def test_a_generation_dropped_after_its_header_was_sent_is_switched_to(ranks):
    layout = stage(ranks, SECOND)
    ranks.step()
    for seat in ranks.seats:
        seat.drop(layout.generation)
    ranks.step()
    assert [rank for rank, _ in ranks.switched] == [0, 1]


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_generation_dropped_before_is_switched_to_by_none(ranks, dropped):
    layout = stage(ranks, SECOND)
    ranks.seats[dropped].drop(layout.generation)
    ranks.step(5)
    assert ranks.switched == []


def num_switches(ranks):
    """How often ranks switched, both at the same step each time."""
    steps = {}
    for _, switch in ranks.switched:
        steps.setdefault(switch.generation, []).append(switch.step)
    assert all(len(both) == 2 and len(set(both)) == 1 for both in steps.values())
    return len(steps)


def test_ranks_never_differ_however_aborts_and_stages_interleave(ranks):
    draw = np.random.default_rng(5)
    tables, after = [FIRST, SECOND, THIRD], 0
    for _ in range(1000):
        seat = ranks.seats[draw.integers(2)]
        if draw.random() < 0.3:
            after += 1
            layout = ranks.layout(tables[draw.integers(3)], after=after)
            for rank in draw.permutation(2)[: draw.integers(1, 3)]:
                ranks.seats[rank].offer(ranks.staged(int(rank), layout))
        elif draw.random() < 0.3 and seat.staged_generation:
            seat.drop(seat.staged_generation)
        ranks.step()
        assert len({seat.generation for seat in ranks.seats}) == 1
    assert num_switches(ranks) > 20
    assert not any(seat.stopped for seat in ranks.seats)


def test_layouts_that_differ_under_one_number_are_rejected_by_all(ranks):
    ranks.seats[0].offer(ranks.staged(0, ranks.layout(SECOND)))
    ranks.seats[1].offer(ranks.staged(1, ranks.layout(THIRD)))
    ranks.step(3)
    assert ranks.switched == []
    assert [rank for rank, _ in ranks.rejected] == [0, 1]
    assert "ranks disagree about the staged layout" in ranks.rejected[0][1].reason


def test_a_layout_that_starts_elsewhere_is_not_taken(ranks):
    late = ranks.staged(0, ranks.layout(THIRD, after=2))
    stage(ranks, SECOND)
    ranks.step(3)
    assert not ranks.seats[0].offer(late)


def test_counts_are_conserved_over_a_switch(ranks):
    ranks.step(6)
    before = [seat.progress() for seat in ranks.seats]
    assert before[0].stats.steps > 0
    assert all(len(one.loads) == 1 for one in before)
    first_pass = ranks.seats[0]._passes
    layout = stage(ranks, SECOND)
    ranks.step(40, load=torch.zeros(2, 6, dtype=torch.int32))
    for seat in ranks.seats:
        current, previous = seat.progress().loads
        assert current.generation == layout.generation
        assert current.slot_load_LS.sum() == 0
        # Two ranks counted one assignment for each slot in each pass since the seat was ready.
        assert len(set(previous.slot_load_LS.flatten().tolist())) == 1
        assert int(previous.slot_load_LS[0, 0]) == 2 * (first_pass - ready_pass(ranks))


def test_counts_of_a_generation_that_lasts_a_few_passes_are_not_lost(ranks):
    """Its last sum is read when the next switch is about to come, and a report comes after it."""
    for after, table in enumerate((SECOND, THIRD, FIRST), start=1):
        stage(ranks, table, after=after)
        while ranks.seats[0].staged_generation:
            ranks.step()
    last_pass = ranks.seats[0]._passes
    ranks.step(40, load=torch.zeros(2, 6, dtype=torch.int32))
    for seat in ranks.seats:
        counted = sum(load.slot_load_LS for load in seat.progress().loads)
        assert set(counted.flatten().tolist()) == {2 * (last_pass - ready_pass(ranks))}


@pytest.mark.parametrize("rows", [[0, 1], [1, 3]])
def test_only_the_rows_of_the_pools_layers_are_counted(rows):
    ranks = Ranks(FIRST, num_experts=4, counted_rows=rows)
    every = torch.arange(1, 5, dtype=torch.int32)[:, None].repeat(1, 6)
    ranks.until_ready(load=every)
    ranks.step(40, load=every)
    (current,) = ranks.seats[0].progress().loads
    first, second = current.slot_load_LS[:, 0].tolist()
    assert first > 0
    numbers = every[rows][:, 0].tolist()
    assert first / numbers[0] == second / numbers[1]


def ready_pass(ranks):
    """The pass after the one in which the ranks began to gather checksums."""
    rows = ranks.rendezvous.rows
    return 1 + min(number for number in rows if rows[number][0].dtype == torch.uint8)


def test_replicas_that_differ_stop_all_ranks_before_anything_moves():
    seeds = iter(range(100))
    ranks = Ranks(FIRST, num_experts=4, seed_of=lambda layer, expert: next(seeds)).until_ready()
    assert {reason for _, reason in ranks.stopped} == {ranks.seats[0].stopped}
    assert "replicas of expert 0 of layer 0 differ" in ranks.seats[0].stopped
    assert ranks.ready == []


def test_an_update_while_the_slots_are_hashed_first_is_waited_for():
    seeds = iter(range(100))
    ranks = Ranks(FIRST, num_experts=4, seed_of=lambda layer, expert: next(seeds))
    end_s = time.monotonic() + 20.0
    while not ranks.seats[0]._baseline._attempts:
        assert time.monotonic() < end_s
        ranks.step()
        time.sleep(0.001)
    for tensors in ranks.tensors.values():
        for first, _ in tensors:
            first[:, 2] = 7  # The update is complete.
    ranks.until_ready()
    assert len(ranks.ready) == 2
    assert not ranks.stopped


def test_an_update_that_one_rank_has_hashed_before_the_first_comparison_is_waited_for(monkeypatch):
    """No passes are taken during an update, and ranks hash at different speeds."""
    ranks = Ranks(FIRST, num_experts=4)
    baselines = [seat._baseline for seat in ranks.seats]
    end_s = time.monotonic() + 20.0

    def until(condition):
        while not condition():
            assert time.monotonic() < end_s
            time.sleep(0.001)

    ranks.step(2)
    until(lambda: all(one._hashed for one in baselines))
    ranks.step()  # Both say so.
    may_read, read = threading.Event(), EngineSlots.read

    def slowly(slots, slot):
        if slots in baselines[1]._slots:
            may_read.wait()
        return read(slots, slot)

    monkeypatch.setattr(EngineSlots, "read", slowly)
    for rank, tensors in ranks.tensors.items():
        for first, _ in tensors:
            first[:, 2] += 1
        ranks.seats[rank].note_update()
    until(lambda: baselines[0]._hashed[0] == 2)
    ranks.step(3)
    assert not ranks.stopped
    may_read.set()
    ranks.until_ready()
    assert len(ranks.ready) == 2
    assert [one._attempts for one in baselines] == [0, 0]


def test_a_rank_that_leaves_stops_all_after_the_same_pass(ranks):
    ranks.seats[1].leave("its weights have changed")
    ranks.step(4)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert ranks.seats[0].stopped == "stopped by w-1: the log there has the reason"
    assert ranks.seats[1].stopped == "its weights have changed"
    stuck = len(ranks.rendezvous.rows)
    ranks.step(4)
    assert len(ranks.rendezvous.rows) == stuck, "a stopped seat takes part in nothing"


def test_ranks_of_different_releases_are_named_and_stop_together():
    """Rows have the width of every release: gloo would end a process that got a longer one."""
    ranks = Ranks(FIRST, num_experts=4)
    assert ranks.seats[0]._header().shape == (ROW_WIDTH,)
    ranks.seats[1]._header = lambda: RowForm("of the next release").pack(range(ROW_WIDTH - 1))
    ranks.until_ready()
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "rank 0 and rank 1 run different releases of the plugin" in ranks.seats[0].stopped


def test_a_rank_that_can_have_no_link_stops_all_at_once_and_says_why(ranks, tmp_path):
    known = {"EQUIPOISE_BALANCER": "127.0.0.1:1", "EQUIPOISE_POOL": "p", "EQUIPOISE_INSECURE": "1"}
    missing = {"EQUIPOISE_SIGNING_KEY": str(tmp_path / "key")}
    rendezvous = Rendezvous(2)
    seats = [
        take_seat(ranks.seats[rank].model, MemoryLockstep(rendezvous, rank), settings_from(one))
        for rank, one in enumerate([known, known | missing])
    ]
    for _ in range(2):
        for _ in range(ROUND_PASSES):
            for seat in seats:
                seat.on_step()
    assert "EQUIPOISE_SIGNING_KEY" in seats[1].stopped
    assert seats[0].stopped == "stopped by rank 1: the log there has the reason"


def test_an_observer_leaves_an_engine_the_tables_that_it_started_with(ranks):
    """SGLang's differ by rank, and give each the nearest replica; others would change its load."""
    known = {"EQUIPOISE_BALANCER": "127.0.0.1:1", "EQUIPOISE_POOL": "p", "EQUIPOISE_INSECURE": "1"}
    model = ranks.seats[0].model
    before = list(ranks.committed[0])
    for mode, committed in (("observe", []), ("balance", ["tables"])):
        settings = settings_from(known | {"EQUIPOISE_MODE": mode})
        seat = take_seat(model, MemoryLockstep(Rendezvous(2), 0), settings)
        seat.model.commit("tables")
        assert ranks.committed[0] == [*before, *committed]


def test_ranks_that_took_different_numbers_of_passes_stop_together(ranks):
    ranks.seats[0]._passes += 1
    ranks.step(3)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "disagree about the step" in ranks.seats[0].stopped


def test_a_broken_exchange_stops_a_rank_that_had_nothing_to_switch_to(ranks):
    ranks.rendezvous.broken = {0}
    ranks.seats[0].on_step()
    assert "not all ranks answered" in ranks.seats[0].stopped


def test_a_broken_exchange_that_may_have_agreed_is_fatal(ranks):
    stage(ranks, SECOND)
    ranks.step()
    ranks.rendezvous.broken = {0}
    with pytest.raises(LockstepError):
        ranks.seats[0].on_step()


def update(ranks, *, only=(0, 1), announced=True, experts=range(4)):
    """New weights in place, as a trainer sends them."""
    for rank in only:
        for first, marks in ranks.tensors[rank]:
            for slot, expert in enumerate(marks[:, 0].int().tolist()):
                if expert in experts:
                    first[slot, 2] += 1
        if announced:
            ranks.seats[rank].note_update()


def step_until(ranks, condition, *, bound_s=20.0):
    end_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < end_s
        ranks.step()
        time.sleep(0.001)


def has_baseline(ranks, version):
    return lambda: {seat.hashed_weights for seat in ranks.seats} == {version}


def test_updated_weights_are_hashed_again_and_begin_an_epoch_on_all_ranks(ranks):
    before, epoch = ranks.seats[0].table, ranks.seats[0].epoch
    update(ranks)
    assert {seat.weights_version for seat in ranks.seats} == {2}
    assert {seat.hashed_weights for seat in ranks.seats} == {1}
    step_until(ranks, has_baseline(ranks, 2))
    first, second = ranks.seats
    assert first.epoch == second.epoch > epoch
    assert first.generation == second.generation == first.epoch
    assert (first.table != before).any(axis=2).all()
    assert np.array_equal(first.table, second.table)
    assert ranks.based == [0, 1]
    assert len(ranks.ready) == 2, "each seat is ready once"
    stage(ranks, SECOND)
    ranks.step(3)
    assert [rank for rank, _ in ranks.switched] == [0, 1]


def test_an_epoch_after_an_update_has_no_number_that_the_balancer_has_used(ranks):
    used = ranks.seats[0].epoch + 3600  # As after many waves in a second, the last one aborted.
    ranks.seats[1].note_number(used)
    update(ranks)
    step_until(ranks, has_baseline(ranks, 2))
    epochs = {(seat.epoch, seat.generation) for seat in ranks.seats}
    assert epochs == {(used + 2, used + 2)}, "one more may be on its way"


def test_nothing_staged_from_old_weights_is_switched_to(ranks):
    stage(ranks, SECOND)
    ranks.step()  # Its header advertises what is staged.
    late = ranks.staged(0, ranks.layout(THIRD, after=2))
    update(ranks)
    assert not ranks.seats[0].offer(late)
    step_until(ranks, has_baseline(ranks, 2))
    ranks.step(5)
    assert ranks.switched == []
    assert ranks.experts(0) == np.asarray(FIRST)[:, :3].tolist()
    assert not any(seat.stopped for seat in ranks.seats)


def test_what_one_rank_notices_all_hash_again(ranks):
    update(ranks, announced=False)
    ranks.seats[1].note_changed_slots()
    step_until(ranks, has_baseline(ranks, 2))
    assert ranks.based == [0, 1]


def test_few_changed_slots_are_damage_unless_the_engine_announced_them(ranks):
    update(ranks, experts=[3], announced=False)
    ranks.seats[1].note_changed_slots()
    step_until(ranks, lambda: ranks.stopped)
    assert {reason for _, reason in ranks.stopped} == {ranks.seats[0].stopped}
    assert "memory of a machine is damaged" in ranks.seats[0].stopped


def test_a_few_updated_experts_are_taken_if_the_engine_announced_them(ranks):
    update(ranks, experts=[3])
    step_until(ranks, has_baseline(ranks, 2))
    assert not any(seat.stopped for seat in ranks.seats)


def test_experts_that_a_switch_took_from_before_an_unannounced_update_are_noticed():
    """Without replicas nothing else holds their new weights."""
    ranks = Ranks([[0, 1, 2, 3]], num_experts=4).until_ready()
    stage(ranks, [[2, 1, 0, 3]])
    ranks.step()  # The ranks will switch.
    update(ranks, announced=False)
    ranks.step(2)
    assert len(ranks.switched) == 2
    ranks.seats[0].note_changed_slots()
    step_until(ranks, lambda: len(ranks.stopped) == 2)
    assert (
        "slot 0 (w-0) of layer 0, expert 2 may still have its old weights" in ranks.seats[1].stopped
    )


def test_layers_that_an_unannounced_update_leaves_out_are_no_fault():
    """As layers that are not trained; an expert had moved there before."""
    ranks = Ranks([[0, 1, 2, 3]] * 3, num_experts=4).until_ready()
    stage(ranks, [[2, 1, 0, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    ranks.step(3)
    for tensors in ranks.tensors.values():
        for first, _ in tensors[1:]:
            first[:, 2] += 1
    ranks.seats[0].note_changed_slots()
    step_until(ranks, has_baseline(ranks, 2))
    assert not any(seat.stopped for seat in ranks.seats)


def test_an_unannounced_update_after_a_switch_is_taken(ranks):
    stage(ranks, SECOND)
    ranks.step(3)
    update(ranks, announced=False)
    ranks.seats[0].note_changed_slots()
    step_until(ranks, has_baseline(ranks, 2))
    update(
        ranks, announced=False, experts=[0, 1]
    )  # Of half of the slots, none of them moved since.
    ranks.seats[0].note_changed_slots()
    step_until(ranks, has_baseline(ranks, 3))
    assert not any(seat.stopped for seat in ranks.seats)


def test_an_engine_sleeps_and_is_balanced_again_when_it_wakes(ranks):
    stage(ranks, SECOND)
    ranks.step()
    for seat in ranks.seats:
        seat.note_release(["kv_cache"])
    ranks.seats[0].held.hash_slot(0, 0)
    for seat in ranks.seats:
        seat.note_release(["kv_cache", "weights"])
    with pytest.raises(NotHeldError, match="the engine sleeps"):
        ranks.seats[0].held.hash_slot(0, 0)
    ranks.seats[1].note_changed_slots()  # A hashing that began before waits.
    update(ranks, announced=False)
    for seat in ranks.seats:
        seat.note_restore(["kv_cache"])
    with pytest.raises(NotHeldError, match="the engine sleeps"):
        ranks.seats[0].held.hash_slot(0, 0)
    for seat in ranks.seats:
        seat.note_restore(["weights"])
    step_until(ranks, lambda: ranks.based[-2:] == [0, 1])
    assert ranks.switched == []
    stage(ranks, SECOND)
    ranks.step(3)
    assert [rank for rank, _ in ranks.switched] == [0, 1]


def test_an_update_that_reaches_the_ranks_one_by_one_is_waited_for(ranks):
    update(ranks, only=[0], announced=False)
    ranks.seats[0].note_changed_slots()
    step_until(ranks, lambda: ranks.seats[0].weights_version > 2)
    assert ranks.based == []
    update(ranks, only=[1], announced=False)
    step_until(ranks, lambda: ranks.based == [0, 1])
    assert np.array_equal(ranks.seats[0].table, ranks.seats[1].table)
    assert not any(seat.stopped for seat in ranks.seats)


def test_replicas_that_differ_for_good_after_an_update_stop_all_ranks(ranks):
    update(ranks, only=[0])
    step_until(ranks, lambda: len(ranks.stopped) == 2)
    assert {reason for _, reason in ranks.stopped} == {ranks.seats[0].stopped}
    assert "differ" in ranks.seats[0].stopped


def test_an_update_between_the_rounds_of_one_rank_only_ends_the_engine(ranks):
    """Else ranks would serve with different layouts: another one has switched meanwhile."""
    stage(ranks, SECOND)
    ranks.step()
    update(ranks, only=[0])
    ranks.step()
    with pytest.raises(MixedLayoutsError):
        ranks.step(2)


def test_a_rank_that_cannot_count_stops_all_and_the_engine_serves_on(ranks):
    ranks.seats[1].count(torch.zeros(1, 1, 7))
    ranks.seats[1].on_step()
    ranks.seats[0].on_step()
    ranks.step(4)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "rank 1 cannot count its loads" in ranks.seats[1].stopped


def test_a_process_that_has_no_threads_left_stops_all_and_the_engine_serves_on(ranks, monkeypatch):
    def fail(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for seat in ranks.seats:
            seat.note_update()
    ranks.step(4)
    assert [rank for rank, _ in ranks.stopped] == [0, 1]
    assert "rank 1 cannot hash its experts: can't start new thread" in ranks.seats[1].stopped


def test_aborts_at_any_point_of_a_round_never_part_the_ranks(ranks):
    """Abort reaches ranks at different moments, before, within and after a round."""
    draw = np.random.default_rng(7)
    tables = [FIRST, SECOND, THIRD]
    for after in range(1, 401):
        layout = ranks.layout(tables[draw.integers(3)], after=after)
        if layout.generation <= ranks.seats[0].generation:
            continue
        staged = [ranks.staged(rank, layout) for rank in (0, 1)]
        moments = draw.integers(0, 4, size=(2, 2))
        for moment in range(4):
            for rank, seat in enumerate(ranks.seats):
                if moments[rank, 0] == moment:
                    seat.offer(staged[rank])
                if moments[rank, 1] == moment:
                    seat.drop(layout.generation)
                seat.on_step()
            assert len({seat.generation for seat in ranks.seats}) == 1
    assert num_switches(ranks) > 20
