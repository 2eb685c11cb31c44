"""Ranks switch together or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.worker.errors import GroupError, PeerLeftError
from equipoise.worker.header import StepHeader, agreed_generation, check_group, pack, unpack


def header(**changes):
    fields = {
        "epoch": 1,
        "step": 7,
        "num_tokens": 3,
        "generation": 4,
        "staged_generation": 0,
        "leaving": 0,
    }
    return StepHeader(**(fields | changes))


def test_a_header_survives_the_wire():
    assert unpack(list(pack(header(staged_generation=9)))) == header(staged_generation=9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_ranks_switch_only_to_a_newer_generation_that_all_have_staged(staged):
    headers = tuple(header(staged_generation=generation) for generation in staged)
    agreed = agreed_generation(headers)
    if agreed is None:
        assert len(set(staged)) > 1 or staged[0] <= 4
    else:
        assert set(staged) == {agreed}
        assert agreed > 4


def test_an_abort_and_a_new_stage_in_flight_do_not_switch_to_the_dropped_generation():
    assert agreed_generation((header(staged_generation=5), header(staged_generation=6))) is None


def test_ranks_that_stand_at_the_same_step_go_on():
    check_group((header(num_tokens=0), header(num_tokens=9)), names=("a", "b"))


def test_a_leaving_rank_is_named():
    with pytest.raises(PeerLeftError, match="b left the pool"):
        check_group((header(), header(leaving=1)), names=("a", "b"))


@pytest.mark.parametrize("field", ["epoch", "step", "generation"])
def test_ranks_that_disagree_stop_and_say_about_what(field):
    with pytest.raises(GroupError, match=rf"{field} \(a: .*, b: 99\)"):
        check_group((header(), header(**{field: 99})), names=("a", "b"))
