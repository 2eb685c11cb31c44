"""Ranks in processes: the kernels over POSIX shared memory against gloo, bit by bit."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.rank_processes import run_ranks

pytest.importorskip("triton", reason="kernels need the extra `kernels`")

PROGRAM = Path(__file__).with_name("all_to_all_rank.py")
NUM_RANKS = 3
TIMEOUT_S = 200


@pytest.fixture(scope="module")
def reports():
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="equipoise-test-", dir=shared))
    try:
        run_ranks(
            PROGRAM,
            [(rank, NUM_RANKS, folder) for rank in range(NUM_RANKS)],
            timeout_s=TIMEOUT_S,
        )
        return [
            json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(NUM_RANKS)
        ]
    finally:
        shutil.rmtree(folder)


def test_kernels_and_gloo_give_the_same_bits_in_every_epoch_and_both_are_right(reports):
    assert [report["faults"] for report in reports] == [[]] * NUM_RANKS


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_a_rank_of_another_generation_is_named_on_all_ranks(reports, backend):
    for rank, report in enumerate(reports):
        kind, ranks, words = report[f"{backend} skewed"]
        assert kind == "GenerationMismatchError"
        assert ranks == ([0, 2] if rank == 1 else [1])
        assert ("rank 0 runs 7" if rank == 1 else "rank 1 runs 8") in words


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_a_rank_that_does_not_come_is_named_within_the_timeout(reports, backend):
    for report in reports[:-1]:
        kind, ranks, words = report[f"{backend} lonely"]
        assert (kind, ranks) == ("PeerMissingError", [NUM_RANKS - 1])
        assert "within 1.5 s" in words


def test_a_failed_buffer_rejects_every_later_call(reports):
    for report in reports[:-1]:
        kind, ranks, words = report["gloo afterwards"]
        assert (kind, ranks) == ("AllToAllError", [NUM_RANKS - 1])
        assert "form a new group" in words
