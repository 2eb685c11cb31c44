"""`equipoise overlap`: its figures are those of a count of whole microseconds."""

import gzip
import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.cli.overlap import names, timeline
from equipoise.cli.overlap.intervals import Collector, Intervals
from equipoise.cli.overlap.names import Names
from equipoise.formats.errors import FormatError
from equipoise.settings.errors import InvalidSettingsError


def run(path, *arguments, columns="120"):
    """What the command prints; its errors are raised as they are."""
    words = ["overlap", str(path), *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": columns})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def trace(tmp_path):
    def write(events, name="trace.json"):
        path = tmp_path / name
        data = json.dumps({"traceEvents": events}).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def event(cat, name, start, dur, *, pid=0, tid=7):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur}


KERNELS = {
    "ncclDevKernel_AllReduce": "communication",
    "deep_ep::internode::dispatch<false>": "communication",
    "fused_moe_kernel": "experts",
    "deep_gemm::m_grouped_gemm": "experts",
    "flash_fwd_kernel": "attention",
    "vectorized_elementwise_kernel": "other",
    "rotary_kernel": "other",
}
COPIES = {
    "Memcpy HtoD": "copies",
    "Memset (Device)": "copies",
    "Memcpy PtoP (Device -> Device)": "communication",
}
RANGES = {
    "equipoise.exchange": "exchange",
    "equipoise.experts": "experts",
    "equipoise.attention": "attention",
    "equipoise.layer 0": 0,
    "model.layers.3.mlp": 3,
    "ProfilerStep#5": "step",
    "1F1B": "nothing",
}
OPERATORS = {"c10d::alltoall_base_": "exchange", "gloo:all_to_all": "exchange", "aten::mm": "other"}


def stretch(one):
    return set(range(one["ts"], one["ts"] + one["dur"]))


def within(events, kinds, kind, cats):
    """The microseconds of all events of a category whose name is of a kind."""
    return set().union(
        *(stretch(e) for e in events if e["cat"] in cats and kinds.get(e["name"]) == kind)
    )


def counted_track(events, *, on_device):
    """Computation, communication, parts and layers of one track, by sets."""
    ranges = {"gpu_user_annotation"} if on_device else {"user_annotation"}
    names = RANGES | (KERNELS if on_device else OPERATORS)
    cats = ranges | ({"kernel"} if on_device else {"cpu_op"})
    exchanges = within(events, RANGES, "exchange", ranges)
    if on_device:
        kinds = ("experts", "attention", "other")
        work = set().union(*(within(events, KERNELS, kind, {"kernel"}) for kind in kinds))
        own = within(events, KERNELS | COPIES, "communication", {"kernel", "gpu_memcpy"})
    else:
        exchanges |= within(events, OPERATORS, "exchange", {"cpu_op"})
        work = within(events, OPERATORS, "other", {"cpu_op"}) | exchanges
        for part in ("experts", "attention"):
            work |= within(events, RANGES, part, ranges)
        own = set()
    computation = work - exchanges
    parts = {
        part: computation & within(events, names, part, cats) for part in ("experts", "attention")
    }
    layers = {layer: within(events, RANGES, layer, ranges) for layer in (0, 3)}
    return computation, own | (work & exchanges), parts, layers


def counted(events, *, on_device):
    """The document's figures, in whole microseconds, for one process."""
    by_track = {}
    for one in events:
        by_track.setdefault(one["tid"], []).append(one)
    tracks = [counted_track(own, on_device=on_device) for own in by_track.values()]
    windows = {layer: set().union(*(track[3][layer] for track in tracks)) for layer in (0, 3)}
    # A track without ranges of layers is in those of the others.
    tracks = [(*own, of if any(of.values()) else windows) for *own, of in tracks]
    computation = set().union(*(track[0] for track in tracks))
    communication = set().union(*(track[1] for track in tracks))
    exposed = communication - computation
    ranges = {"gpu_user_annotation"} if on_device else {"user_annotation"}
    experts = set().union(*(track[2]["experts"] for track in tracks))
    copies = within(events, COPIES, "copies", {"gpu_memcpy", "gpu_memset"}) if on_device else set()
    busy = computation | communication | copies
    span = max(busy) + 1 - min(busy)
    steps = within(events, RANGES, "step", ranges) or set(range(min(busy), max(busy) + 1))
    return {
        "computation_us": len(computation),
        "communication_us": len(communication),
        "exposed_us": len(exposed),
        "hidden_us": len(communication & computation),
        "copies_us": len(copies),
        "experts_us": len(experts),
        "attention_us": len(set().union(*(track[2]["attention"] for track in tracks))),
        "busy_us": len(busy),
        "span_us": span,
        "idle_us": span - len(busy),
        "step_us": len(steps),
        "experts_share_of_step": len(experts & steps) / len(steps),
        "layers": {
            layer: {
                "computation_us": len(set().union(*(t[0] & t[3][layer] for t in tracks))),
                "communication_us": len(set().union(*(t[1] & t[3][layer] for t in tracks))),
                "exposed_us": len(set().union(*(t[1] & t[3][layer] for t in tracks)) & exposed),
                "experts_us": len(set().union(*(t[2]["experts"] & t[3][layer] for t in tracks))),
            }
            for layer in (0, 3)
            if windows[layer]
        },
        "tracks": {
            str(name): {
                "computation_us": len(track[0]),
                "communication_us": len(track[1]),
                "exposed_us": len(track[1] & exposed),
            }
            for name, track in zip(by_track, tracks, strict=True)
        },
    }


