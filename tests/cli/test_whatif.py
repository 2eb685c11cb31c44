import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.cli.offline.steps import balance_of_steps
from equipoise.cli.offline.whatif import (
    PoolOption,
    choose,
    knee,
    knee_text,
    topologies,
    topologies_of_places,
)
from equipoise.planning.layout import Layout
from equipoise.settings.errors import InvalidSettingsError

TINY = Path(__file__).parents[2] / "model" / "equipoise_model" / "checkpoints" / "tiny"
MODEL = ["--loads", str(TINY / "loads.json"), "--model-config", str(TINY / "config.json")]
NODES = [*MODEL, "--ranks-per-node", "2"]
SMALL = [*NODES, "--ranks", "2,4", "--windows", "code"]
TOKEN_BYTES = 5 * (64 + 16) * 2
POOL = PoolOption(
    num_ranks=4,
    num_nodes=1,
    num_slots=40,
    num_redundant=8,
    balancedness=0.9,
    balancedness_min_layer=0.8,
    bound=1.0,
    memory_bytes=1000,
    displaced_tokens=0,
    balancedness_replayed=None,
    moves_per_hour=None,
    bytes_per_hour=None,
)


def equipoise(*arguments, columns="120"):
    """What a command prints; its faults are raised as they are."""
    result = CliRunner().invoke(app, ["whatif", *arguments], env={"COLUMNS": columns})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def shapes(num_experts, **limits):
    return [
        (one.num_ranks, len(one.nodes), one.slots_per_rank)
        for one in topologies(num_experts, **limits)
    ]


