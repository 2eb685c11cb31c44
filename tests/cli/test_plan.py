import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app, main
from equipoise.formats.errors import FormatError
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_placement, write_placement
from equipoise.formats.format import Format
from equipoise.formats.placement import ExpertPlacement
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.settings.errors import InvalidSettingsError

TINY = Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny"
LOADS = str(TINY / "loads.json")
POOL = ["--loads", LOADS, "--nodes", "2", "--ranks", "4", "--slots", "40", "--groups", "8"]


def equipoise(*arguments):
    """What a command prints; its faults are raised as they are."""
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def planned(*arguments):
    return json.loads(equipoise(*arguments, "--json"))


def total_load():
    domains = json.loads(Path(LOADS).read_text())["domains"]
    return (
        np.array([window for windows in domains.values() for window in windows]).sum(axis=0) * 1.0
    )


def test_the_numbers_are_those_of_the_layout_that_is_written(tmp_path):
    out = tmp_path / "layout.json"
    result = planned(*POOL, "--out", str(out))
    placement = read_placement(out)
    carried = rank_loads(placement.expert_of_slot, load=total_load(), num_ranks=4)
    assert result["balancedness"] == pytest.approx(balancedness(carried))
    assert result["balancedness_min_layer"] == pytest.approx(
        (carried.mean(axis=1) / carried.max(axis=1)).min()
    )
    in_order = np.tile(np.arange(40) % 32, (4, 1))
    assert result["moves"] == np.count_nonzero(placement.expert_of_slot != in_order)
    assert result["bytes"] == result["moves"] * result["expert_bytes"]
    assert result["balancedness_current"] < result["balancedness"] <= result["bound"] + 1e-9
    assert 0 <= result["off_node_share"] <= 1
    assert result["plan_ms"] > 0
    assert result["reason"]
    assert placement.num_ranks == 4


@pytest.mark.parametrize("form", Format)
def test_a_plan_is_written_for_every_engine_and_read_again_as_the_current_layout(tmp_path, form):
    out = tmp_path / "layout"
    written = planned(*POOL, "--first-moe-layer", "1", "--out", str(out), "--format", form)
    assert read_placement(out, expected=Expected(first_moe_layer=1)).num_layers == 4
    again = planned(*POOL, "--first-moe-layer", "1", "--current", str(out))
    assert (again["moves"], again["bytes"], again["moves_from"]) == (0, 0, "current")
    assert again["balancedness"] == pytest.approx(written["balancedness"])
    assert again["balancedness_current"] == pytest.approx(written["balancedness"])


def test_a_model_config_gives_groups_layers_and_bytes():
    result = planned("--loads", LOADS, "--ranks", "4", "--model-config", str(TINY / "config.json"))
    assert (result["num_groups"], result["first_moe_layer"]) == (8, 1)
    assert result["expert_bytes"] == 3 * 128 * 48 * 2
    assert result["num_slots"] == 32


def test_only_the_windows_that_are_named_are_planned_for():
    assert planned(*POOL, "--windows", "code")["num_windows"] == 4
    assert planned(*POOL, "--windows", "code/0,english/1")["num_windows"] == 2
    assert planned(*POOL, "--windows", "code", "--windows", "code/0")["num_windows"] == 4


def test_hierarchical_plans_serve_everything_on_its_node():
    result = planned(*POOL, "--algorithm", "hierarchical")
    assert (result["algorithm"], result["off_node_share"]) == ("hierarchical", pytest.approx(0))


@pytest.fixture
def code_layout(tmp_path):
    """A layout planned for code."""
    path = tmp_path / "code.json"
    planned(*POOL, "--windows", "code", "--out", str(path))
    return path


def test_a_target_is_reached_with_fewer_moves_than_a_plan_from_scratch(code_layout):
    english = [*POOL, "--windows", "english", "--current", str(code_layout)]
    scratch = planned(*english, "--algorithm", "global")
    half_way = (scratch["balancedness_current"] + scratch["balancedness"]) / 2
    target = planned(*english, "--target-balancedness", str(half_way))
    assert target["algorithm"] == "incremental"
    assert target["balancedness"] >= half_way > target["balancedness_current"]
    assert 0 < target["moves"] < scratch["moves"]