def random_events(rng, *, on_device):
    """Up to 25 slices on three tracks: they overlap, touch, repeat, and are in any order."""
    if on_device:
        choices = [("kernel", KERNELS), ("kernel", KERNELS), ("gpu_memcpy", COPIES)]
        choices.append(("gpu_user_annotation", RANGES))
    else:
        choices = [("cpu_op", OPERATORS), ("cpu_op", OPERATORS), ("user_annotation", RANGES)]
    events = []
    for _ in range(rng.randint(1, 25)):
        cat, names = rng.choice(choices)
        start, dur = rng.randint(0, 60), rng.choice([1, 2, 3, 5, 8, 30])
        events.append(event(cat, rng.choice(list(names)), start, dur, tid=rng.choice([7, 23, 27])))
    # One slice of work on every track, so that every track is shown.
    sure = ("kernel", "rotary_kernel") if on_device else ("cpu_op", "aten::mm")
    events += [event(*sure, rng.randint(0, 60), 1, tid=tid) for tid in (7, 23, 27)]
    rng.shuffle(events)
    return events


@pytest.mark.parametrize("on_device", [True, False], ids=["streams", "threads"])
def test_every_figure_is_that_of_a_count_of_microseconds(trace, on_device):
    rng = random.Random(20 + on_device)
    for _ in range(60):
        events = random_events(rng, on_device=on_device)
        noise = [event("python_function", "wait", 0, 900), event("cuda_runtime", "launch", 0, 900)]
        noise += [event("cpu_op", "aten::mm", 0, 900)] if on_device else []
        document = json.loads(run(trace([*events, *noise]), "--json"))
        expected = counted(events, on_device=on_device)
        layers, tracks = expected.pop("layers"), expected.pop("tracks")
        assert {key: document[key] for key in expected} == pytest.approx(expected), events
        assert {row["layer"] for row in document["layers"]} == set(layers)
        for row in document["layers"]:
            figures = layers[row["layer"]]
            assert {key: row[key] for key in figures} == pytest.approx(figures), events
        assert {row["track"] for row in document["tracks"]} == set(tracks)
        for row in document["tracks"]:
            figures = tracks[row["track"]]
            assert {key: row[key] for key in figures} == pytest.approx(figures), events


def test_processes_are_added_up_and_one_hides_nothing_of_another(trace):
    events = [event("kernel", "nccl", 0, 10), event("kernel", "gemm", 0, 10, pid=1)]
    document = json.loads(run(trace(events), "--json"))
    assert document["processes"] == 2
    assert (document["communication_us"], document["exposed_us"]) == (10, 10)
    events.append(event("kernel", "gemm", 4, 3, tid=8))
    document = json.loads(run(trace(events), "--json"))
    assert (document["computation_us"], document["hidden_us"]) == (13, 3)
    assert document["hidden_share"] == pytest.approx(0.3)


def test_a_packed_trace_gives_the_same_document(trace):
    events = random_events(random.Random(3), on_device=True)
    plain, packed = trace(events), trace(events, name="trace.json.gz")
    assert run(plain, "--json") == run(packed, "--json")


def test_names_can_be_given(trace):
    path = trace([event("kernel", "send_it", 0, 4), event("kernel", "wisdom", 4, 6, tid=8)])
    plain = json.loads(run(path, "--json"))
    assert (plain["communication_us"], plain["experts_us"]) == (0, 0)
    assert plain["hidden_share"] is None
    named = json.loads(run(path, "--json", "--communication", "SEND", "--experts", "^wis"))
    assert (named["communication_us"], named["experts_us"]) == (4, 6)
    with pytest.raises(InvalidSettingsError, match="--experts is not a regular expression"):
        run(path, "--experts", "(")


