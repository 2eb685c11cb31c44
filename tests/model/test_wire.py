"""Bytes between nodes by the kernel's own counters, against what tokens chose."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model.expert_parallel_rank import CONFIG
from tests.model.two_hop_rank import SENDS
from tests.model.wire_rank import NUM_ROWS, OF_RANK
from tests.support.rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("wire_rank.py")
NODE = np.array(OF_RANK)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every rank saw: by way, bytes to each rank and the ranks that rows chose."""
    folder = tmp_path_factory.mktemp("wire")
    ranks = range(len(OF_RANK))
    run_ranks(PROGRAM, [(rank, folder / "meet", folder / str(rank)) for rank in ranks])
    return [torch.load(folder / str(rank), weights_only=False) for rank in ranks]


def crossed_bytes(runs, send):
    """Bytes that crossed between nodes."""
    return sum(
        num_bytes
        for rank, seen in enumerate(runs)
        for peer, num_bytes in seen[send][0].items()
        if NODE[peer] != NODE[rank]
    )


def needed(runs, send, count):
    """The sum of `count`, over all rows, of the ranks on other nodes that a row chose."""
    return sum(
        count(row[NODE[row] != NODE[rank]])
        for rank, seen in enumerate(runs)
        for row in seen[send][1].reshape(-1, CONFIG.num_experts_per_tok)
    )


@pytest.mark.parametrize("send", SENDS)
def test_what_crosses_between_nodes_is_what_tokens_need(runs, send):
    ranks, nodes = (lambda row: len(set(row))), (lambda row: len(set(NODE[row])))
    rows = needed(runs, send, ranks if send == "one hop" else nodes)
    outputs = needed(runs, send, nodes if send == "sums" else len)
    beside = 2 if send == "sums" else 1  # slots, and weights for whoever sums
    row_bytes = 4 * (CONFIG.hidden_size + beside * CONFIG.num_experts_per_tok)
    expected = rows * row_bytes + outputs * 4 * CONFIG.hidden_size
    assert expected < crossed_bytes(runs, send) < 1.06 * expected


def test_two_hops_send_fewer_bytes_between_nodes_and_sums_on_nodes_fewer_still(runs):
    one, two, sums = (crossed_bytes(runs, send) for send in SENDS)
    per_row = len(OF_RANK) * NUM_ROWS * CONFIG.num_moe_layers
    print(", ".join(f"{send}: {crossed_bytes(runs, send) / per_row:.0f} bytes" for send in SENDS))
    assert sums < 0.9 * two
    assert two < 0.95 * one
