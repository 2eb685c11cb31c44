"""Kernels that write rows into other ranks' windows, and read what others wrote.

Correctness depends on these properties, which gates check in the compiled code: a program has a
barrier between its last row and the flag (Triton 3.6 adds none by itself), flags are released and
acquired at system scope, and waits are bounded and in a launch of their own, so that no program
waits where others still have to send. Uses no inline assembly, which the interpreter cannot run.

All kernels launch one program per (rank, slot, part), except the waits and the sums.
"""

from __future__ import annotations

from equipoise_kernels.fp8.all_to_all.flags import SEQUENCE_MASK
from equipoise_kernels.fp8.jit import constant, jit, tl

_SEQUENCE_MASK = constant(SEQUENCE_MASK)


@jit
def copy_row(
    to_ptr: tl.tensor,
    from_ptr: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy int32 words."""
    for start in range(0, WORDS, BLOCK):
        places = start + tl.arange(0, BLOCK)
        words = tl.load(from_ptr + places, mask=places < WORDS, other=0, cache_modifier=".cg")
        tl.store(to_ptr + places, words, mask=places < WORDS)


@jit
def send_rows_kernel(
    addresses_ptr: tl.tensor,
    words_ptr: tl.tensor,
    order_ptr: tl.tensor,
    first_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    segment_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    done_ptr: tl.tensor,
    vector_stride: int,
    rank: int,
    slab_offset: int,
    counts_offset: int,
    flags_offset: int,
    NUM_RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write rows into the slab that each rank keeps for this one; the last program sets the flag.

    Rows to send start `vector_stride` times VECTOR words apart, so that their alignment is known.
    TOP_K is 0 where rows are in order and counts are not sent: in a combine.
    """
    to_rank = tl.program_id(0)
    block = to_rank * NUM_SLOTS + tl.program_id(1)
    first = tl.load(first_ptr + block)
    count = tl.load(counts_ptr + block)
    segment = tl.load(segment_ptr + block)
    flag = tl.load(flag_ptr)
    window = tl.load(addresses_ptr + to_rank)
    area = (flag & 1) * NUM_RANKS + rank
    slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.int32)), 16)
    slab_ptr += (area * CAPACITY + segment) * WORDS
    # More rows are an error, reported by the flag: they must not reach the next rank's slab.
    num_rows = tl.minimum(count, CAPACITY - segment)
    for row in range(tl.program_id(2), num_rows, PARTS):
        source = first + row
        if TOP_K > 0:
            source = tl.load(order_ptr + source) // TOP_K
        copy_row(slab_ptr + row * WORDS, words_ptr + source * vector_stride * VECTOR, WORDS, BLOCK)
    if TOP_K > 0:
        header_ptr = (window + counts_offset).to(tl.pointer_type(tl.int64))
        tl.store(header_ptr + area * NUM_SLOTS + tl.program_id(1), count)
    tl.debug_barrier()
    done = tl.atomic_add(done_ptr + to_rank, 1, sem="acq_rel", scope="sys")
    if done == NUM_SLOTS * PARTS - 1:
        tl.store(done_ptr + to_rank, 0)
        flags_ptr = (window + flags_offset).to(tl.pointer_type(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + area, flag, sem="release", scope="sys")


@jit
def wait_flags_kernel(
    addresses_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    polls_ptr: tl.tensor,
    rank: int,
    flags_offset: int,
    NUM_RANKS: tl.constexpr,
) -> None:
    """Poll each rank's flag, a program per rank, until it is this exchange's or polls run out."""
    from_rank = tl.program_id(0)
    flag = tl.load(flag_ptr)
    polls = tl.load(polls_ptr)
    window = tl.load(addresses_ptr + rank)
    flags_ptr = (window + flags_offset).to(tl.pointer_type(tl.int64))
    flags_ptr += (flag & 1) * NUM_RANKS + from_rank
    # A volatile load does not acquire; in Triton only a read-modify-write does.
    seen = tl.atomic_add(flags_ptr, 0, sem="acquire", scope="sys")
    polled = 1
    while (((seen ^ flag) & _SEQUENCE_MASK) != 0) & (polled < polls):
        seen = tl.atomic_add(flags_ptr, 0, sem="acquire", scope="sys")
        polled += 1
    tl.store(seen_ptr + from_rank, seen)


@jit
def receive_rows_kernel(
    addresses_ptr: tl.tensor,
    out_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    segment_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    rank: int,
    num_out_rows: int,
    slab_offset: int,
    NUM_RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Gather rows from the slabs of all ranks into slot order."""
    from_rank = tl.program_id(0)
    block = from_rank * NUM_SLOTS + tl.program_id(1)
    count = tl.load(counts_ptr + block)
    start = tl.load(starts_ptr + block)
    segment = tl.load(segment_ptr + block)
    area = (tl.load(flag_ptr) & 1) * NUM_RANKS + from_rank
    window = tl.load(addresses_ptr + rank)
    slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.int32)), 16)
    slab_ptr += (area * CAPACITY + segment) * WORDS
    num_rows = tl.minimum(tl.minimum(count, CAPACITY - segment), num_out_rows - start)
    for row in range(tl.program_id(2), num_rows, PARTS):
        copy_row(out_ptr + (start + row) * WORDS, slab_ptr + row * WORDS, WORDS, BLOCK)


@jit
def sum_answers_kernel(
    addresses_ptr: tl.tensor,
    places_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rank: int,
    slab_offset: int,
    NUM_RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_BF16: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum answers, a program per (token, block of columns): the twin of `order.weighted_sum`.

    Compile it without fusing products into sums, which would change bits.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parity = tl.load(flag_ptr) & 1
    window = tl.load(addresses_ptr + rank)
    if IS_BF16:
        slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.float32)), 16)
    slab_ptr += parity * NUM_RANKS * CAPACITY * DIM
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice)
        answer_ptrs = slab_ptr + place * DIM + columns
        is_real = (columns < DIM) & (place >= 0)
        value = tl.load(answer_ptrs, mask=is_real, other=0.0, cache_modifier=".cg").to(tl.float32)
        if IS_WEIGHTED:
            value = value * tl.load(weights_ptr + token * TOP_K + choice)
        total = value if choice == 0 else total + value
    tl.store(out_ptr + token * DIM + columns, total, mask=columns < DIM)
