"""Sending rows to the ranks that need them, against sending all rows to all ranks: up to 32 ranks.

`pytest -s -m benchmark tests/model/test_many_ranks_benchmark.py` prints the table of
docs/overlap.md.
"""

import os
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.model.many_ranks_rank import DIM, NUM_EXPERTS, TOP_K, WAYS
from tests.support.rank_processes import run_ranks

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("many_ranks_rank.py")
NUM_LAYERS = 20


def drawn_layers(num_ranks, num_rows):
    """Rows, their experts and weights of each layer, [ranks, rows, ..]."""
    generator = torch.Generator().manual_seed(num_rows)
    shape = (num_ranks, num_rows)
    return [
        {
            "x": torch.randn(*shape, DIM, generator=generator),
            "ids": torch.rand(*shape, NUM_EXPERTS, generator=generator).topk(TOP_K).indices,
            "weights": torch.rand(*shape, TOP_K, generator=generator),
        }
        for _ in range(NUM_LAYERS)
    ]


def outputs_alone(layer):
    """What one process computes for the rows of all ranks."""
    x, ids, weights = layer.values()
    total = torch.zeros_like(x)
    for choice in range(TOP_K):
        total += x * (ids[..., choice, None] + 1.0) * weights[..., choice, None]
    return total


def rows_needed(rank_of_expert, ids, num_ranks):
    """Of one rank's rows, how many each rank has experts for."""
    ranks = [set(row) for row in rank_of_expert[ids].tolist()]
    return [sum(rank in of_row for of_row in ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_rows", [2, 64])
@pytest.mark.parametrize("num_ranks", [4, 8, 16, 32])
def test_rows_reach_exactly_the_ranks_that_need_them_and_change_no_output(
    tmp_path, num_ranks, num_rows
):
    layers = drawn_layers(num_ranks, num_rows)
    layout = torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    torch.save((layout, layers), tmp_path / "case")
    run_ranks(
        PROGRAM,
        [
            (rank, tmp_path / "case", tmp_path / "meet", tmp_path / str(rank))
            for rank in range(num_ranks)
        ],
        timeout_s=500,
    )
    of_ranks = [torch.load(tmp_path / str(rank)) for rank in range(num_ranks)]
    rank_of_expert = layout.argsort() * num_ranks // NUM_EXPERTS
    size, took = dict.fromkeys(WAYS, 0), {way: [] for way in WAYS}
    # Every rank found each layer once each way.
    for number, found in enumerate(zip(*of_ranks, strict=True)):
        layer, way = layers[number // len(WAYS)], found[0]["way"]
        for one, ids, y in zip(found, layer["ids"], outputs_alone(layer), strict=True):
            assert torch.equal(one["y"], y)
            assert one["rows"] == (
                rows_needed(rank_of_expert, ids, num_ranks)
                if way == "ranks that need them"
                else [num_rows] * num_ranks
            )
        size[way] += sum(one["bytes"] for one in found)
        took[way].append(max(one["s"] for one in found))
    some, all_of_them = WAYS
    times = {way: median(of_layers) for way, of_layers in took.items()}
    print(
        f"\n{num_ranks} ranks, {num_rows} rows: bytes {size[some] / size[all_of_them]:.2f}, time "
        f"{times[some] / times[all_of_them]:.2f} ({1e3 * times[some]:.1f} and "
        f"{1e3 * times[all_of_them]:.1f} ms); load {os.getloadavg()[0]:.1f}"
    )
