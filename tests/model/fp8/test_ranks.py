"""The model in FP8 over ranks in processes of their own, by each backend of the exchange that a CPU
has: gloo, and kernels over shared memory in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from equipoise_kernels.fp8.gemm import grouped
from equipoise_model.checkpoint import save
from equipoise_model.config import Fp8Config
from tests.support.fp8_models import NARROW
from tests.support.fp8_ranks import CHUNKS, SWITCH_BEFORE, compute_rows_one_by_one, served_alone
from tests.support.kernel_backends import use_backends
from tests.support.rank_processes import run_ranks

pytest.importorskip("triton", reason="kernels need the extra `kernels`")

PROGRAM = Path(__file__).with_name("fp8_rank.py")
TIMEOUT_S = 250
MORE = {"reference": ("two hops", "two hops, cut", "sums on nodes"), "triton": ()}
# When the last rank has left, one less.
NUM_RANKS = {"reference": 4, "triton": 3}


@pytest.fixture(scope="module")
def twins():
    """The torch twins, although test processes interpret kernels; experts run rows one by one."""
    with pytest.MonkeyPatch.context() as patch:
        use_backends(patch, "reference")
        patch.setattr(grouped, "gemm_reference", grouped.gemm_reference)
        compute_rows_one_by_one()
        yield


@pytest.fixture(scope="module")
def checkpoint(random_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8") / "checkpoint"
    save(random_model(NARROW), path, fp8=Fp8Config())
    return path


@pytest.fixture(scope="module")
def alone(checkpoint, twins):
    """Logits of each rank's text, step by step, from models that hold every expert.

    As the ranks of the re-formed group, the second one has the shared expert in a slot.
    """
    return [
        [
            served_alone(checkpoint, rank, chunks, shared_as_routed=shared_as_routed)
            for rank, chunks in enumerate(CHUNKS)
        ]
        for shared_as_routed in (False, True)
    ]


@pytest.fixture(scope="module")
def cut_alone(checkpoint, twins):
    """The same logits of steps that are cut where the ranks' are."""
    return [
        served_alone(checkpoint, rank, chunks, shared_as_routed=False, is_cut=True)
        for rank, chunks in enumerate(CHUNKS)
    ]


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """What every rank saw, by backend."""
    return {
        backend: results_of_ranks(backend, num_ranks, checkpoint, tmp_path_factory.mktemp(backend))
        for backend, num_ranks in NUM_RANKS.items()
    }


def results_of_ranks(backend, num_ranks, checkpoint, folder):
    run_ranks(
        PROGRAM,
        [(rank, num_ranks, checkpoint, folder, backend) for rank in range(num_ranks)],
        timeout_s=TIMEOUT_S,
        TRITON_INTERPRET="1",
    )
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(num_ranks)]


