"""A stop string cuts a text at the same place however the text is split."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.stop_text import StopText

cuts = st.lists(st.integers(0, 100), max_size=6)


def merged_deltas(values, cuts):
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return [values[start:end] for start, end in itertools.pairwise(edges)]


@settings(deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts,
)
def test_text_ends_before_the_first_stop_string(text, stops, cuts):
    stop = StopText(tuple(stops))
    read = "".join(stop.read(part, final=False) for part in merged_deltas(text, cuts))
    read += stop.read("", final=True)
    complete = [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]
    assert stop.stopped == bool(complete)
    assert read == (text[: min(complete)[1]] if complete else text)


def test_only_a_possible_start_of_a_stop_string_is_held_back():
    stop = StopText(("END",))
    assert stop.read("one E", final=False) == "one "
    assert stop.read("x EN", final=False) == "Ex "
    assert stop.read("", final=True) == "EN"
