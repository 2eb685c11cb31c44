"""Profiler traces are read one event at a time; a bad one ends in one error that names the file."""

import gzip
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.formats.errors import FormatError
from equipoise.formats.json_stream import MAX_VALUE_CHARS, array_items
from equipoise.formats.trace import Slice, read_slices

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 2}


@pytest.fixture
def trace(tmp_path):
    """Writes a file: bytes as they are, anything else as JSON."""

    def write(content, name="trace.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def test_slices_of_pytorchs_form(trace):
    other = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    path = trace({"schemaVersion": 1, "deviceProperties": [{}], "traceEvents": [other, KERNEL]})
    (found,) = read_slices(path)
    assert found == Slice("kernel", "k", "0", "7", 10_000, 12_000)


def test_slices_of_a_bare_array(trace):
    assert len(list(read_slices(trace([KERNEL, KERNEL])))) == 2


def test_a_packed_trace_is_known_by_its_content(trace):
    packed = gzip.compress(json.dumps([KERNEL]).encode())
    assert len(list(read_slices(trace(packed, name="trace.json")))) == 1


def test_fractions_of_microseconds_are_exact_beside_large_whole_ones(trace):
    event = KERNEL | {"ts": 1740461679470813.25, "dur": 0.001}
    (found,) = read_slices(trace([event]))
    assert (found.start_ns, found.end_ns) == (1740461679470813250, 1740461679470813251)


def test_a_name_with_bytes_that_are_not_utf_8_is_read(trace):
    data = json.dumps([KERNEL]).encode().replace(b'"k"', b'"k\xff"')
    assert [one.name for one in read_slices(trace(data))] == ["k\ufffd"]


def test_long_names_of_tracks_and_processes_are_told_apart(trace):
    same = "x" * 4000
    path = trace([KERNEL | {"tid": same + end, "pid": same + end} for end in "aab"])
    first, again, other = read_slices(path)
    assert (first.track, first.process) == (again.track, again.process)
    assert first.track != other.track
    assert first.process != other.process
    assert len(first.track) < 250


BAD = {
    "empty": (b"", "it is empty"),
    "no json": (b"MZ\x90\x00", "it begins with neither"),
    "cut in an event": (json.dumps([KERNEL, KERNEL]).encode()[:-20], "cut short .* event 1"),
    "cut between events": (json.dumps([KERNEL]).encode()[:-1], "it is cut short"),
    "cut after the events": (b'{"traceEvents": [' + json.dumps(KERNEL).encode(), "it is cut short"),
    "text after the end": (json.dumps([KERNEL]).encode() + b" x", "text after the end"),
    "a comma too many": (b"[" + json.dumps(KERNEL).encode() + b",]", "event 1"),
    "no comma": (b"[" + 2 * json.dumps(KERNEL).encode() + b"]", "where , or ] belongs"),
    "other keys": (b'{"a": 1}', "no array 'traceEvents'"),
    "no array": (b'{"traceEvents": 7}', "traceEvents is not an array"),
    "no events": (b'{"traceEvents": []}', "it has no events: profile"),
    "no slices": (b'[{"ph": "i", "ts": 1}]', "none of its 1 events is a complete one"),
    "an event that is no object": (b"[3]", "event 0 is not an object"),
    "time that is text": (
        [KERNEL | {"ts": "noon"}],
        "event 0, 'k', has no number .* as ts: 'noon'",
    ),
    "no time": ([{"ph": "X", "name": "k"}], "has no number .* as ts: 'None'"),
    "time that is not a number": (b'[{"ph": "X", "ts": NaN}]', "as ts: 'nan'"),
    "endless time": (b'[{"ph": "X", "ts": 1, "dur": Infinity}]', "has dur inf, more than 285"),
    "time beyond all clocks": ([KERNEL | {"ts": 10**400}], "has ts 1000.*, more than 285"),
    "more digits than are read": (b"[" + b"9" * 5000 + b"]", "event 0.*digits"),
    "time that went back": ([KERNEL | {"dur": -5}], "ends before it begins .dur -5.: its clock"),
    "nested without end": (b"[" * 200_000, "event 0 is nested too deeply"),
    "a value without end": (b'[{"name": "' + b"x" * (2 * MAX_VALUE_CHARS), "longer than 4,194,304"),
    "damaged gzip": (gzip.compress(json.dumps([KERNEL]).encode())[:-12], "gzip data is cut short"),
    "no gzip": (b"\x1f\x8b" + b"x" * 40, "gzip data is cut short or damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_trace_gives_one_error_that_names_it(trace, case):
    content, message = BAD[case]
    path = trace(content)
    with pytest.raises(FormatError, match=message) as caught:
        list(read_slices(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_gives_an_error_that_names_it(tmp_path):
    with pytest.raises(FormatError, match=r"missing[.]json: No such file"):
        list(read_slices(tmp_path / "missing.json"))


class Slowly(io.StringIO):
    """Gives one character at a time, however many are asked for."""

    def read(self, _size=-1):
        return super().read(1)


# By default two seconds of CPU go into finding out what UTF-8 can encode: all but surrogates.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.one_of(st.integers(), st.floats(allow_nan=False), ANY_TEXT, st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(ANY_TEXT, inner)),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(
    items=st.lists(VALUES, max_size=6), before=VALUES, after=VALUES, indent=st.none() | st.just(1)
)
def test_items_are_those_that_a_whole_parse_gives_wherever_chunks_end(items, before, after, indent):
    text = json.dumps({"before": before, "items": items, "after": after}, indent=indent)
    assert list(array_items(Slowly(text), key="items")) == items


@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(
    data=st.one_of(
        st.binary(max_size=100),
        st.text(alphabet='[]{}:,"\\ 0a.-e\n', max_size=60).map(str.encode),
        st.integers(0, 80).map(lambda end: json.dumps([KERNEL, KERNEL]).encode()[:end]),
    )
)
def test_any_bytes_end_in_slices_or_an_error(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    try:
        slices = list(read_slices(path))
    except FormatError:
        return
    assert slices
