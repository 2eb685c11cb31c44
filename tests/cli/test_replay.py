import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app, main
from equipoise.cli.offline.replay_run import replay
from equipoise.formats.recording import Recording
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape, Topology
from equipoise.settings.errors import InvalidSettingsError

LOADS = (
    Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny" / "loads.json"
)
POOL = ["--loads", str(LOADS), "--nodes", "2", "--ranks", "4", "--slots", "40", "--groups", "8"]
MODEL = ModelShape(num_layers=2, num_experts=8, num_groups=1, expert_bytes=10)
TOPOLOGY = Topology(node_of_rank=("n",) * 4, slots_per_rank=3)


def equipoise(*arguments, columns="120"):
    """What a command prints; its faults are raised as they are."""
    result = CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": columns})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def replayed(*arguments):
    """Policies by name."""
    document = json.loads(equipoise(*arguments, "--json"))
    return {policy["name"]: policy for policy in document["policies"]}


def skewed(hot, *, assignments=100_000.0):
    """A window [2, 8] in which two experts get half of the assignments."""
    shares = np.full((2, 8), 0.5 / 6)
    shares[:, list(hot)] = 0.25
    return shares * assignments


def run(windows, policy, *, window_s=10.0):
    windows = np.array(windows)
    recording = Recording(windows=windows, names=tuple(f"w{i}" for i in range(len(windows))))
    start = contiguous_layout(num_layers=2, num_experts=8, num_ranks=4, slots_per_rank=3)
    return replay(
        recording,
        name="x",
        policy=policy,
        model=MODEL,
        topology=TOPOLOGY,
        start=start,
        window_s=window_s,
    )


def test_a_switch_pays_on_the_next_window():
    steps = run([skewed((0, 1))] * 3, Policy()).windows
    assert steps[0].accepted
    assert steps[0].moves > 0
    assert steps[0].bytes == steps[0].moves * MODEL.expert_bytes
    assert steps[0].next_kept == pytest.approx(steps[0].balancedness)
    assert steps[0].next_taken > steps[0].next_kept + 0.02
    assert steps[1].balancedness == steps[0].next_taken
    assert steps[1].accepted is False
    assert (steps[1].moves, steps[2].next_taken) == (0, None)


def test_without_a_policy_nothing_moves():
    still = run([skewed((0, 1)), skewed((5, 6))], None)
    assert [step.accepted for step in still.windows] == [None, None]
    assert (still.moves, still.switches, still.rejections) == (0, 0, 0)


def test_a_policy_decides_when_its_interval_has_passed():
    decided = [
        step.accepted is not None
        for step in run([skewed((0, 1))] * 7, Policy(interval_s=30.0)).windows
    ]
    assert decided == [False, False, True, False, False, True, False]


def test_intervals_that_rounding_misses_are_kept():
    steps = run(
        [skewed((0, 1))] * 9, Policy(interval_s=0.3, fast_half_life_s=0.1), window_s=0.1
    ).windows
    assert [i for i, step in enumerate(steps) if step.accepted is not None] == [2, 5, 8]


def test_an_interval_shorter_than_a_window_decides_at_each():
    steps = run([skewed((0, 1))] * 3, Policy(interval_s=3.0)).windows
    assert all(step.accepted is not None for step in steps)


def test_a_window_without_traffic_decides_nothing():
    replayed = run([skewed((0, 1)), np.zeros((2, 8)), skewed((0, 1))], Policy())
    steps = replayed.windows
    assert [step.accepted is None for step in steps] == [False, True, False]


def test_a_window_without_traffic_measures_nothing():
    replayed = run([skewed((0, 1)), np.zeros((2, 8)), skewed((0, 1))], None)
    first, idle, last = replayed.windows
    assert (idle.balancedness, first.next_kept, first.next_taken) == (None, None, None)
    assert first.balancedness == last.balancedness < 1
    assert replayed.balancedness_mean == replayed.balancedness_min == first.balancedness


