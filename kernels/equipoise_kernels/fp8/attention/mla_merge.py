"""Merges a query's splits into one result: the end of `mla_decode`.

Contract: all queries have the same number of splits, with float32 results [B * splits, H, R] and
logarithms of their sums [B * splits, H], minus infinity for a split that saw nothing. The merged
result weights splits by the exponentials of these; it has the outputs' dtype. Splits are added in
the order of positions, so that empty ones at the end change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equipoise_kernels.fp8.attention.softmax import LOG2_E, closed
from equipoise_kernels.fp8.jit import jit, tl
from equipoise_kernels.fp8.specialization import Specialization

# A warp reads four columns a thread; programs this small hide one another's waits.
_NUM_WARPS = 1
_COLUMNS = 128
_SPLITS = 16


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
    columns = min(rank, _COLUMNS)
    mla_merge_kernel[(num_queries, num_heads, rank // columns)](
        partial.out_BHR,
        partial.lse_BH,
        out.out_BHR,
        out.lse_BH,
        len(partial.out_BHR) // num_queries,
        num_heads,
        RANK=rank,
        COLUMNS=columns,
        SPLITS=_SPLITS,
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
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Each program merges some columns of one head of one query, SPLITS splits at a time."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = query * num_splits * num_heads + head
    splits = tl.arange(0, SPLITS)
    largest = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, num_splits, SPLITS):
        lse_ptrs = partial_lse_ptr + first_row + (first + splits) * num_heads
        lse = tl.load(lse_ptrs, mask=first + splits < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    highest = tl.max(largest, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, num_splits, SPLITS):
        # Loads that do not depend on each other, added in order.
        for place in tl.static_range(SPLITS):
            row = first_row + (first + place) * num_heads
            lse = tl.load(
                partial_lse_ptr + row, mask=first + place < num_splits, other=float("-inf")
            )
            weight = tl.exp2((lse - highest) * LOG2_E)
            # An empty split has weight 0, and its results were not written.
            is_written = lse != float("-inf")
            part = tl.load(partial_ptr + row * RANK + columns, mask=is_written, other=0.0)
            total += weight
            acc += weight * part
    divisor, lse = closed(highest * LOG2_E, total)
    result = (acc / divisor).to(out_ptr.dtype.element_ty)
    out_row = query * num_heads + head
    tl.store(out_ptr + out_row * RANK + columns, result)
    tl.store(lse_ptr + out_row, lse, mask=tl.program_id(2) == 0)


def merge_specialization(rank: int) -> Specialization:
    """The kernel's specialisation."""
    return Specialization(
        kernel=mla_merge_kernel,
        name=f"mla_merge rank={rank}",
        types={"partial_ptr partial_lse_ptr lse_ptr": "*fp32", "out_ptr": "*bf16"},
        options={
            "RANK": rank,
            "COLUMNS": min(rank, _COLUMNS),
            "SPLITS": _SPLITS,
            "num_warps": _NUM_WARPS,
        },
    )