def test_pools_have_slots_from_the_fewest_to_the_redundancy_allowed():
    assert shapes(32, rank_counts=[4, 16], ranks_per_node=8, max_redundant=16) == [
        (4, 4 // 4, 8), (4, 1, 9), (4, 1, 10), (4, 1, 11), (4, 1, 12),
        (16, 2, 2), (16, 2, 3),
    ]  # fmt: skip


def test_the_fewest_slots_are_always_tried():
    assert shapes(32, rank_counts=[24, 40], ranks_per_node=8, max_redundant=0) == [
        (24, 3, 2),
        (40, 5, 1),
    ]


def test_no_rank_has_more_slots_than_experts():
    found = shapes(4, rank_counts=[2], ranks_per_node=8, max_redundant=100)
    assert found == [(2, 1, 2), (2, 1, 3), (2, 1, 4)]
    pooled = topologies_of_places(
        4, num_layers=3, rank_counts=[2], ranks_per_node=8, max_redundant=100
    )
    assert [(one.slots_per_rank, one.places_of_rank[0]) for one in pooled] == [
        (4, 6),
        (4, 8),
        (4, 9),
        (4, 12),
    ]


def test_pools_with_shared_places_have_any_number_of_redundant_slots():
    pools = topologies_of_places(
        256, num_layers=58, rank_counts=[32], ranks_per_node=8, max_redundant=20
    )
    places = [one.places_of_rank[0] for one in pools]
    assert places == [-(-58 * (256 + more) // 32) for more in (0, 1, 2, 4, 8, 16, 20)]
    # One more expert in each layer takes half a place on each rank, and so does a second.
    pools = topologies_of_places(
        32, num_layers=4, rank_counts=[8], ranks_per_node=8, max_redundant=2
    )
    assert [one.places_of_rank[0] for one in pools] == [16, 17]


def of_memory(*curve):
    return [
        replace(POOL, num_redundant=more, memory_bytes=more, displaced_tokens=more, balancedness=b)
        for more, b in curve
    ]


def test_the_knee_is_where_more_memory_begins_to_buy_little_balance():
    options = of_memory((0, 0.80), (2, 0.97), (4, 0.984), (16, 0.99), (32, 0.993))
    found = knee(options, tolerance=0.01)
    assert found == options[2]
    assert knee_text(found, options) == (
        "4 ranks: the knee is at 4 redundant slots, balance 0.9840; 28 more add 0.0090 and take "
        "28 B per GPU, room for 28 tokens of context"
    )


@pytest.mark.parametrize(
    "curve",
    [
        [(0, 0.990), (2, 0.994), (4, 0.996)],  # Balance hardly grows.
        [(0, 0.80), (2, 0.85), (4, 0.99)],  # It grows ever faster.
        [(0, 0.99), (2, 0.90), (4, 0.80)],
        [(0, 0.80), (4, 0.99)],
        [(0, 0.80)],
    ],
)
def test_some_curves_have_no_knee(curve):
    assert knee(of_memory(*curve), tolerance=0.01) is None


def test_layers_can_share_places():
    pools = json.loads(equipoise(*NODES, "--ranks", "4", "--pooled", "--json"))["choices"]
    assert [one["num_redundant"] for one in pools] == [0, 1, 2, 4, 8]
    each = json.loads(equipoise(*NODES, "--ranks", "4", "--json"))["choices"]
    assert pools[-1]["memory_bytes"] == each[-1]["memory_bytes"]
    assert pools[-1]["balancedness"] >= each[-1]["balancedness"]


def test_redundant_slots_displace_context():
    document = json.loads(equipoise(*SMALL, "--json"))
    # Five layers of 64 + 16 numbers in bfloat16.
    assert document["token_bytes"] == TOKEN_BYTES
    for one in document["choices"]:
        more_bytes = one["num_redundant"] * 4 * document["expert_bytes"] / one["num_ranks"]
        assert one["displaced_tokens"] == int(more_bytes / TOKEN_BYTES)
    (least, *_) = json.loads(equipoise(*SMALL, "--json", "--token-bytes", "1"))["choices"][1:]
    assert least["displaced_tokens"] == 4 * document["expert_bytes"]


def test_the_least_memory_near_the_best_balance_is_taken():
    cheap = replace(POOL, balancedness=0.985, memory_bytes=500)
    best = replace(POOL, balancedness=0.992, memory_bytes=800)
    poor = replace(POOL, balancedness=0.980, memory_bytes=100)
    chosen, reason = choose([poor, cheap, best], tolerance=0.01, memory_bytes=None)
    assert chosen is cheap
    assert reason.startswith("choose 4 ranks with 8 redundant slots: balance 0.985 with 500 B")
    assert "of the 2 options within 0.01 of the best, 0.992 with 800 B" in reason


def test_the_best_is_taken_where_nothing_else_is_near():
    best = replace(POOL, balancedness=0.99)
    chosen, reason = choose([POOL, best], tolerance=0.01, memory_bytes=None)
    assert chosen is best
    assert reason.endswith(", the best of 2 options")


def test_pools_that_do_not_fit_are_not_chosen():
    large = replace(POOL, balancedness=0.99, memory_bytes=2000)
    chosen, _ = choose([POOL, large], tolerance=0.01, memory_bytes=1500)
    assert chosen is POOL
    nothing, reason = choose([POOL, large], tolerance=0.01, memory_bytes=10)
    assert nothing is None
    assert reason == "nothing fits: the smallest need is 1000 B of experts per GPU, with 4 ranks"


def test_replayed_balance_counts_more_than_planned_and_moves_break_ties():
    restless = replace(POOL, balancedness=1.0, balancedness_replayed=0.80, moves_per_hour=9.0)
    calm = replace(POOL, balancedness=0.9, balancedness_replayed=0.85, moves_per_hour=9.0)
    calmest = replace(calm, moves_per_hour=1.0)
    chosen, reason = choose([restless, calm, calmest], tolerance=0.01, memory_bytes=None)
    assert chosen is calmest
    assert "replayed balance 0.850" in reason


def test_every_option_has_balance_memory_and_moves():
    document = json.loads(equipoise(*SMALL, "--json"))
    choices = document["choices"]
    assert [(one["num_ranks"], one["num_redundant"]) for one in choices] == [
        (2, 0), (2, 2), (2, 4), (2, 6), (2, 8), (4, 0), (4, 4), (4, 8),
    ]  # fmt: skip
    expert_bytes = 3 * 128 * 48 * 2
    assert document["expert_bytes"] == expert_bytes
    for one in choices:
        assert one["memory_bytes"] == one["num_slots"] // one["num_ranks"] * 4 * expert_bytes
        assert 0 < one["balancedness_min_layer"] <= one["balancedness"] <= one["bound"] + 1e-9
        assert 0 < one["balancedness_replayed"] <= 1
        assert one["bytes_per_hour"] == one["moves_per_hour"] * expert_bytes
    assert document["chosen"] in choices
    assert document["reason"].startswith(f"choose {document['chosen']['num_ranks']} ranks")


def test_a_single_window_has_no_moves_per_hour():
    document = json.loads(equipoise(*NODES, "--ranks", "2,4", "--windows", "code/0", "--json"))
    assert {one["moves_per_hour"] for one in document["choices"]} == {None}
    assert "moves/h" not in equipoise(*NODES, "--ranks", "2,4", "--windows", "code/0")


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_table_has_the_same_figures(columns):
    text = equipoise(*SMALL, columns=columns)
    document = json.loads(equipoise(*SMALL, "--json"))
    assert "36.0 KiB (from the model config), 4 windows" in text
    rows = [line.split() for line in text.splitlines() if line[:5].strip().isdigit()]
    shown = [(int(row[0]), int(row[1]), float(row[2])) for row in rows]
    assert shown == [
        (one["num_ranks"], one["num_redundant"], pytest.approx(one["balancedness"], abs=1e-4))
        for one in document["choices"]
    ]
    (marked,) = [row for row in rows if row[-1] == "◀"]
    assert int(marked[0]) == document["chosen"]["num_ranks"]
    assert document["reason"] in " ".join(text.split())


def test_moves_are_given_per_hour():
    pool = [*NODES, "--ranks", "4", "--max-redundant", "0", "--window-s", "20", "--json"]
    (moved,) = json.loads(equipoise(*pool, "--windows", "code,english"))["choices"]
    moves = moved["moves_per_hour"] * 8 * 20 / 3600
    assert moves > 0
    assert moves == pytest.approx(round(moves))
    still = equipoise(*pool, "--windows", "code,english", "--policy", "still=min_gain=1")
    assert json.loads(still)["choices"][0]["moves_per_hour"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*MODEL, "--ranks", "x"], "--ranks takes numbers and ranges"),
        ([*MODEL, "--ranks", "0"], "--ranks must be numbers of at least 1"),
        ([*MODEL, "--ranks", "1-2000"], "pools are more than 1000"),
        ([*MODEL, "--max-redundant", "-1"], "--max-redundant must be at least 0, not -1"),
        ([*MODEL, "--ranks-per-node", "0"], "--ranks-per-node must be at least 1, not 0"),
        ([*MODEL, "--tolerance", "2"], "tolerance must be from 0 to 1, not 2"),
        ([*MODEL, "--memory-gib", "0"], "--memory-gib must be above 0, not 0"),
        ([*MODEL, "--window-s", "0"], "--window-s must be from"),
        ([*MODEL, "--policy", "x"], "--policy x must be"),
        ([*MODEL, "--exchange-us", "9"], "are about steps: add --tokens-per-rank"),
        ([*MODEL, "--tokens-per-rank", "0"], "--tokens-per-rank must be numbers from 1 to 65536"),
    ],
)
def test_invalid_options_are_rejected(arguments, words):
    with pytest.raises(InvalidSettingsError, match=words):
        equipoise(*arguments)


