"""Gates E1 and E2: the exchange between eight virtual ranks on one GPU.

They measure memory traffic and the protocol's own time. They do not measure a network: no
conclusion about NVLink or RDMA follows from them.
"""

from __future__ import annotations

import torch

from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.bench.bench import Bench
from equipoise_kernels.fp8.bench.checks import backend_faults
from equipoise_kernels.fp8.bench.report import Sample
from equipoise_kernels.fp8.testing.virtual_ranks import VirtualRanks

_MANY = EpShape(
    rank=0,
    num_ranks=8,
    slots_per_rank=32,
    top_k=8,
    dim=7168,
    max_tokens=4096,
    payload=Payload.BF16,
    # 1.5 times what even routing brings: two of the largest would not fit the GPU.
    capacity=6144,
)
_FEW = EpShape(
    rank=0, num_ranks=8, slots_per_rank=32, top_k=8, dim=7168, max_tokens=128, payload=Payload.BF16
)


def many_tokens(bench: Bench, shape: EpShape = _MANY) -> list[Sample]:
    """E1: bytes per second of a dispatch and its combine."""
    return [_sample(bench, "E1", shape, layout=None)]


def few_tokens(bench: Bench, shape: EpShape = _FEW) -> list[Sample]:
    """E2: microseconds of a low-latency dispatch and its combine."""
    layout = RowLayout(rows_per_slot=shape.num_ranks * shape.max_tokens)
    return [_sample(bench, "E2", shape, layout=layout)]


def _sample(bench: Bench, gate: str, shape: EpShape, *, layout: RowLayout | None) -> Sample:
    ranks = VirtualRanks(
        shape, num_tokens=shape.max_tokens, generator=bench.generator, layout=layout
    )
    faults = backend_faults(bench.timer.kernel_names(ranks.exchange), "send_rows_kernel")
    # The timed run's own sums are checked.
    timing = bench.timer.interleaved({"exchange": [ranks.exchange]})["exchange"]
    pairs = zip(ranks.sums, ranks.expected(), strict=True)
    if not all(torch.equal(seen, wanted) for seen, wanted in pairs):
        faults.append("sums are not the reference's to the last bit")
    rate = _num_bytes(shape) / timing.median_us / 1e6
    # All ranks share the GPU: a rank's time is their mean.
    per_rank_us = timing.median_us / shape.num_ranks
    return Sample(
        gate=gate,
        shape=f"{shape.num_ranks} ranks x {shape.max_tokens} tokens x {shape.dim}",
        value=rate / bench.machine.copy_tb_s if gate == "E1" else per_rank_us,
        raw={"us": timing.median_us, "spread": timing.spread, "tb_s": rate},
        faults=faults,
    )


def _num_bytes(shape: EpShape) -> int:
    """Bytes that an exchange must move, each once: rows in and out of slabs both ways, and sums."""
    num_tokens = shape.num_ranks * shape.max_tokens
    row_bytes, num_rows = 4 * shape.row_words, num_tokens * shape.top_k
    dispatch = row_bytes * (num_tokens + 3 * num_rows)
    combine = 3 * row_bytes * num_rows + 4 * shape.dim * num_tokens
    return dispatch + combine
