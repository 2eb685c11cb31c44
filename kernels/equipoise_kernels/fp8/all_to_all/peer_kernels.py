"""Kernels that write rows into other ranks' windows, and read what others wrote.

Correctness depends on these properties, which gates check in the compiled code: a program has a
barrier between its last row and the flag (Triton 3.6 adds none by itself), flags are released and
acquired at system scope, and waits are bounded and in a launch of their own, so that no program
waits where others still have to send. Uses no inline assembly, which the interpreter cannot run.

Bookkeeping is in the same launches, so that a captured step has no others: where rows go and how
many there are is in int32 tables [3, ranks, slots], which hold for each rank and slot the index of
the first row, their number, and the index of the first among all rows between the two ranks.

Rows are copied by one program per (rank, slot, part). `order.Outgoing` and `order.Incoming` explain
the order of rows.
"""

from __future__ import annotations

from equipoise_kernels.fp8.all_to_all.flags import (
    GENERATION_BITS,
    GENERATION_MASK,
    NO_FAULT,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    TOO_MANY_ROWS,
    UNKNOWN_SLOT,
)
from equipoise_kernels.fp8.all_to_all.order import NO_SLOT
from equipoise_kernels.fp8.jit import constant, jit, tl

_NO_SLOT = constant(NO_SLOT)
_NO_FAULT = constant(NO_FAULT)
_SEQUENCE_BITS = constant(SEQUENCE_BITS)
_SEQUENCE_MASK = constant(SEQUENCE_MASK)
_GENERATION_MASK = constant(GENERATION_MASK)
_STATUS_SHIFT = constant(SEQUENCE_BITS + GENERATION_BITS)
_TOO_MANY_ROWS = constant(TOO_MANY_ROWS)
_UNKNOWN_SLOT = constant(UNKNOWN_SLOT)


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
def order_pairs_kernel(
    slots_ptr: tl.tensor,
    sequence_ptr: tl.tensor,
    generation_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    table_ptr: tl.tensor,
    unknown_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    num_pairs: int,
    NUM_SLOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Order pairs by slot, a program per slot; the last begins the exchange and looks for faults.

    Writes the token of each place in that order, where each pair's answer will be, and the table of
    outgoing rows. The last program handles pairs without a slot, counts those with an unknown one,
    advances the sequence and writes the flag.
    """
    slot = tl.program_id(0)
    num_slots = tl.num_programs(0) - 1
    rank = slot // NUM_SLOTS
    firsts = tl.zeros([PAIRS], tl.int32)
    segments = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        slots = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=_NO_SLOT)
        is_earlier = (slots >= 0) & (slots < slot)
        firsts += is_earlier.to(tl.int32)
        segments += (is_earlier & (slots >= rank * NUM_SLOTS)).to(tl.int32)
    first, segment = tl.sum(firsts, axis=0), tl.sum(segments, axis=0)
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        is_pair = pairs < num_pairs
        slots = tl.load(slots_ptr + pairs, mask=is_pair, other=_NO_SLOT)
        is_lost = (slots < 0) | (slots >= num_slots)
        is_own = tl.where(slot == num_slots, is_lost, slots == slot) & is_pair
        hits = is_own.to(tl.int32)
        within = count + tl.cumsum(hits, axis=0) - hits
        has_place = (is_lost == 0) & (segment + within < CAPACITY)
        place = tl.where(has_place, rank * CAPACITY + segment + within, _NO_SLOT)
        tl.store(places_ptr + pairs, place, mask=is_own)
        tl.store(tokens_ptr + first + within, pairs // TOP_K, mask=is_own & (is_lost == 0))
        # The last program counts faults instead.
        counted = hits & ((slot < num_slots) | (slots != _NO_SLOT)).to(tl.int32)
        count += tl.sum(counted, axis=0)
    if slot < num_slots:
        tl.store(table_ptr + slot, first)
        tl.store(table_ptr + num_slots + slot, count)
        tl.store(table_ptr + 2 * num_slots + slot, segment)
    else:
        tl.store(unknown_ptr, count)
        sequence = tl.load(sequence_ptr) + 1
        generation = tl.load(generation_ptr) & _GENERATION_MASK
        tl.store(sequence_ptr, sequence)
        tl.store(flag_ptr, (generation << _SEQUENCE_BITS) | (sequence & _SEQUENCE_MASK))


@jit
def send_rows_kernel(
    addresses_ptr: tl.tensor,
    words_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    unknown_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    done_ptr: tl.tensor,
    vector_stride: int,
    rank: int,
    slab_offset: int,
    counts_offset: int,
    flags_offset: int,
    NUM_RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_DISPATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write rows into the slab that each rank keeps for this one; the last program sets the flag.

    Rows to send start `vector_stride` times VECTOR words apart, so that their alignment is known.
    A dispatch sends tokens' rows, their counts, and this rank's faults with the flag. A combine
    sends rows that are in order.
    """
    to_rank = tl.program_id(0)
    block = to_rank * NUM_SLOTS + tl.program_id(1)
    # Products of rows and words may exceed 32 bits.
    first = tl.load(table_ptr + block).to(tl.int64)
    count = tl.load(table_ptr + NUM_RANKS * NUM_SLOTS + block)
    segment = tl.load(table_ptr + 2 * NUM_RANKS * NUM_SLOTS + block)
    flag = tl.load(flag_ptr)
    window = tl.load(addresses_ptr + to_rank)
    area = (flag & 1) * NUM_RANKS + rank
    place = area * CAPACITY + segment
    slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.int32)), 16)
    # More rows are an error, reported by the flag: they must not reach the next rank's slab.
    num_rows = tl.minimum(count, CAPACITY - segment)
    for row in range(tl.program_id(2), num_rows, PARTS):
        source = first + row
        if IS_DISPATCH:
            source = tl.load(tokens_ptr + source).to(tl.int64)
        from_ptr = words_ptr + source * vector_stride * VECTOR
        copy_row(slab_ptr + (place + row) * WORDS, from_ptr, WORDS, BLOCK)
    if IS_DISPATCH:
        header_ptr = (window + counts_offset).to(tl.pointer_type(tl.int64))
        tl.store(header_ptr + area * NUM_SLOTS + tl.program_id(1), count.to(tl.int64))
    tl.debug_barrier()
    done = tl.atomic_add(done_ptr + to_rank, 1, sem="acq_rel", scope="sys")
    if done == NUM_SLOTS * PARTS - 1:
        tl.store(done_ptr + to_rank, 0)
        if IS_DISPATCH:
            blocks = tl.arange(0, PADDED)
            is_block = blocks < NUM_RANKS * NUM_SLOTS
            counts_ptr = table_ptr + NUM_RANKS * NUM_SLOTS
            counts = tl.load(counts_ptr + blocks, mask=is_block, other=0)
            ends = counts + tl.load(
                counts_ptr + NUM_RANKS * NUM_SLOTS + blocks, mask=is_block, other=0
            )
            is_excess = (counts > MAX_TOKENS) | (ends > CAPACITY)
            num_excess = tl.sum(is_excess.to(tl.int64), axis=0)
            num_unknown = tl.load(unknown_ptr).to(tl.int64)
            status = tl.where(num_unknown > 0, _UNKNOWN_SLOT, num_excess * 0)
            status = tl.where(num_excess > 0, _TOO_MANY_ROWS, status)
            flag = flag | (status << _STATUS_SHIFT)
        flags_ptr = (window + flags_offset).to(tl.pointer_type(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + area, flag, sem="release", scope="sys")


@jit
def wait_flags_kernel(
    addresses_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    polls_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    rank: int,
    is_captured: int,
    slot_multiple: int,
    rows_per_slot: int,
    flags_offset: int,
    counts_offset: int,
    NUM_RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    IS_DISPATCH: tl.constexpr,
) -> None:
    """Poll all ranks' flags until they are this exchange's or polls run out; then place rows.

    A single program. `seen` becomes the flags of all ranks, this rank's own, and in a dispatch the
    rows to reserve; `rows` the rows of each slot, and where they end. Rows of a rank whose flag is
    not fine are left out.

    A captured wait records faults and how often it polled in vain, and polls once if there is a
    fault already: of a graph's many waits only one is long, because a missing rank stays missing.
    """
    ranks = tl.arange(0, PADDED_RANKS)
    is_rank = ranks < NUM_RANKS
    flag = tl.load(flag_ptr)
    polls = tl.load(polls_ptr)
    if is_captured != 0:
        faults = tl.load(faults_ptr + ranks, mask=is_rank, other=_NO_FAULT)
        polls = tl.where(tl.max(faults, axis=0) == _NO_FAULT, polls, 1)
    window = tl.load(addresses_ptr + rank)
    flags_ptr = (window + flags_offset).to(tl.pointer_type(tl.int64))
    flags_ptrs = flags_ptr + (flag & 1) * NUM_RANKS + ranks
    nothing = tl.zeros([PADDED_RANKS], tl.int64)
    # A volatile load does not acquire; in Triton only a read-modify-write does.
    seen = tl.atomic_add(flags_ptrs, nothing, mask=is_rank, sem="acquire", scope="sys")
    is_late = (((seen ^ flag) & _SEQUENCE_MASK) != 0) & is_rank
    polled = 1
    while (tl.sum(is_late.to(tl.int32), axis=0) > 0) & (polled < polls):
        seen = tl.atomic_add(flags_ptrs, nothing, mask=is_rank, sem="acquire", scope="sys")
        is_late = (((seen ^ flag) & _SEQUENCE_MASK) != 0) & is_rank
        polled += 1
    tl.store(seen_ptr + ranks, seen, mask=is_rank)
    tl.store(seen_ptr + NUM_RANKS, flag)
    is_fault = (seen != flag) & is_rank
    if is_captured != 0:
        tl.store(faults_ptr + ranks, seen, mask=is_fault)
        if tl.sum(is_fault.to(tl.int32), axis=0) > 0:
            tl.store(faults_ptr + NUM_RANKS, flag)
        tl.store(faults_ptr + NUM_RANKS + 1, tl.load(faults_ptr + NUM_RANKS + 1) + polled - 1)
    if IS_DISPATCH:
        # Counts were written before the flags, which other lanes acquired.
        tl.debug_barrier()
        slots = tl.arange(0, PADDED_SLOTS)
        is_slot = slots < NUM_SLOTS
        places = ranks[:, None] * NUM_SLOTS + slots[None, :]
        is_place = is_rank[:, None] & is_slot[None, :]
        header_ptr = (window + counts_offset).to(tl.pointer_type(tl.int64))
        header_ptr += (flag & 1) * NUM_RANKS * NUM_SLOTS
        is_read = is_place & (is_fault == 0)[:, None]
        counts = tl.load(header_ptr + places, mask=is_read, other=0).to(tl.int32)
        rows = tl.sum(counts, axis=0)
        taken = (rows + slot_multiple - 1) // slot_multiple * slot_multiple
        taken = tl.where(rows_per_slot > 0, rows_per_slot, taken)
        taken = tl.where(is_slot, taken, 0)
        firsts = tl.cumsum(taken, axis=0) - taken
        starts = firsts[None, :] + tl.cumsum(counts, axis=0) - counts
        segments = tl.cumsum(counts, axis=1) - counts
        tl.store(table_ptr + places, starts, mask=is_place)
        tl.store(table_ptr + NUM_RANKS * NUM_SLOTS + places, counts, mask=is_place)
        tl.store(table_ptr + 2 * NUM_RANKS * NUM_SLOTS + places, segments, mask=is_place)
        tl.store(rows_ptr + slots, rows, mask=is_slot)
        tl.store(rows_ptr + NUM_SLOTS + slots, firsts + rows, mask=is_slot)
        tl.store(seen_ptr + NUM_RANKS + 1, tl.sum(taken, axis=0).to(tl.int64))


@jit
def receive_rows_kernel(
    addresses_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
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
    # Products of rows and words may exceed 32 bits.
    start = tl.load(table_ptr + block).to(tl.int64)
    count = tl.load(table_ptr + NUM_RANKS * NUM_SLOTS + block)
    segment = tl.load(table_ptr + 2 * NUM_RANKS * NUM_SLOTS + block)
    area = (tl.load(flag_ptr) & 1) * NUM_RANKS + from_rank
    window = tl.load(addresses_ptr + rank)
    slab_ptr = tl.multiple_of((window + slab_offset).to(tl.pointer_type(tl.int32)), 16)
    place = area * CAPACITY + segment
    num_rows = tl.minimum(tl.minimum(count, CAPACITY - segment), num_out_rows - start)
    for row in range(tl.program_id(2), num_rows, PARTS):
        to_ptr = out_ptr + (start + row) * WORDS
        copy_row(to_ptr, slab_ptr + (place + row) * WORDS, WORDS, BLOCK)


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
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        answer_ptrs = slab_ptr + place * DIM + columns
        is_real = (columns < DIM) & (place >= 0)
        value = tl.load(answer_ptrs, mask=is_real, other=0.0, cache_modifier=".cg").to(tl.float32)
        if IS_WEIGHTED:
            value = value * tl.load(weights_ptr + token * TOP_K + choice)
        total = value if choice == 0 else total + value
    tl.store(out_ptr + token * DIM + columns, total, mask=columns < DIM)