def test_from_a_current_layout_a_plan_is_incremental_unless_asked_otherwise(code_layout):
    english = [*POOL, "--windows", "english", "--current", str(code_layout)]
    made, scratch = planned(*english), planned(*english, "--algorithm", "global")
    assert (made["algorithm"], scratch["algorithm"]) == ("incremental", "global")
    # It moves nothing for what chance may explain.
    assert made["balancedness"] >= scratch["balancedness"] - 0.01
    assert made["moves"] < scratch["moves"]
    local = planned(*english, "--locality", "0.3")
    assert local["algorithm"] == "incremental"
    assert local["off_node_share"] < made["off_node_share"]
    assert planned(*english, "--locality", "0.3", "--algorithm", "local")["algorithm"] == "local"


def test_max_moves_is_respected_and_the_curve_shows_the_gain(code_layout):
    english = [*POOL, "--windows", "english", "--current", str(code_layout)]
    limited = planned(*english, "--max-moves", "5")
    assert 0 < limited["moves"] <= 5
    assert limited["balancedness"] > limited["balancedness_current"]
    assert limited["curve"][0] == [0, pytest.approx(limited["balancedness_current"])]
    moves, reached = zip(*limited["curve"], strict=True)
    assert list(moves) == sorted(moves)
    assert list(reached) == sorted(reached)
    assert "best balancedness by number of moves" in equipoise(*english, "--max-moves", "5")


def test_no_moves_are_nothing(code_layout):
    none = planned(*POOL, "--windows", "english", "--current", str(code_layout), "--max-moves", "0")
    assert (none["moves"], none["balancedness"]) == (0, none["balancedness_current"])


def test_moves_that_must_be_made_exceed_a_budget(tmp_path):
    pool, path = [*POOL, "--slots", "48"], str(tmp_path / "layout.json")
    planned(*pool, "--windows", "code", "--algorithm", "global", "--out", path)
    english = [*pool, "--windows", "english", "--current", path, "--max-moves", "0"]
    assert planned(*english)["moves"] == 0
    without_one = planned(*english, "--exclude-ranks", "1")
    assert without_one["moves"] == without_one["lost_experts"] > 0
    assert f"{without_one['lost_experts']} of which restore lost experts" in without_one["reason"]
    assert "lost experts" in equipoise(*english, "--exclude-ranks", "1")
    assert planned(*english, "--locality", "0")["off_node_share"] == pytest.approx(0)


def test_the_help_says_what_has_no_default_and_what_exceeds_a_budget():
    found = " ".join(CliRunner().invoke(app, ["plan", "--help"]).stdout.split())
    assert "[default: 0]" not in found
    assert "Moves that restore lost experts" in found


def test_chance_moves_nothing(tmp_path):
    shares = np.random.default_rng(1).dirichlet(np.ones(64), size=6)
    layout = tmp_path / "layout.json"
    pool = ["--ranks", "8", "--slots", "72"]

    def counts(seed, name):
        drawn = np.random.default_rng(seed).multinomial(200_000, shares)
        (tmp_path / name).write_text(json.dumps({"logical_count": drawn.tolist()}))
        return str(tmp_path / name)

    planned("--loads", counts(2, "one.json"), *pool, "--out", str(layout))
    again = planned("--loads", counts(3, "two.json"), *pool, "--current", str(layout))
    assert again["moves"] == 0
    assert again["reason"]


def test_locality_ranges_from_hierarchical_to_global():
    shares = [planned(*POOL, "--locality", dial)["off_node_share"] for dial in ("0", "0.3", "1")]
    assert shares[0] == pytest.approx(0)
    assert shares[0] <= shares[1] <= shares[2]
    assert shares[2] > 0
    assert planned(*POOL, "--locality", "0.3")["algorithm"] == "local"


def test_excluded_ranks_get_nothing(tmp_path):
    out = tmp_path / "layout.json"
    result = planned(
        "--loads", LOADS, "--ranks", "8", "--slots", "56", "--exclude-ranks", "3,6-7",
        "--out", str(out),
    )  # fmt: skip
    assert (result["num_ranks"], result["num_slots"]) == (5, 35)
    assert read_placement(out).expert_of_slot.shape == (4, 35)


