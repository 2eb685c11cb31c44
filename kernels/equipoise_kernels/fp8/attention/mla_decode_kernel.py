"""The kernel of `mla_decode`: launched by `attention.mla_decode`, whose contract it keeps."""

from __future__ import annotations

from typing import Any

from equipoise_kernels.formats import GROUP
from equipoise_kernels.fp8.attention.softmax import LOG2_E, added, closed, product
from equipoise_kernels.fp8.jit import constant, jit, tl

_GROUP = constant(GROUP)
# Queries that are put in order together; every program does so, in about a microsecond.
_ORDERED = constant(128)
# Lengths above count as this, which keeps what orders them within 32 bits.
_LONGEST = constant(1 << 23)


@jit
def mla_decode_kernel(
    query_ptr: tl.tensor,
    compressed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale: float,
    num_blocks: int,
    num_heads: int,
    table_size: int,
    tokens_per_split: int,
    query_stride: int,
    head_stride: int,
    block_stride: int,
    scale_block_stride: int,
    rotary_block_stride: int,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROTARY_STRIDE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_WIDE_PRODUCTS: tl.constexpr,
) -> None:
    """Each program computes some heads of one query over the positions of one split."""
    query = _query_at(tl.program_id(1), lengths_ptr, tl.num_programs(1)).to(tl.int64)
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    has_head = heads < num_heads
    head_ptrs = query_ptr + query * query_stride + heads * head_stride
    q, q_rotary = _query(head_ptrs, has_head, RANK), _query(head_ptrs + RANK, has_head, ROTARY)

    length = tl.load(lengths_ptr + query)
    start, capacity = tl.program_id(2) * tokens_per_split, table_size * BLOCK_TOKENS
    stop = tl.minimum(tl.minimum(start + tokens_per_split, length), capacity)
    whole_stop = start + tl.maximum(stop - start, 0) // TOKENS * TOKENS
    tables_ptr += query * table_size
    scale *= LOG2_E
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS, TOKENS], tl.float32)
    acc = tl.zeros([HEADS, RANK], tl.float32)
    is_lost = length > capacity
    if BLOCK_TOKENS % TOKENS != 0:
        is_lost |= tl.zeros([TOKENS], tl.int1)
    # Whole steps first, then what is left: only its copies and its scores are masked.
    for IS_REST in tl.static_range(2):
        begin, end = (whole_stop, stop) if IS_REST else (start, whole_stop)
        for first in tl.range(begin, end, TOKENS, num_stages=NUM_STAGES):
            values, rotary, exists = _latents(
                compressed_ptr,
                scales_ptr,
                rotary_ptr,
                tables_ptr,
                first,
                stop - first if IS_REST else None,
                num_blocks,
                block_stride,
                scale_block_stride,
                rotary_block_stride,
                TOKEN_STRIDE,
                SCALE_STRIDE,
                ROTARY_STRIDE,
                QUANTIZED,
                RANK,
                ROTARY,
                BLOCK_TOKENS,
                TOKENS,
            )
            is_lost |= exists == 0
            keys, rotary_keys = tl.trans(values), tl.trans(rotary)
            # The conditions hold in every step. Under `first < end`, Triton starts the next step's
            # copies before this step's products. Under the others, it does not see that a product
            # follows, and has each warp group compute half of the scores, rather than both all.
            if not HAS_WIDE_PRODUCTS:
                scores = product(q_rotary, rotary_keys, product(q, keys)) * scale
                scores = _masked(scores, stop - first if IS_REST else None)
                largest, total, acc = added(largest, total, acc, scores, values)
            elif first < end:
                if first < capacity:
                    scores = product(q, keys)
                else:
                    scores = tl.zeros([HEADS, TOKENS], tl.float32)
                if num_blocks > 0:
                    scores = product(q_rotary, rotary_keys, scores)
                scores *= scale
                scores = _masked(scores, stop - first if IS_REST else None)
                largest, total, acc = added(largest, total, acc, scores, values)
    if BLOCK_TOKENS % TOKENS != 0:
        is_lost = tl.max(is_lost.to(tl.int32), axis=0) > 0
    total = tl.where(is_lost, float("nan"), tl.sum(total, axis=1))
    divisor, lse = closed(largest, total)
    row = (query * tl.num_programs(2) + tl.program_id(2)) * num_heads + heads
    out_ptrs = out_ptr + row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    # The merge does not read what an empty split would write; in graphs most splits are empty.
    is_read = (stop > start) | (tl.num_programs(2) == 1)
    tl.store(out_ptrs, result, mask=has_head[:, None] & is_read)
    tl.store(lse_ptr + row, lse, mask=has_head)


