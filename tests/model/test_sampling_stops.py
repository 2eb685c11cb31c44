import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise_model.sampling_stops import StopMatcher

LETTERS = "abé"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def shown(stops, parts):
    """All that is shown of a text in parts, each part's share, and the stop."""
    matcher = StopMatcher(stops)
    told = [matcher.feed(part) for part in parts]
    return "".join(told) + matcher.flush(), told, matcher.matched


def first_stop(stops, text):
    """By trying every end: the first stop to end, the longest of those that end there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, st.lists(st.text(LETTERS, max_size=5), max_size=8))
def test_what_is_shown_does_not_depend_on_how_the_text_is_cut(stops, parts):
    text, _, stop = shown(stops, parts)
    assert (text, stop) == first_stop(stops, "".join(parts))


@given(STOPS, st.lists(st.text(LETTERS, max_size=5), max_size=8))
def test_no_more_is_held_back_than_a_stop_might_need(stops, parts):
    matcher = StopMatcher(stops)
    text, told = "", ""
    for part in parts:
        text += part
        told += matcher.feed(part)
        if matcher.matched is None:
            assert text.startswith(told)
            held = text[len(told) :]
            assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "parts", "expected", "stop"),
    [
        ([], ["ab", "c"], "abc", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["END"], ["xE", "N"], "xEN", None),
        (["END"], ["xEN", "D", "more"], "x", "END"),
    ],
)
def test_text_ends_before_its_first_stop(stops, parts, expected, stop):
    text, _, matched = shown(stops, parts)
    assert (text, matched) == (expected, stop)