def test_a_shift_of_traffic_is_noticed_and_answered():
    steps = run([skewed((0, 1))] * 4 + [skewed((5, 6))] * 2, Policy()).windows
    assert [step.shifted for step in steps] == [False, False, False, False, True, False]
    assert steps[4].accepted
    assert steps[4].next_taken > steps[4].next_kept


def test_too_few_assignments_are_rejected_with_that_reason():
    (step, _) = run([skewed((0, 1), assignments=100.0)] * 2, Policy()).windows
    assert step.accepted is False
    assert "100 assignments per layer, but a decision needs 2000" in step.reason


def test_the_models_own_recording_is_balanced_better_than_by_never_moving():
    policies = replayed(*POOL, "--policy", "default", "--policy", "lazy=min_gain=1")
    assert list(policies) == ["never", "default", "lazy"]
    assert policies["never"]["policy"] is None
    assert policies["default"]["policy"]["interval_s"] == 10.0
    assert policies["default"]["balancedness_mean"] > policies["never"]["balancedness_mean"]
    assert policies["lazy"]["balancedness_mean"] == policies["never"]["balancedness_mean"]
    assert policies["lazy"]["rejections"] == 12
    windows = policies["default"]["windows"]
    assert [window["window"] for window in windows[:5]] == [
        "code/0", "code/1", "code/2", "code/3", "english/0",
    ]  # fmt: skip
    assert policies["default"]["moves"] == sum(window["moves"] for window in windows)
    assert policies["default"]["balancedness_mean"] == pytest.approx(
        np.mean([window["balancedness"] for window in windows])
    )
    for before, after in pairwise(windows):
        assert before["next_taken"] == after["balancedness"]


def test_a_current_layout_is_where_a_replay_starts(tmp_path):
    layout = tmp_path / "layout.json"
    planned = CliRunner().invoke(app, ["plan", *POOL, "--windows", "code", "--out", str(layout)])
    assert planned.exit_code == 0
    never = replayed(*POOL, "--current", str(layout))["never"]
    in_order = replayed(*POOL)["never"]
    assert never["windows"][0]["balancedness"] > in_order["windows"][0]["balancedness"]


def test_layers_that_share_places_are_replayed_per_layer_and_pooled():
    places = ["--places", "38", "--slots", "48"]
    both = replayed(*POOL, *places)
    assert list(both) == ["never", "default", "perLayer"]
    assert both["perLayer"]["policy"]["slots"] == "perLayer"
    for name in ("default", "perLayer"):
        assert both[name]["moves"]
        assert both[name]["balancedness_mean"] > both["never"]["balancedness_mean"] + 0.1
    assert both["perLayer"]["windows"] != both["default"]["windows"]
    assert "38 places each, up to 12 slots in a layer" in equipoise(*POOL, *places)
    assert list(replayed(*POOL, *places, "--policy", "default")) == ["never", "default"]


def test_several_files_are_replayed_in_order(tmp_path):
    for name, hot in (("b", 1), ("a", 0)):
        load = [[5000.0 if expert == hot else 100.0 for expert in range(8)]]
        (tmp_path / f"{name}.json").write_text(json.dumps({"logical_count": load}))
    never = replayed(
        "--loads", f"{tmp_path / 'b.json'},{tmp_path / 'a.json'}", "--ranks", "4"
    )["never"]  # fmt: skip
    assert [window["window"] for window in never["windows"]] == ["b", "a"]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_windows_and_totals_are_printed(columns):
    text = equipoise(*POOL, "--policy", "calm=min_gain=0.05", columns=columns)
    calm = replayed(*POOL, "--policy", "calm=min_gain=0.05")["calm"]
    assert "12 windows of 10 s, 4 layers x 32 experts; 4 ranks on 2 nodes, 40 slots" in text
    lines = text.splitlines()
    for window in calm["windows"]:
        (line,) = [line for line in lines if line.startswith(f"{window['window']} ")]
        assert f"{window['balancedness']:.3f}" in line
        assert ("switch" in line) == window["accepted"]
        if window["accepted"]:
            assert f"{window['next_kept']:.3f} → {window['next_taken']:.3f}" in line
    (total,) = [line for line in lines if line.startswith("calm ")]
    assert f"{calm['balancedness_mean']:.4f}" in total
    assert f"{calm['moves']:,}" in total


