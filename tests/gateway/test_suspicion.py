"""A request is rejected for breaking ranks, not for being near a request that does."""

import pytest

from equipoise.gateway.suspicion import Suspicion
from equipoise.wire.inference_messages import Blame

NONE, STEP, REQUEST = Blame.NONE, Blame.STEP, Blame.REQUEST
TOKEN = "a token"


CHOICE, OTHER = "a choice", "another choice"


def note_break(suspicion, choice, blame, *, failure, rank="a", was_isolated=True):
    suspicion.note_break(choice, blame, rank=rank, failure=failure, was_isolated=was_isolated)


def after(*events):
    suspicion = Suspicion()
    for number, event in enumerate(events):
        if event is TOKEN:
            suspicion.note_proof(CHOICE)
        else:
            note_break(suspicion, CHOICE, event, failure=number)
    return suspicion


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((REQUEST, REQUEST), "2 ranks blamed it for their failure"),
        ((REQUEST, TOKEN, REQUEST), "2 ranks blamed it for their failure"),
        ((STEP, STEP, STEP), "3 consecutive ranks failed"),
        ((TOKEN, STEP, NONE, STEP, NONE, STEP), "3 consecutive ranks failed"),
    ],
)
def test_a_request_that_breaks_ranks_is_rejected_with_the_reason(events, words):
    assert words in after(*events).verdict
    assert after(*events[:-1]).verdict == ""


@pytest.mark.parametrize(
    "events",
    [
        (NONE,) * 9,
        (REQUEST, NONE, STEP, STEP),
        (STEP, STEP, TOKEN) * 9,
    ],
)
def test_explained_breaks_and_breaks_with_progress_between_them_do_not_count(events):
    assert after(*events).verdict == ""


def test_a_suspect_is_one_break_away_from_rejection_and_cleared_by_a_token():
    assert not after(STEP).is_strong
    assert after(STEP, STEP).is_strong
    assert not after(STEP, STEP, TOKEN).is_strong


def test_a_rank_that_fails_with_two_choices_counts_once_until_both_make_a_token():
    suspicion = Suspicion()
    for failure in ("one", "another"):
        for choice in (CHOICE, OTHER):
            note_break(suspicion, choice, STEP, failure=failure)
    assert suspicion.is_strong
    assert suspicion.verdict == ""
    suspicion.note_proof(CHOICE)
    assert suspicion.is_strong, "another choice may still be the cause"
    suspicion.note_proof(OTHER)
    assert not suspicion.is_strong


def test_failures_of_choices_count_together_and_the_last_only_without_another_suspect():
    suspicion = Suspicion()
    for failure, choice in enumerate((CHOICE, OTHER, CHOICE, OTHER)):
        note_break(suspicion, choice, STEP, failure=failure, was_isolated=False)
    assert suspicion.verdict == ""
    note_break(suspicion, CHOICE, STEP, failure="last")
    assert "5 consecutive ranks failed" in suspicion.verdict


def test_one_rank_that_blames_two_choices_is_not_enough():
    suspicion = Suspicion()
    for failure, choice in enumerate((CHOICE, OTHER)):
        note_break(suspicion, choice, REQUEST, failure=failure)
    assert suspicion.verdict == ""
    note_break(suspicion, OTHER, REQUEST, failure="last", rank="b")
    assert "2 ranks blamed it" in suspicion.verdict