def test_names_that_match_nothing_are_noted_and_empty_ones_are_an_error(trace):
    path = trace([event("kernel", "gemm", 0, 5)])
    assert "note: no name of work matches --experts 'zzz'" in run(path, "--experts", "zzz")
    assert json.loads(run(path, "--communication", "zzz", "--json"))["notes"] == [
        "no name of work matches --communication 'zzz'"
    ]
    with pytest.raises(InvalidSettingsError, match="--experts must not be empty"):
        run(path, "--experts", "")


def test_the_table_shows_steps_layers_and_streams(trace):
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 50, pid=99),
        event("user_annotation", "ProfilerStep#2", 50, 50, pid=99),
        event("kernel", "moe_gemm", 0, 50),
        event("gpu_user_annotation", "layer 12", 0, 60),
        event("kernel", "ncclAllToAll", 25, 75, tid=27),
    ]
    text = run(trace(events))
    assert "1 device, 2 streams, 2 steps" in text
    assert "hidden share of communication: 33.3%" in text
    assert "experts' share of a step: 50.0% (a step takes 50 µs on average)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["12", "50", "50", "0", "35", "10", "71.4%"] in rows
    assert ["0", "27", "0", "0", "0", "75", "50", "33.3%"] in rows


def test_a_trace_without_layers_says_how_they_are_named(trace):
    assert 'no range names a layer ("layer 3")' in run(trace([event("kernel", "gemm", 0, 1)]))


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_the_picture_is_the_same_each_time(trace, tmp_path, name):
    path = trace(random_events(random.Random(4), on_device=True))
    images = []
    for _ in range(2):
        run(path, "--plot", tmp_path / name)
        images.append((tmp_path / name).read_bytes())
    assert images[0] == images[1]
    if name.endswith("svg"):
        assert b"exposed communication" in images[0]
    with pytest.raises(InvalidSettingsError, match="--plot must end in"):
        run(path, "--plot", tmp_path / "picture.gif")


