"""Merges a query's splits into one result, in the order of positions: the end of `mla_decode`.

Contract: all queries have the same number of splits, with float32 results [B * splits, H, R] and
logarithms of their sums [B * splits, H], minus infinity for a split that saw nothing. The merged
result weights splits by the exponentials of these, first to last; it has the outputs' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equipoise_kernels.fp8.attention.softmax import closed
from equipoise_kernels.fp8.jit import jit, tl
from equipoise_kernels.fp8.specialization import Specialization

_NUM_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOutput:
    """Results of attention, of queries or of their splits."""

    out_BHR: Tensor
    """Outputs, of the queries' dtype; float32 for splits."""
    lse_BH: Tensor
    """Logarithms of the sums, float32."""


def merge_splits(partial: AttentionOutput, *, out: AttentionOutput) -> None:
    """Launch the kernel; merge the results of splits [B * splits] into those of queries [B]."""
    num_queries, num_heads, rank = out.out_BHR.shape
    mla_merge_kernel[(num_queries, num_heads)](
        partial.out_BHR,
        partial.lse_BH,
        out.out_BHR,
        out.lse_BH,
        len(partial.out_BHR) // num_queries,
        num_heads,
        RANK=rank,
        num_warps=_NUM_WARPS,
    )


@jit
def mla_merge_kernel(
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    num_splits: int,
    num_heads: int,
    RANK: tl.constexpr,
) -> None:
    """Each program merges one head of one query, first split to last."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    ranks = tl.arange(0, RANK)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([RANK], tl.float32)
    for split in range(num_splits):
        row = (query * num_splits + split) * num_heads + head
        lse = tl.load(partial_lse_ptr + row)
        # An empty split has weight 0; minus infinity less itself would be NaN.
        if lse != float("-inf"):
            larger = tl.maximum(largest, lse)
            fading, weight = tl.exp(largest - larger), tl.exp(lse - larger)
            total = total * fading + weight
            acc = acc * fading + weight * tl.load(partial_ptr + row * RANK + ranks)
            largest = larger
    divisor, lse = closed(largest, total)
    out_row = query * num_heads + head
    result = (acc / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row * RANK + ranks, result)
    tl.store(lse_ptr + out_row + tl.arange(0, 1), lse)


def merge_specialization(rank: int) -> Specialization:
    """The kernel's specialisation."""
    return Specialization(
        kernel=mla_merge_kernel,
        name=f"mla_merge rank={rank}",
        types={"partial_ptr partial_lse_ptr lse_ptr": "*fp32", "out_ptr": "*bf16"},
        options={"RANK": rank, "num_warps": _NUM_WARPS},
    )
