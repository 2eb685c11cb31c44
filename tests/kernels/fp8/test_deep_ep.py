"""The exchange by DeepEP: its arguments, and when it is not opened."""

import sys
from dataclasses import replace

import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.all_to_all import deep_ep
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.self_test import LIBRARIES

SHAPE = EpShape(
    rank=0, num_ranks=2, slots_per_rank=3, top_k=2, dim=128, max_tokens=4, payload=Payload.BF16
)


def numbered(first, count):
    """Rows that hold their number."""
    return torch.arange(first, first + count).unsqueeze(1).repeat(1, SHAPE.dim).bfloat16()


def test_deep_ep_gets_its_low_latency_calls(monkeypatch):
    """A library of one rank that does what DeepEP documents, without a GPU."""
    calls = []

    class Buffer:
        """Signatures of deep_ep/buffers/legacy.py, and what its C++ asserts of tensors."""

        @staticmethod
        def get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        ):
            return (num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

        def __init__(
            self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
            num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
            explicitly_destroy=False, enable_shrink=False, comm=None,
        ):  # fmt: skip
            calls.append((group, num_rdma_bytes, low_latency_mode, num_qps_per_rank))

        def low_latency_dispatch(
            self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None,
            use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False,
            return_recv_hook=False,
        ):  # fmt: skip
            assert x.is_contiguous()
            assert topk_idx.is_contiguous()
            assert (x.dtype, topk_idx.dtype) == (torch.bfloat16, torch.int64)
            assert x.shape[0] <= num_max_dispatch_tokens_per_rank
            assert (use_fp8, return_recv_hook) == (False, True)
            capacity = num_max_dispatch_tokens_per_rank
            rows = torch.zeros(num_experts, capacity, x.shape[1], dtype=x.dtype)
            counts = torch.zeros(num_experts, dtype=torch.int32)
            for token, slot in ((t, s) for t, row in enumerate(topk_idx) for s in row if s >= 0):
                rows[slot, counts[slot]] = x[token]
                counts[slot] += 1
            return rows, counts, "handle", None, lambda: calls.append("received")

        def low_latency_combine(
            self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False,
            async_finish=False, return_recv_hook=False, out=None,
            combine_wait_recv_cost_stats=None,
        ):  # fmt: skip
            assert all(tensor.is_contiguous() for tensor in (x, topk_idx, topk_weights))
            assert (x.dtype, topk_weights.dtype) == (torch.bfloat16, torch.float32)
            assert (handle, return_recv_hook) == ("handle", True)
            taken = torch.zeros(x.shape[0], dtype=torch.int64)
            summed = torch.zeros(topk_idx.shape[0], x.shape[2])
            for token, row in enumerate(topk_idx):
                for choice, slot in enumerate(row):
                    if slot >= 0:
                        summed[token] += topk_weights[token, choice] * x[slot, taken[slot]]
                        taken[slot] += 1
            return summed.to(x.dtype), None, lambda: calls.append("summed")

    library = type("Library", (), {"Buffer": Buffer})
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    assert LIBRARIES["deep_ep"]() is None
    shape = replace(SHAPE, num_ranks=1)
    buffer = EpBuffer(shape, deep_ep.DeepEpBackend(shape, group="group"), device="cpu")
    x, slots = numbered(10, 3), torch.tensor([[0, 1], [2, 1], [-1, 0]])
    here = buffer.low_latency_dispatch(x, slots)
    assert here.rows_of_slot.tolist() == [2, 2, 1]
    assert here.slot_ends.tolist() == [2, 6, 9]
    assert here.rows[1, :2, 0].tolist() == [10, 11]
    weights = torch.tensor([[1.0, 3.0, 9.0], [2.0, 4.0, 0.5]]).t()
    summed = buffer.combine(here.rows, here.handle, weights_TK=weights)
    assert summed[:, 9].tolist() == [30, 77, 6]
    assert calls == [("group", (4, 128, 1, 3), True, 3), "received", "summed"]
    # A second dispatch would clear the flags of the first one's rows, which may have arrived.
    receive = buffer.begin_dispatch(x, slots, layout=buffer.low_latency_layout)
    with pytest.raises(AssertionError, match="receive an earlier combine"):
        buffer.low_latency_dispatch(x, slots)
    here = receive()
    buffer.combine(here.rows, here.handle)
    with pytest.raises(KernelInputError, match="low_latency_dispatch"):
        buffer.dispatch(x, slots)


@pytest.mark.parametrize(
    ("change", "depth", "named"),
    [
        ({"payload": Payload.FP32}, None, "carries bf16"),
        ({"max_tokens": 3}, None, "2 ranks x 3: round max_tokens up"),
        ({"max_tokens": 512}, None, "queues of 1026 requests"),
        ({"max_tokens": 64}, "128", "set NVSHMEM_QP_DEPTH"),
    ],
)
def test_deep_ep_is_not_opened_for_what_it_would_only_assert(change, depth, named, monkeypatch):
    if depth:
        monkeypatch.setenv("NVSHMEM_QP_DEPTH", depth)
    shape = replace(SHAPE, **change)
    with pytest.raises(KernelInputError, match=named):
        deep_ep.DeepEpBackend(shape, group="group")


def test_without_deep_ep_the_reason_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "cannot be imported" in LIBRARIES["deep_ep"]()
    monkeypatch.setitem(sys.modules, "deep_ep", object())
    assert "low_latency_dispatch" in LIBRARIES["deep_ep"]()
