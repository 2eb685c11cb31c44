"""Ranks switch together or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.worker.errors import GroupError, PeerLeftError
from equipoise.worker.header import StepHeader, agreed_generation, check_group


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


def test_ranks_at_the_same_step_continue():
    check_group((header(num_tokens=0), header(num_tokens=9)), names=("a", "b"))


def test_a_leaving_rank_is_named():
    with pytest.raises(PeerLeftError, match="b left the pool"):
        check_group((header(), header(leaving=1)), names=("a", "b"))


@pytest.mark.parametrize("field", ["epoch", "step", "generation"])
def test_ranks_that_disagree_stop_and_name_the_field(field):
    with pytest.raises(GroupError, match=rf"{field} \(a: .*, b: 99\)"):
        check_group((header(), header(**{field: 99})), names=("a", "b"))


@st.composite
def rounds(draw):
    """By round and rank: events before the header, and between header and decision."""
    happening = st.one_of(
        st.none(),
        st.tuples(st.just("stage"), st.integers(2, 6)),
        st.tuples(st.just("drop"), st.integers(2, 6)),
    )
    num_ranks = draw(st.integers(1, 4))
    return draw(
        st.lists(
            st.lists(st.tuples(happening, happening), min_size=num_ranks, max_size=num_ranks),
            min_size=1,
            max_size=12,
        )
    )


class Rank:
    """The engine's handling of staged generations, without an engine."""

    def __init__(self):
        self.generation, self.staged = 1, None

    def happen(self, event):
        match event:
            case ("stage", generation) if generation > self.generation:
                self.staged = (generation, self.generation)
            case ("drop", generation) if self.staged and self.staged[0] == generation:
                self.staged = None

    def header(self):
        self.told = self.staged
        return header(
            generation=self.generation, staged_generation=self.told[0] if self.told else 0
        )

    def decide(self, headers):
        if self.told and agreed_generation(headers) is not None:
            assert self.told[1] == self.generation
            self.generation, self.staged = self.told[0], None


@settings(deadline=None)
@given(rounds())
def test_however_stages_and_aborts_arrive_ranks_are_never_split(all_rounds):
    ranks = [Rank() for _ in all_rounds[0]]
    for events in all_rounds:
        for rank, (before, _) in zip(ranks, events, strict=True):
            rank.happen(before)
        headers = tuple(rank.header() for rank in ranks)
        check_group(headers, names=tuple("abcd"[: len(ranks)]))
        for rank, (_, between) in zip(ranks, events, strict=True):
            rank.happen(between)
        for rank in ranks:
            rank.decide(headers)
        assert len({rank.generation for rank in ranks}) == 1