def test_twins_of_a_peers_layout_are_repaired_and_counted(tmp_path):
    table = np.tile(np.arange(40) % 32, (4, 1))
    table[2, 32:34] = [29, 29]
    path = tmp_path / "peer.json"
    write_placement(ExpertPlacement(expert_of_slot=table, num_experts=32), path, form=Format.VLLM)
    result = planned(*POOL, "--current", str(path))
    assert result["twins_in_current"] > 0
    assert "hold" in equipoise(*POOL, "--current", str(path))


def test_the_text_output_has_the_same_figures(tmp_path):
    out = tmp_path / "layout.json"
    text = equipoise(*POOL, "--expert-bytes", "1048576", "--out", str(out))
    result = planned(*POOL, "--expert-bytes", "1048576")
    for words in (
        "4 layers x 32 experts, 12 windows of loads; 4 ranks on 2 nodes, 40 slots",
        f"{result['balancedness_current']:.4f}",
        f"{result['balancedness']:.4f}",
        f"{result['moves']:,}",
        "1.0 MiB per expert (from --expert-bytes)",
        result["reason"],
        f"wrote {out} (equipoise format)",
    ):
        assert " ".join(words.split()) in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--loads", LOADS, "--ranks", "4", "--nodes", "3"],
            "--ranks 4 cannot be split evenly over",
        ),
        ([*POOL, "--slots", "42"], "--slots 42 .* over --ranks 4: use 40 or 44"),
        ([*POOL, "--slots", "1000000000000"], "--ranks and --slots must be at most 1000000"),
        (
            [*POOL, "--slots", "400000"],
            "--slots 400000 is more than one slot per expert on each rank: use at most 128",
        ),
        ([*POOL, "--slots", "0"], "--slots must be at least 1, not 0"),
        ([*POOL, "--slots", "-40"], "--slots must be at least 1, not -40"),
        ([*POOL, "--nodes", "0"], "--nodes must be at least 1, not 0"),
        ([*POOL, "--ranks", "0"], "--ranks must be at least 1, not 0"),
        ([*POOL, "--slots", "28"], "--slots 28 cannot hold 32 experts: use 32 or more"),
        ([*POOL, "--max-moves", "3", "--target-balancedness", "0.9"], "cannot be combined"),
        ([*POOL, "--max-moves", "-1"], "--max-moves must be at least 0, not -1"),
        ([*POOL, "--target-balancedness", "2"], "must be above 0 and at most 1, not 2"),
        ([*POOL, "--max-moves", "3", "--algorithm", "global"], "work with incremental plans only"),
        ([*POOL, "--locality", "1.5"], "locality must be from 0 to 1, not 1.5"),
        (
            [*POOL, "--locality", "1", "--algorithm", "global"],
            "--locality works with --algorithm l",
        ),
        ([*POOL, "--groups", "5"], "--groups 5 does not divide 32 experts"),
        ([*POOL, "--groups", "0"], "groups must be at least 1, not 0"),
        ([*POOL, "--exclude-ranks", "4"], "--exclude-ranks 4: the ranks are 0 to 3"),
        ([*POOL, "--exclude-ranks", "x"], "--exclude-ranks takes numbers and ranges"),
        ([*POOL, "--exclude-ranks", "3-1"], "--exclude-ranks: 3-1 is not a valid range"),
        ([*POOL, "--exclude-ranks", "0-3"], "no rank is left"),
        ([*POOL, "--exclude-ranks", "0"], "30 slots in total cannot hold 32 experts"),
    ],
)
def test_contradictory_options_are_rejected(arguments, words):
    with pytest.raises(InvalidSettingsError, match=words):
        equipoise(*arguments)


