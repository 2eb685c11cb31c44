"""Ranks in processes of their own, over gloo, against one rank that holds everything."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("expert_parallel_rank.py")
GROUP_SIZES = (2, 4, 8)
NUM_ROWS, TOP_K, NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 26, 4, 2, 16, 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every rank of groups of 1, 2, 4 and 8 saw: by group size, a list by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    sizes = (1, *GROUP_SIZES)
    run_ranks(
        PROGRAM,
        [
            (rank, size, folder / f"rendezvous-{size}", folder / f"result-{size}-{rank}")
            for size in sizes
            for rank in range(size)
        ],
    )
    return {
        size: [
            torch.load(folder / f"result-{size}-{rank}", weights_only=False) for rank in range(size)
        ]
        for size in sizes
    }


def joined(run, mode, scenario):
    return torch.cat([rank[mode][scenario] for rank in run])


def by_expert(layout, values, *, num_experts=NUM_EXPERTS):
    total = np.zeros((num_experts, *values.shape[1:]))
    np.add.at(total, layout, values)
    return total


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("scenario", ["even", "idle", "switched", "skewed"])
def test_a_group_matches_one_rank_bit_by_bit_in_row_blocks(runs, size, scenario):
    alone = joined(runs[1], "row blocks", scenario)
    assert alone.shape == (NUM_ROWS, 64)
    assert torch.equal(joined(runs[size], "row blocks", scenario), alone)


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("scenario", ["even", "idle", "switched", "skewed"])
def test_a_group_is_close_to_one_rank_in_fast_mode(runs, size, scenario):
    alone = joined(runs[1], "fast", scenario)
    scale = float(alone.abs().max())
    seen = joined(runs[size], "fast", scenario)
    torch.testing.assert_close(seen / scale, alone / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, *GROUP_SIZES])
def test_neither_the_rows_rank_nor_the_layout_changes_a_bit(runs, size):
    outputs = [joined(runs[size], "row blocks", name) for name in ("even", "idle", "switched")]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("size", [1, *GROUP_SIZES])
@pytest.mark.parametrize("scenario", ["even", "idle", "switched", "skewed"])
def test_the_shared_expert_in_slots_changes_no_bit_in_row_blocks(runs, size, scenario):
    alone = joined(runs[1], "row blocks", scenario)
    assert torch.equal(joined(runs[size], "shared as routed", scenario), alone)


@pytest.mark.parametrize("size", [1, *GROUP_SIZES])
def test_every_row_is_counted_at_the_shared_expert_in_slots(runs, size):
    ranks = [rank["shared as routed"] for rank in runs[size]]
    for layer in range(NUM_LAYERS):
        counted = sum(
            by_expert(
                seen["own layout"][layer], seen["loads"][1][1][layer], num_experts=NUM_EXPERTS + 1
            )
            for seen in ranks
        )
        assert counted[NUM_EXPERTS] == 2 * NUM_ROWS, "even, then idle"
        assert counted.sum() == 2 * NUM_ROWS * (TOP_K + 1)


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_a_step_in_which_every_rank_is_idle_passes(runs, size):
    assert joined(runs[size], "fast", "all idle").shape == (0, 64)


@pytest.mark.parametrize("mode", ["fast", "row blocks"])
@pytest.mark.parametrize("size", [1, *GROUP_SIZES])
def test_receivers_count_every_choice_of_every_row_once_per_generation(runs, size, mode):
    for number, (generation, num_steps) in enumerate([(2, 1), (1, 2)]):
        loads = [rank[mode]["loads"][number] for rank in runs[size]]
        assert {load_generation for load_generation, _ in loads} == {generation}
        total = sum(rows.sum(axis=1) for _, rows in loads)
        assert total.tolist() == [num_steps * NUM_ROWS * TOP_K] * NUM_LAYERS


@pytest.mark.parametrize("size", [1, *GROUP_SIZES])
def test_the_worst_skew_drops_no_row(runs, size):
    for layer in range(NUM_LAYERS):
        counted = sum(
            by_expert(rank["fast"]["own layout"][layer], rank["fast"]["skewed loads"][layer])
            for rank in runs[size]
        )
        assert counted.tolist() == [NUM_ROWS] * TOP_K + [0] * (NUM_EXPERTS - TOP_K)


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("scenario", ["even", "skewed"])
def test_rows_are_sent_once_to_each_rank_that_needs_them_or_to_all_of_a_few(runs, size, scenario):
    for seen in (rank["fast"] for rank in runs[size]):
        # Slots of every layer's rows, of which a rank has consecutive ones.
        ranks_of_rows = [slots // (NUM_SLOTS // size) for slots in seen[f"{scenario} slots"]]
        wanted = [
            sum(rank in row for row in rows.tolist()) for rows in ranks_of_rows
            for rank in range(size)
        ]  # fmt: skip
        everywhere = [len(rows) for rows in ranks_of_rows for _ in range(size)]
        assert seen[f"{scenario} sent"] == (wanted if size > TOP_K else everywhere)
        assert size <= TOP_K or sum(wanted) < sum(everywhere)


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_gradients_cross_ranks(runs, size):
    rows, rows_alone = (joined(runs[n], "fast", "row gradients") for n in (size, 1))
    torch.testing.assert_close(rows, rows_alone, atol=1e-2, rtol=1e-3)
    for layer in range(NUM_LAYERS):
        ours, alone = (
            sum(
                by_expert(
                    rank["fast"]["own layout"][layer], rank["fast"]["slot gradients"][layer].numpy()
                )
                for rank in runs[n]
            )
            for n in (size, 1)
        )
        assert np.abs(alone).max() > 0
        assert np.abs(ours - alone).max() < 1e-4 * np.abs(alone).max()


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_a_rank_that_leaves_ends_the_others_step_with_a_message(runs, size):
    *others, last = [rank["last words"] for rank in runs[size]]
    assert last == "left"
    for words in others:
        assert "could not exchange rows" in words