def test_reasons_are_printed_on_request():
    assert "the minimum gain" not in equipoise(*POOL, columns="200")
    assert "assignments per layer" in " ".join(
        equipoise(*POOL, "--reasons", "--policy", "x=min_assignments=1e9", columns="200").split()
    )


def test_the_picture_has_a_line_for_each_policy_and_is_the_same_every_time(tmp_path):
    pictures = []
    for name in ("one.svg", "two.svg"):
        path = tmp_path / name
        assert f"wrote {path}" in equipoise(*POOL, "--policy", "calm=min_gain=0.05",
                                               "--plot", str(path), columns="400")  # fmt: skip
        pictures.append(path.read_text())
    assert pictures[0] == pictures[1]
    words = "".join(ET.fromstring(pictures[0]).itertext())
    for label in ("never", "calm", "balancedness", "moves so far"):
        assert label in words


def test_a_png_is_drawn_too(tmp_path):
    equipoise(*POOL, "--plot", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*POOL, "--windows", "code/0"], "a replay needs at least two windows: name several files"),
        ([*POOL, "--window-s", "0"], "--window-s must be from 0.001 to 86400, not 0"),
        ([*POOL, "--plot", "x.jpg"], "--plot must end in .svg or .png, not 'x.jpg'"),
        ([*POOL, "--policy", "never=interval=20"], "--policy never: the name is reserved"),
        (
            [*POOL, "--places", "41"],
            r"--places: 41 of a rank must be at most 40, one in each of 10 slots \(--slots / --ra",
        ),
        (
            [*POOL, "--places", "40,40,40,7"],
            "--places: 127 of 4 ranks must be at least 128, one for each of 32 experts of 4 layers",
        ),
        ([*POOL, "--places", "40,40"], r"--places must list 4 ranks \(--ranks\) with at least 1"),
        ([*POOL, "--places", "-1"], "--places takes items such as 9 or 9x16, not '-1'"),
        ([*POOL, "--policy", "x"], "--policy x must be name=option=value"),
    ],
)
def test_invalid_options_are_rejected(arguments, words):
    with pytest.raises(InvalidSettingsError, match=words):
        equipoise(*arguments)


def test_without_matplotlib_a_picture_is_rejected_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr(
        "sys.argv", ["equipoise", "replay", *POOL, "--plot", str(tmp_path / "x.svg")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert "this needs equipoise[plots] (there is no matplotlib)" in output.err
    assert not output.out


def test_steady_traffic_of_few_assignments_is_not_planned_for_again_and_again():
    """144 ranks with two slots each: every new plan looks much better on its own sample."""
    rng = np.random.default_rng(5)
    shares = rng.lognormal(sigma=0.8, size=(6, 256))
    shares /= shares.sum(axis=1, keepdims=True)
    windows = rng.multinomial(10_000, shares, size=(20, 6)).astype(np.float64)
    made = replay(
        Recording(windows=windows, names=tuple(f"w{i}" for i in range(20))),
        name="steady",
        policy=Policy(),
        model=ModelShape(num_layers=6, num_experts=256, num_groups=1, expert_bytes=10),
        topology=Topology(node_of_rank=("n",) * 144, slots_per_rank=2),
        start=contiguous_layout(num_layers=6, num_experts=256, num_ranks=144, slots_per_rank=2),
        window_s=10.0,
    )
    num_slots = 6 * 288
    assert num_slots / 2 < made.moves < 3 * num_slots
    assert made.switches <= 6