def test_a_layout_of_another_pool_is_rejected(tmp_path):
    path = tmp_path / "other.json"
    rows = [[i % 32 for i in range(40)]] * 4
    path.write_text(json.dumps({"num_experts": 32, "num_ranks": 8, "expert_of_slot": rows}))
    with pytest.raises(FormatError, match=r"other\.json: 8 ranks, but --ranks is 4"):
        equipoise(*POOL, "--current", str(path))
    with pytest.raises(FormatError, match=r"other\.json: 40 slots, but --slots is 44"):
        equipoise(*POOL, "--slots", "44", "--current", str(path))


def test_ambiguous_layer_numbers_are_rejected(tmp_path):
    with pytest.raises(FormatError, match=r"eplb\.yaml: TensorRT-LLM numbers .* --first-moe-layer"):
        equipoise(*POOL, "--out", str(tmp_path / "eplb.yaml"), "--format", "tensorrt-llm")
    counted = tmp_path / "sglang.json"
    rows = [[i % 32 for i in range(40)]] * 5
    counted.write_text(json.dumps({"physical_to_logical_map": rows}))
    with pytest.raises(FormatError, match=r"it has 5 MoE layers, expected 4; .* dense layers"):
        equipoise(*POOL, "--current", str(counted))
    assert planned(*POOL, "--current", str(counted), "--first-moe-layer", "1")["moves"] > 0


@pytest.mark.parametrize("command", ["plan", "replay", "whatif"])
def test_loads_without_a_file_are_rejected(command):
    pool = [] if command == "whatif" else ["--ranks", "4"]
    result = CliRunner().invoke(app, [command, "--loads", "", *pool])
    assert isinstance(result.exception, InvalidSettingsError)
    assert str(result.exception) == "--loads: name at least one file"


