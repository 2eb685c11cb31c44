"""Ranks in processes on made-up nodes: two hops against one, bit by bit, and what crosses."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise_kernels.fp8.all_to_all.payload import Payload
from tests.support.rank_processes import run_ranks

pytest.importorskip("triton", reason="kernels need the extra `kernels`")

PROGRAM = Path(__file__).with_name("two_hop_rank.py")
NUM_RANKS = 4
NODES = ("2x2", "4x1", "1x4", "uneven", "mixed up")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    run_ranks(PROGRAM, [(rank, NUM_RANKS, folder) for rank in range(NUM_RANKS)], timeout_s=250)
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("payload", [payload.value for payload in Payload])
def test_two_hops_bring_the_rows_and_sums_of_one(reports, payload, nodes):
    """And send a row once to each other node that needs it, counted from its slots."""
    assert [report[f"{payload} {nodes}"][0] for report in reports] == [[]] * NUM_RANKS


@pytest.mark.parametrize("nodes", NODES)
def test_less_crosses_than_by_one_hop(reports, nodes):
    crossed = {
        name: np.sum([report[f"bf16 {nodes}"][1][name] for report in reports], axis=0)
        for name in ("one hop", "two hops", "sums")
    }
    if nodes == "1x4":
        assert not sum(crossed.values()).any()
        return
    assert crossed["one hop"][0] == crossed["one hop"][1] == crossed["two hops"][1]
    assert 0 < crossed["two hops"][0] < crossed["one hop"][0]
    assert crossed["sums"][0] == crossed["sums"][1] == crossed["two hops"][0]


def test_a_rank_of_another_generation_is_named_on_all_ranks(reports):
    for rank, report in enumerate(reports):
        kind, ranks, words = report["skewed"]
        assert kind == "GenerationMismatchError"
        assert ranks == ([0, 2, 3] if rank == 1 else [1])
        assert ("rank 0 runs 7" if rank == 1 else "rank 1 runs 8") in words


def test_a_rank_that_does_not_come_is_named_and_not_its_relay(reports):
    for report in reports[:-1]:
        kind, ranks, words = report["lonely"]
        assert (kind, ranks) == ("PeerMissingError", [NUM_RANKS - 1])
        assert "within 1.5 s" in words