def test_long_names_leave_room_in_the_picture(trace, tmp_path, recwarn):
    names = ["a" * 300 + end for end in "xy"]
    path = trace([event("kernel", "gemm", 0, 5, tid=name) for name in names])
    run(path, "--plot", tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_bytes().count("…".encode()) == 2
    assert not recwarn.list


def test_slices_that_overlap_in_a_stream_are_counted_once_and_noted(trace):
    events = [event("kernel", "gemm", 0, 10), event("kernel", "gemm", 5, 10)]
    document = json.loads(run(trace(events), "--json"))
    assert document["computation_us"] == 15
    (note,) = document["notes"]
    assert note.startswith("slices of stream 7 overlap by 25% of their time: the profiler merged")
    assert "note: slices of stream 7 overlap" in run(trace(events))
    nested = [event("cpu_op", "aten::linear", 0, 10), event("cpu_op", "aten::mm", 2, 5)]
    assert json.loads(run(trace(nested), "--json"))["notes"] == []


def test_a_clock_that_jumps_is_noted_and_one_that_jumps_a_day_is_an_error(trace):
    events = [event("kernel", "gemm", 0, 10), event("kernel", "gemm", 3_600_000_000, 10)]
    (note,) = json.loads(run(trace(events), "--json"))["notes"]
    assert "the process was idle, or its clock jumped" in note
    for jump_us in (-86_400_000_001, 86_400_000_000):
        path = trace([event("kernel", "gemm", 0, 10), event("kernel", "late", jump_us, 10)])
        with pytest.raises(FormatError, match=r"trace[.]json: 'late' at .* more than a day from"):
            run(path)


@pytest.mark.parametrize(
    "events",
    [
        [event("python_function", "wait", 0, 5)],
        [event("kernel", "gemm", 0, 0)],
        [event("user_annotation", "layer 3", 0, 5)],
        [event("gpu_user_annotation", "layer 3", 0, 5), event("cpu_op", "aten::mm", 0, 5)],
    ],
    ids=["waits", "no time", "ranges", "a device without kernels"],
)
def test_a_trace_without_work_is_an_error(trace, events):
    with pytest.raises(FormatError, match=r"trace[.]json: it has no work of any duration"):
        run(trace(events))


def test_a_trace_with_too_many_intervals_is_an_error(trace, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_INTERVALS", 1000)
    apart = [event("kernel", "gemm", 2 * number, 1) for number in range(1000)]
    with pytest.raises(FormatError, match="more than 1,000 separate intervals: profile fewer"):
        run(trace(apart))
    tracks = [event("kernel", "gemm", 0, 1, tid=number) for number in range(20)]
    with pytest.raises(FormatError, match="more than 1,000 separate intervals"):
        run(trace(tracks))
    joined = [event("kernel", "gemm", number, 1) for number in range(2000)]
    assert json.loads(run(trace(joined), "--json"))["computation_us"] == 2000


def test_a_trace_with_too_many_tracks_is_an_error(trace, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_TRACKS", 10)
    tracks = [event("kernel", "gemm", 0, 1, tid=number) for number in range(11)]
    assert len(json.loads(run(trace(tracks[:10]), "--json"))["tracks"]) == 10
    with pytest.raises(FormatError, match="more than 10 threads or streams: profile fewer"):
        run(trace(tracks))


@pytest.mark.parametrize("limit", ["MAX_INTERVALS", "MAX_TRACKS"])
def test_threads_before_the_first_kernel_exceed_no_limit(trace, monkeypatch, limit):
    monkeypatch.setattr(timeline, limit, 100)
    threads = [event("cpu_op", "aten::mm", 2 * at, 1, tid=at) for at in range(200)]
    path = trace([*threads, event("kernel", "gemm", 0, 5), *threads])
    assert json.loads(run(path, "--json"))["computation_us"] == 5
    with pytest.raises(FormatError, match="more than 100 "):
        run(trace(threads))


def test_a_process_is_asked_only_for_its_own_layers(trace, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "equipoise.cli.overlap.analysis._Process._window",
        lambda _, track, layer: asked.append(layer) or track.intervals(layer),
    )
    events = []
    for one in range(40):
        events.append(event("kernel", "gemm", 10 * one, 5, pid=one))
        events.append(event("gpu_user_annotation", f"layer {one}", 10 * one, 3, pid=one))
    layers = json.loads(run(trace(events), "--json"))["layers"]
    assert [(row["layer"], row["computation_us"]) for row in layers] == [(n, 3) for n in range(40)]
    assert set(asked) == set(range(40))
    assert len(asked) < 10 * 40


def test_remembered_names_are_bounded_by_their_characters(monkeypatch):
    monkeypatch.setattr(names, "_MAX_KNOWN_CHARS", 10_000)
    found = Names()
    for number in range(100):
        assert found["x" * 4000 + f" layer {number}"].layer == number
        assert sum(map(len, found._known)) <= 10_000 + 4100


@pytest.mark.parametrize("name", ["\ud800", "\x1b[31mred", "two\nlines"])
def test_names_of_tracks_are_shown_printable(trace, tmp_path, name):
    events = [event("kernel", "gemm", 0, 10, tid=name), event("kernel", "gemm", 5, 9, tid=name)]
    path = trace(events)
    (row,) = json.loads(run(path, "--json"))["tracks"]
    assert row["track"].isprintable()
    text = run(path, "--plot", tmp_path / "picture.svg", columns="400")
    assert row["track"] in text
    assert all(line.isprintable() for line in text.splitlines())


def test_sets_of_time_are_exact_where_they_are_cut_into_pieces(monkeypatch):
    monkeypatch.setattr("equipoise.cli.overlap.intervals._PIECE", 3)
    rng = random.Random(5)
    for _ in range(200):
        sets, expected = [], []
        for _ in range(2):
            collector, moments = Collector(), set()
            for _ in range(rng.randint(0, 12)):
                start, length = rng.randint(0, 60), rng.randint(0, 6)
                collector.add(start, start + length)
                moments |= set(range(start, start + length))
            sets.append(collector.intervals())
            expected.append(moments)
        (a, b), (x, y) = sets, expected
        assert moments_of(a & b) == x & y
        assert moments_of(a - b) == x - y
        assert moments_of(Intervals.union([a, b])) == x | y
        times = np.arange(-2, 70)
        assert a.before(times).tolist() == [sum(m < time for m in x) for time in times]


def moments_of(intervals):
    moments = [set(range(s, e)) for s, e in zip(intervals.starts, intervals.ends, strict=True)]
    assert sum(map(len, moments)) == intervals.total
    assert (intervals.starts[1:] > intervals.ends[:-1]).all()
    return set().union(*moments)