@pytest.mark.parametrize(
    "arguments", [["--loads", "nowhere", "--ranks", "4"], [*POOL, "--groups", "5"]]
)
def test_bad_input_is_one_line_and_exit_status_2(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["equipoise", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("equipoise: ")


def test_the_tools_need_no_torch_safetensors_or_matplotlib():
    commands = [
        ["plan", *POOL],
        ["replay", *POOL],
        ["whatif", "--loads", LOADS, "--ranks", "4"],
    ]
    program = f"""
import sys
for name in ("torch", "safetensors", "matplotlib"):
    sys.modules[name] = None
from equipoise.cli.main import main
for command in {commands}:
    sys.argv = ["equipoise", *command]
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines().count("status 0") == len(commands)


def test_a_plan_is_the_same_every_time():
    first, second = planned(*POOL), planned(*POOL)
    del first["plan_ms"], second["plan_ms"]
    assert first == second


def test_the_shared_expert_is_planned_as_one_routed_more():
    pool = ["--loads", LOADS, "--ranks", "40", "--shared-expert", "--experts-per-token", "4"]
    result = planned(*pool)
    assert (result["num_experts"], result["num_slots"], result["num_groups"]) == (33, 40, 1)
    assert result["balancedness"] == pytest.approx(result["bound"], rel=1e-6)
    assert len(result["shared_replicas"]) == 4
    assert min(result["shared_replicas"]) >= 1
    fixed = planned(*pool, "--shared-ranks", "3")
    assert fixed["shared_replicas"] == [3, 3, 3, 3]
    assert fixed["balancedness"] <= result["balancedness"]
    assert "shared expert" in equipoise(*pool)


def test_a_shared_expert_is_shown_only_if_planned():
    assert planned(*POOL)["shared_replicas"] is None
    assert "shared expert" not in equipoise(*POOL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shared-expert", "--groups", "8"], "cannot be combined with --groups"),
        (["--shared-ranks", "2"], "needs --shared-expert"),
        (["--shared-expert", "--shared-ranks", "40"], "leaves no rank"),
        (
            ["--shared-expert", "--shared-ranks", "2", "--max-moves", "1"],
            "cannot be combined with --max-moves",
        ),
        (["--shared-expert", "--slots", "80", "--shared-ranks", "2"], "1 slot per rank"),
        (["--slots-of-rank", "1x40", "--slots", "40"], "cannot be combined with --slots"),
        (["--slots-of-rank", "1x39"], "must list 40 ranks"),
        (["--slots-of-rank", "1x39,0"], "must list 40 ranks"),
        (["--slots-of-rank", "1xx40"], "not '1xx40'"),
    ],
)
def test_contradictions_about_slots_are_rejected(arguments, words):
    with pytest.raises(InvalidSettingsError, match=re.escape(words)):
        equipoise("--loads", LOADS, "--ranks", "40", "--experts-per-token", "4", *arguments)


def test_ranks_may_have_unequal_slots():
    pool = ["--loads", LOADS, "--nodes", "2", "--ranks", "4"]
    result = planned(*pool, "--slots-of-rank", "8x2,12x2")
    assert (result["num_slots"], result["num_ranks"]) == (40, 4)
    assert result["balancedness"] > max(0.95, result["balancedness_current"])
    with pytest.raises(InvalidSettingsError, match="31 slots, too few for 32 experts"):
        equipoise(*pool, "--slots-of-rank", "8x3,7")
    with pytest.raises(InvalidSettingsError, match="33 slots, more than one per expert: use at"):
        equipoise(*pool, "--slots-of-rank", "8x3,33")


def test_layers_that_share_places_keep_to_a_locality(tmp_path):
    pool = [*POOL, "--slots", "48", "--places", "40"]
    anywhere = tmp_path / "anywhere.json"
    assert planned(*pool, "--out", str(anywhere))["off_node_share"] > 0
    at_home = planned(*pool, "--locality", "0")
    assert (at_home["algorithm"], at_home["off_node_share"]) == ("local", pytest.approx(0))
    returned = planned(*pool, "--locality", "0", "--current", str(anywhere))
    assert returned["algorithm"] == "incremental"
    assert returned["off_node_share"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("places", "of_rank", "words"),
    [
        ("38", [38, 38, 38, 38], "38 places each"),
        ("44x2,40,12", [44, 44, 40, 12], "12 to 44 places each"),
    ],
)
def test_layers_share_the_places_of_ranks_which_may_be_unequal(tmp_path, places, of_rank, words):
    out = tmp_path / "layout.json"
    pool = [*POOL, "--slots", "48"]
    result = planned(*pool, "--places", places, "--out", str(out))
    placement = read_placement(out)
    used = (placement.expert_of_slot >= 0).reshape(4, 4, 12).sum(axis=(0, 2))
    assert result["places_of_rank"] == of_rank
    assert sum(used) >= 128
    assert (used <= of_rank).all()
    assert result["balancedness"] == pytest.approx(
        balancedness(rank_loads(placement.expert_of_slot, load=total_load(), num_ranks=4))
    )
    assert words in equipoise(*pool, "--places", places)
    again = planned(*pool, "--places", places, "--current", str(out))
    assert again["places_of_rank"] == of_rank
    assert again["moves"] == 0 or again["balancedness"] > result["balancedness"] + 0.01
    with pytest.raises(FormatError, match=r"rank 2 holds \d+ experts, but --places gives it 11"):
        planned(*pool, "--places", "48x2,11,48", "--current", str(out))


def test_shares_are_written_and_match_the_figures(tmp_path):
    out = tmp_path / "layout.json"
    sparse = ["--loads", LOADS, "--ranks", "24", "--slots", "48", "--algorithm", "global"]
    even = planned(*sparse)
    result = planned(*sparse, "--weighted", "--out", str(out))
    assert even["uneven_layers"] == 0
    assert result["uneven_layers"] > 0
    assert result["balancedness"] > even["balancedness"]
    placement = read_placement(out)
    carried = rank_loads(
        placement.expert_of_slot,
        load=total_load(),
        num_ranks=24,
        share_of_slot=placement.share_of_slot,
    )
    assert result["balancedness"] == pytest.approx(balancedness(carried))
    again = planned(*sparse, "--weighted", "--current", str(out))
    assert again["balancedness_current"] == pytest.approx(result["balancedness"])
    assert again["moves"] == 0
    assert "uneven shares" in equipoise(*sparse, "--weighted")


def test_weights_are_rejected_for_engines_that_know_none():
    with pytest.raises(
        InvalidSettingsError,
        match="--weighted works with --format equipoise only: vllm",
    ):
        equipoise(*POOL, "--weighted", "--out", "x.json", "--format", "vllm")