@jit
def _query_at(place: tl.tensor, lengths_ptr: tl.tensor, num_queries: tl.tensor) -> tl.tensor:
    """The query at a place, if of every _ORDERED queries the longest come first.

    Programs start in this order, and short ones at the end leave no multiprocessor idle for long.
    """
    places = tl.arange(0, _ORDERED)
    first = place // _ORDERED * _ORDERED
    lengths = tl.load(lengths_ptr + first + places, mask=first + places < num_queries, other=-1)
    # Distinct numbers, the largest for the longest and the first among equals.
    keys = tl.minimum(tl.maximum(lengths, -1), _LONGEST) * _ORDERED - places
    places_by_length = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
    return first + tl.sum(tl.where(places_by_length == place - first, places, 0), axis=0)


@jit
def _query(head_ptrs: tl.tensor, has_head: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load some columns of a query's heads, [heads, WIDTH]."""
    ptrs = head_ptrs[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(ptrs, mask=has_head[:, None], other=0.0)


@jit
def _masked(scores: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Scores of a step of which only the first `limit` positions count, or all."""
    if limit is not None:
        is_seen = tl.arange(0, scores.shape[1]) < limit
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
    return scores


@jit
def _latents(
    compressed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    first: tl.tensor,
    limit: tl.tensor,
    num_blocks: int,
    block_stride: int,
    scale_block_stride: int,
    rotary_block_stride: int,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROTARY_STRIDE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> Any:
    """Load a step's latents, of its first `limit` positions or all; and whether blocks exist.

    Position i of the step is at `place + i` of its block; the block and `place` are scalars if a
    block holds whole steps. Block 0 is read instead of one that does not exist.
    """
    offsets = tl.arange(0, TOKENS)
    if BLOCK_TOKENS % TOKENS == 0:
        block = tl.load(tables_ptr + first // BLOCK_TOKENS)
        place = first % BLOCK_TOKENS
    else:
        block_ptrs = tables_ptr + (first + offsets) // BLOCK_TOKENS
        if limit is None:
            block = tl.load(block_ptrs)
        else:
            block = tl.load(block_ptrs, mask=offsets < limit, other=0)
        place = (first + offsets) % BLOCK_TOKENS - offsets
    exists = (block >= 0) & (block < num_blocks)
    block = tl.where(exists, block, 0).to(tl.int64)
    starts = compressed_ptr + block * block_stride + place * TOKEN_STRIDE
    values = _rows(starts, limit, TOKENS, TOKEN_STRIDE, RANK)
    if QUANTIZED:
        starts = scales_ptr + block * scale_block_stride + place * SCALE_STRIDE
        scales = _rows(starts, limit, TOKENS, SCALE_STRIDE, RANK // _GROUP)
        values = _dequantized(values, scales)
    starts = rotary_ptr + block * rotary_block_stride + place * ROTARY_STRIDE
    return values, _rows(starts, limit, TOKENS, ROTARY_STRIDE, ROTARY), exists


@jit
def _rows(
    starts: tl.tensor,
    limit: tl.tensor,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load rows [ROWS, WIDTH]: row i is i strides from its start, and zero from `limit` on."""
    offsets = tl.arange(0, ROWS) * STRIDE
    ptrs = (starts + offsets)[:, None] + tl.arange(0, WIDTH)[None, :]
    if limit is None:
        rows = tl.load(ptrs)
    else:
        # Nothing else uses the row's number: the compiler then adds constants to one address.
        rows = tl.load(ptrs, mask=(offsets < limit * STRIDE)[:, None], other=0.0)
    return rows


@jit
def _dequantized(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Multiply codes [tokens, R] by their scales [tokens, R / 128], in bfloat16."""
    grouped = tl.reshape(codes.to(tl.float32), [codes.shape[0], scales.shape[1], _GROUP])
    return tl.reshape(grouped * scales[:, :, None], codes.shape).to(tl.bfloat16)
