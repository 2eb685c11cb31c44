"""A request is rejected for breaking ranks, not for being near a request that does."""

import pytest

from equipoise.gateway.suspicion import Suspicion
from equipoise.wire.inference import Blame

NONE, STEP, REQUEST = Blame.NONE, Blame.STEP, Blame.REQUEST
TOKEN = "a token"


def after(*events):
    suspicion = Suspicion()
    for event in events:
        if event is TOKEN:
            suspicion.note_progress()
        else:
            suspicion.note_break(event)
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
