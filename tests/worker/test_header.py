"""Ranks switch together or not at all."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import contiguous_layout
from equipoise.rank.errors import GroupError, PeerLeftError
from equipoise.rank.header import (
    Arrival,
    StepHeader,
    agreed_generation,
    check_arrivals,
    check_group,
    digest_word,
    peers_digest,
    staged_conflict,
)
from equipoise.wire.balancer_messages import Peer
from tests.support.worker_parts import join_epoch_of


def header(**changes):
    fields = {
        "epoch": 1,
        "step": 7,
        "num_tokens": 3,
        "num_drafts": 0,
        "generation": 4,
        "staged_generation": 0,
        "leaving": 0,
        "peers_digest": 11,
        "layout_digest": 12,
        "staged_digest": 0,
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


def test_one_number_for_two_layouts_is_never_switched_to_and_names_the_ranks():
    headers = (
        header(staged_generation=5, staged_digest=-1),
        header(staged_generation=5, staged_digest=-1),
        header(staged_generation=5, staged_digest=7),
    )
    assert agreed_generation(headers) is None
    conflict = staged_conflict(headers, names=("a", "b", "c"))
    assert conflict == (
        "ranks disagree about the staged layout of generation 5 (c: 0000000000000007; a, b: "
        "ffffffffffffffff): plan again; if it is rejected too, restart the balancer"
    )


@pytest.mark.parametrize("digests", [(7, 7), (7, 0)])
def test_ranks_that_staged_the_same_or_not_all_have_no_conflict(digests):
    headers = tuple(header(staged_generation=5 if one else 0, staged_digest=one) for one in digests)
    assert staged_conflict(headers, names=("a", "b")) == ""


def test_ranks_at_the_same_step_continue():
    check_group((header(num_tokens=0), header(num_tokens=9)), names=("a", "b"))


def test_a_leaving_rank_is_named():
    with pytest.raises(PeerLeftError, match="b left the pool"):
        check_group((header(), header(leaving=1)), names=("a", "b"))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("epoch", "the epoch (a: 1; b: 99)"),
        ("step", "the step (a: 7; b: 99)"),
        ("generation", "the generation (a: 4; b: 99)"),
        ("peers_digest", "the peers of the epoch (a: 000000000000000b; b: 0000000000000063)"),
        ("layout_digest", "layout of generation 4 (a: 000000000000000c; b: 0000000000000063)"),
    ],
)
def test_ranks_that_disagree_stop_and_name_the_field(field, words):
    with pytest.raises(GroupError, match=re.escape(words)):
        check_group((header(), header(**{field: 99})), names=("a", "b"))


def test_of_hundreds_of_ranks_those_that_differ_are_named():
    headers = [header() for _ in range(320)]
    headers[17] = header(layout_digest=99)
    names = tuple(f"w-{rank}" for rank in range(320))
    with pytest.raises(GroupError) as failed:
        check_group(tuple(headers), names=names)
    assert "(w-17: 0000000000000063; w-0, w-1, w-2, w-3 and 315 more: " in str(failed.value)


LAYOUT = contiguous_layout(num_layers=2, num_experts=8, num_ranks=2, slots_per_rank=6)
OTHER = LAYOUT.with_placement(LAYOUT.expert_of_slot[:, ::-1], generation=1)


def arrival(layout=LAYOUT, addresses=("a:1", "b:2"), **changes):
    join_epoch = join_epoch_of(*addresses, layout=layout, **changes)
    return Arrival.from_json(Arrival.of(join_epoch, announcement="torch").to_json())


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (arrival(layout=OTHER), "the layout of generation 1"),
        (arrival(addresses=("a:1", "c:3")), "the peers of the epoch"),
        (arrival(addresses=("a:1", "b:2", "c:3")), "the peers of the epoch"),
        (
            arrival(layout=LAYOUT.with_placement(LAYOUT.expert_of_slot, generation=2)),
            "the generation",
        ),
    ],
)
def test_ranks_that_were_sent_different_things_do_not_form(other, what):
    words = rf"ranks disagree about {what} \(w-0: [0-9a-f]+; w-1: [0-9a-f]+\): they wait"
    with pytest.raises(ValueError, match=words):
        check_arrivals([arrival(), other], names=("w-0", "w-1"))


def test_ranks_that_were_sent_the_same_form():
    check_arrivals([arrival(rank=0), arrival(rank=1)], names=("w-0", "w-1"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "torch", "[]", '{"a": 1}', "[1, 2, 3, 4]", "[1, 2, 3, 4, 5]", "[1, 2, 3, 4, 10, 6]"),
        *('[5, 1, "ab", "x", 13]', '["ab", 1, null, "x", 13]', '["ab", 1, "ab", 7, 13]', "5"),
        *('["ab", true, "ab", "x", 13]', "[" * 100_000),
    ],
)
def test_what_another_release_publishes_is_one_clear_error(text):
    with pytest.raises(ValueError, match="which no rank of this release does"):
        Arrival.from_json(text)


def test_digests_are_the_same_on_every_machine():
    peers = [Peer(rank=0, address="a:1", node="n", worker="w-0")]
    assert peers_digest(peers).hex() == "ed0d3f919ebe1c9c354792e5556403b1"
    assert LAYOUT.digest().hex() == "9297fd0b305f149102cacc3b0009bda2"
    assert digest_word(bytes.fromhex("ff" * 7 + "fe" + "00" * 8)) == -2


def test_a_layouts_digest_covers_the_slots_of_each_rank():
    four = contiguous_layout(num_layers=2, num_experts=8, num_ranks=4, slots_per_rank=3)
    assert (four.expert_of_slot == LAYOUT.expert_of_slot).all()
    assert four.digest() != LAYOUT.digest()
    assert OTHER.digest() != LAYOUT.digest()
    assert LAYOUT.with_placement(LAYOUT.expert_of_slot, generation=9).digest() == LAYOUT.digest()


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
        self.announced = self.staged
        return header(
            generation=self.generation, staged_generation=self.announced[0] if self.announced else 0
        )

    def decide(self, headers):
        if self.announced and agreed_generation(headers) is not None:
            assert self.announced[1] == self.generation
            self.generation, self.staged = self.announced[0], None


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