def groups(runs, backend):
    """What the ranks of the first group saw, and those of the re-formed group."""
    ranks = runs[backend]
    return [rank["together"] for rank in ranks], [rank["re-formed"] for rank in ranks[:-1]]


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_ranks_match_a_single_rank_across_a_switch_and_in_a_new_group(runs, alone, backend):
    for group, expected in zip(groups(runs, backend), alone, strict=True):
        for rank, seen in enumerate(group):
            for ours, theirs in zip(seen["logits"], expected[rank], strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("order", ["PREFILL", "DECODE"])
@pytest.mark.parametrize("backend", NUM_RANKS)
def test_ranks_that_cut_their_steps_match_a_single_rank_that_does(runs, cut_alone, backend, order):
    for rank, seen in enumerate(runs[backend]):
        same(seen[order]["logits"], cut_alone[rank])
        for cut, whole in zip(seen[order]["loads"], seen["together"]["loads"], strict=True):
            assert cut[0] == whole[0]
            assert (cut[1] == whole[1]).all()
        # The buffer that can be captured is, also with two exchanges open.
        assert (seen[order]["captures"] > 1) is (backend == "triton")


def test_two_hops_give_the_logits_and_loads_of_one(runs, alone, cut_alone):
    for rank, seen in enumerate(runs["reference"]):
        same(seen["two hops"]["logits"], alone[0][rank])
        same(seen["two hops, cut"]["logits"], cut_alone[rank])
        for name in ("two hops", "two hops, cut", "sums on nodes"):
            for one, other in zip(seen[name]["loads"], seen["together"]["loads"], strict=True):
                assert (one[1] == other[1]).all()
        for one, other in zip(seen["sums on nodes"]["logits"], alone[0][rank], strict=True):
            assert one is None or torch.allclose(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_balanced_replicas_change_the_loads_and_no_bit(runs, alone, cut_alone, backend):
    # Those of gloo travel by two hops too, and are cut into micro-batches.
    expected = cut_alone if backend == "reference" else alone[0]
    for rank, seen in enumerate(runs[backend]):
        same(seen["balanced"]["logits"], expected[rank])
    hashed, balanced = (
        [rank[name]["loads"] for rank in runs[backend]] for name in ("together", "balanced")
    )
    for number in range(len(hashed[0])):
        hashed_RL, balanced_RL = (
            torch.stack([torch.as_tensor(rank[number][1]).sum(1) for rank in ranks])
            for ranks in (hashed, balanced)
        )
        assert balanced_RL.sum(0).equal(hashed_RL.sum(0))
        assert (balanced_RL.amax(0) <= hashed_RL.amax(0)).all()
    assert (balanced_RL.amax(0) < hashed_RL.amax(0)).any()


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_captured_steps_choose_replicas_by_their_shares(runs, backend):
    for seen in runs[backend]:
        assert seen["balanced"]["captures"] == seen["together"]["captures"]


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_rows_between_nodes_are_counted_however_they_travel(runs, backend):
    for seen in runs[backend]:
        direct = seen["together"]["spread"]
        assert sum(direct.rows_by_nodes) > 0
        assert 0 < direct.remote_nodes <= direct.direct_rows == direct.sent_rows
        for name in MORE[backend]:
            relayed = seen[name]["spread"]
            assert relayed.rows_by_nodes == direct.rows_by_nodes
            assert relayed.sent_rows == relayed.remote_nodes == direct.remote_nodes
            assert relayed.direct_rows == direct.direct_rows
    spreads = [seen["together"]["spread"] for seen in runs["reference"]]
    assert sum(s.remote_nodes for s in spreads) < sum(s.direct_rows for s in spreads)
    outputs = {
        name: sum(seen[name]["spread"].sent_outputs for seen in runs["reference"])
        for name in ("together", *MORE["reference"])
    }
    assert outputs["two hops"] == outputs["two hops, cut"] == outputs["together"]
    assert outputs["sums on nodes"] < outputs["together"]


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_receivers_count_every_choice_once_in_its_generation(runs, backend):
    for group, num_shared in zip(groups(runs, backend), (0, 1), strict=True):
        tokens = CHUNKS[: len(group)]
        sent = {
            2: sum(sum(chunks[SWITCH_BEFORE:]) for chunks in tokens),
            1: sum(sum(chunks[:SWITCH_BEFORE]) for chunks in tokens),
        }
        for number, generation in enumerate(sent):
            loads = [seen["loads"][number] for seen in group]
            assert {load_generation for load_generation, _ in loads} == {generation}
            counted = sum(int(rows.sum()) for _, rows in loads)
            slots_per_token = NARROW.num_experts_per_tok + num_shared
            assert counted == sent[generation] * slots_per_token


def test_few_rows_are_captured_by_all_ranks_at_once_where_the_exchange_can_be(runs):
    for backend, obstacle, captures in (
        ("triton", None, 1),
        ("reference", "torch.distributed needs the number of rows on the host", 0),
    ):
        for group in groups(runs, backend):
            for seen in group:
                assert (seen["backend"], seen["obstacle"]) == (backend, obstacle)
                # The least that any rank can.
                assert seen["captured rows"] == 2
                assert seen["captures"] == captures
                assert seen["waited"] > 0


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_a_rank_of_another_generation_is_named(runs, backend):
    for rank, seen in enumerate(runs[backend]):
        assert "an exchange of rows failed: this rank runs generation" in seen["skewed"]
        assert ("rank 0 runs 7" if rank == 1 else "rank 1 runs 8") in seen["skewed"]


@pytest.mark.parametrize("backend", NUM_RANKS)
def test_a_rank_that_stands_still_is_named_when_the_wait_has_timed_out(runs, backend):
    last = NUM_RANKS[backend] - 1
    for seen in runs[backend][:-1]:
        assert f"an exchange of rows timed out: rank {last} did not send rows" in seen["lonely"]