def test_groups_stay_on_nodes_in_pools_whose_layers_share_places():
    pooled = [*SMALL, "--pooled", "--max-redundant", "8", "--json"]
    anywhere, by_node = (
        json.loads(equipoise(*pooled, "--algorithm", algorithm))["choices"]
        for algorithm in ("global", "hierarchical")
    )
    assert [one["num_redundant"] for one in anywhere] == [one["num_redundant"] for one in by_node]
    # Nodes differ in what their groups are used for.
    assert by_node[-1]["balancedness"] < anywhere[-1]["balancedness"]


STEPS = ["--ranks", "4", "--max-redundant", "8", "--tokens-per-rank", "16,256"]


def test_it_says_what_balanced_steps_save_and_when_they_pay():
    priced = ["--assignment-us", "2", "--exchange-us", "30"]
    steps = json.loads(equipoise(*NODES, *STEPS, *priced, "--json"))["steps"]
    assert [(one["num_redundant"], one["tokens_per_rank"]) for one in steps] == [
        (0, 16), (0, 256), (4, 16), (4, 256), (8, 16), (8, 256),
    ]  # fmt: skip
    for one in steps[:2]:  # Without replicas there is no choice.
        assert one["hashed"] == one["balanced"] < 1.0
        assert one["saved_assignments"] == 0.0
    for one in steps[2:]:
        assert one["hashed"] < one["balanced"] <= 1.0
    for one in steps:
        assert one["saved_us"] == pytest.approx(2 * one["saved_assignments"])
        assert one["pays"] == (one["saved_us"] > 30)
    assert {one["pays"] for one in steps} == {False, True}


def test_without_prices_it_says_what_balanced_steps_depend_on():
    text = " ".join(equipoise(*NODES, *STEPS).split())
    assert "balanced pays where these, times the µs per assignment (--assignment-us)" in text
    text = " ".join(equipoise(*NODES, *STEPS, "--exchange-us", "30").split())
    assert "µs/assignment" in text


def test_steps_are_as_even_as_replicas_allow():
    """Expert 0 is on both ranks, and rank 0 has the hot expert besides."""
    layout = Layout(generation=1, num_experts=3, num_ranks=2, expert_of_slot=[[0, 1, 0, 2]])
    load = np.array([[1.0, 2.0, 1.0]])
    step = balance_of_steps(load, layout, tokens_per_rank=10_000, experts_per_token=1)
    assert step.hashed == pytest.approx(0.8, abs=0.01)
    assert step.balanced == pytest.approx(1.0, abs=0.01)
    assert step.saved_assignments == pytest.approx(2500, rel=0.05)


def test_no_expert_is_in_a_token_twice_however_hot_it_is():
    layout = Layout(generation=1, num_experts=4, num_ranks=2, expert_of_slot=[[0, 1, 2, 3]])
    load = np.array([[97.0, 1.0, 1.0, 1.0]])
    step = balance_of_steps(load, layout, tokens_per_rank=3_000, experts_per_token=2)
    # Expert 0 has half of all assignments, the others a sixth each.
    assert step.hashed == pytest.approx(0.5 / (0.5 + 1 / 6), abs=0.01)


def test_it_asks_for_the_experts_of_a_token_if_nothing_tells_them(tmp_path):
    document = json.loads((TINY / "loads.json").read_text())
    del document["top_k"]
    (tmp_path / "loads.json").write_text(json.dumps(document))
    with pytest.raises(InvalidSettingsError, match="per token: --experts-per-token N"):
        equipoise("--loads", str(tmp_path / "loads.json"), "--tokens-per-rank", "8")
