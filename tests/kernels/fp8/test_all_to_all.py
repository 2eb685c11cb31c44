"""The exchange by kernels between virtual ranks of one process, in Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from equipoise_kernels.errors import (
    AllToAllError,
    CapacityError,
    GenerationMismatchError,
    KernelInputError,
    PeerMissingError,
    UnknownSlotError,
)
from equipoise_kernels.formats import empty_rows
from equipoise_kernels.fp8.all_to_all import peer
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.flags import (
    FINE,
    TOO_MANY_ROWS,
    flag_of,
    generation_of,
    raise_faults,
    sequence_of,
    status_of,
)
from equipoise_kernels.fp8.all_to_all.order import Incoming, Outgoing, RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.peer_kernels import order_pairs_kernel
from equipoise_kernels.fp8.all_to_all.peer_operation import AllToAllConfig
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import WindowMap, virtual_windows
from equipoise_kernels.fp8.quant.group_quant import group_quant

CONFIG = AllToAllConfig(parts=2, block=128, num_warps=4)
SHAPE = EpShape(
    rank=0, num_ranks=2, slots_per_rank=3, top_k=2, dim=128, max_tokens=4, payload=Payload.FP32
)


def virtual_buffers(shape=SHAPE, *, timeout_s=30.0):
    windows = virtual_windows(shape, device="cpu")
    shapes = [replace(shape, rank=rank) for rank in range(shape.num_ranks)]
    return windows, [
        EpBuffer(one, PeerBackend(one, window, timeout_s=timeout_s, config=CONFIG), device="cpu")
        for one, window in zip(shapes, windows, strict=True)
    ]


def dispatched(buffers, rows, slots, layout=None):
    arriving = [
        buffer.begin_dispatch(x, torch.tensor(s, dtype=torch.int64).view(-1, 2), layout=layout)
        for buffer, x, s in zip(buffers, rows, slots, strict=True)
    ]
    return [receive() for receive in arriving]


def failures(buffers, rows, slots):
    """What each rank raises, all of them having sent."""
    arriving = [
        buffer.begin_dispatch(x, torch.tensor(s, dtype=torch.int64).view(-1, 2))
        for buffer, x, s in zip(buffers, rows, slots, strict=True)
    ]
    seen = []
    for receive in arriving:
        with pytest.raises(AllToAllError) as caught:
            receive()
        seen.append(caught.value)
    return seen


def numbered(first, count):
    """Rows that hold their number."""
    return torch.arange(first, first + count).float().unsqueeze(1).repeat(1, SHAPE.dim)


SLOTS = [[[0, 4], [4, 1], [2, 0]], [[4, 5], [0, -1]]]


def test_rows_come_by_slot_then_rank_then_token_and_go_back_weighted(interpreted):
    _, buffers = virtual_buffers()
    rows = [numbered(10, 3), numbered(20, 2)]
    here = dispatched(buffers, rows, SLOTS)
    assert [one.rows[:, 7].tolist() for one in here] == [[10, 12, 21, 11, 12], [10, 11, 20, 20]]
    assert [one.rows_of_slot.tolist() for one in here] == [[3, 1, 1], [0, 3, 1]]
    assert [one.slot_ends.tolist() for one in here] == [[3, 4, 5], [0, 3, 4]]
    weights = [torch.tensor([[1.0, 2.0]] * 3), torch.tensor([[0.5, 4.0]] * 2)]
    returning = [
        buffer.begin_combine(one.rows * (rank + 1), one.handle, weights_TK=w)
        for rank, (buffer, one, w) in enumerate(zip(buffers, here, weights, strict=True))
    ]
    sums = [receive()[:, 100].tolist() for receive in returning]
    assert sums == [[10 + 40, 22 + 22, 36], [20 + 160, 10.5]]


def test_slots_may_start_at_multiples(interpreted):
    _, buffers = virtual_buffers()
    (here, _) = dispatched(
        buffers, [numbered(10, 3), numbered(20, 2)], SLOTS, RowLayout(alignment=4)
    )
    assert here.rows[[0, 1, 2, 4, 8], 0].tolist() == [10, 12, 21, 11, 12]
    assert here.slot_ends.tolist() == [3, 5, 9]
    assert len(here.rows) == 12


def test_the_low_latency_pair_reserves_room_per_slot(interpreted):
    shape = replace(SHAPE, num_ranks=1, payload=Payload.BF16)
    _, (buffer,) = virtual_buffers(shape)
    x = numbered(10, 3).bfloat16()
    slots = torch.tensor([[0, 1], [2, 1], [-1, 0]])
    here = buffer.low_latency_dispatch(x, slots)
    assert here.rows.shape == (3, 4, 128)
    assert here.rows_of_slot.tolist() == [2, 2, 1]
    assert [here.rows[s, :n, 5].tolist() for s, n in enumerate((2, 2, 1))] == [
        [10, 12],
        [10, 11],
        [11],
    ]
    summed = buffer.combine(here.rows, here.handle, weights_TK=torch.ones(3, 2))
    assert summed[:, 3].tolist() == [20, 22, 12]


@pytest.mark.parametrize("payload", Payload)
def test_a_rank_alone_gets_the_same_bits_from_the_reference(payload, interpreted, generator):
    shape = replace(SHAPE, num_ranks=1, payload=payload)
    _, (triton,) = virtual_buffers(shape)
    collective = CollectiveBackend(shape, group=None, timeout_s=1.0)
    x = torch.randn(4, 128, generator=generator).to(payload.answer_dtype)
    slots = torch.tensor([[0, 1], [2, -1], [-1, 0], [-1, -1]])
    weights = torch.rand(4, 2, generator=generator)
    seen = []
    for buffer in (triton, EpBuffer(shape, collective, device="cpu")):
        here = buffer.dispatch(group_quant(x) if payload is Payload.FP8 else x, slots)
        rows = here.rows.dequantized() if payload is Payload.FP8 else here.rows
        y = (rows * 0.3).to(payload.answer_dtype)
        seen.append((rows, buffer.combine(y, here.handle, weights_TK=weights)))
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)
    assert seen[0][1].abs().max() > 0
    assert not seen[0][1][3].any()


def test_two_exchanges_may_be_open_and_no_third_one(interpreted):
    shape = replace(SHAPE, num_ranks=1)
    _, (buffer,) = virtual_buffers(shape)
    slots = torch.tensor([[0, 1]])
    first, second = (buffer.dispatch(numbered(n, 1), slots) for n in (5, 7))
    with pytest.raises(AssertionError, match="receive an earlier combine"):
        buffer.dispatch(numbered(9, 1), slots)
    with pytest.raises(AssertionError, match="order of dispatches"):
        buffer.combine(second.rows, second.handle)
    assert buffer.combine(first.rows, first.handle)[0, 0] == 10
    assert buffer.combine(second.rows, second.handle)[0, 0] == 14


def test_memory_of_an_exchange_is_not_reused_before_its_combine_is_received(interpreted):
    _, (buffer,) = virtual_buffers(replace(SHAPE, num_ranks=1))
    slots = torch.tensor([[0, 1]])
    first = buffer.dispatch(numbered(5, 1), slots)
    receive_second = buffer.begin_dispatch(numbered(7, 1), slots)
    receive_first = buffer.begin_combine(first.rows, first.handle)
    # Another rank may still read the rows of the first dispatch, whose memory a third would take.
    with pytest.raises(AssertionError, match="receive an earlier combine"):
        buffer.begin_dispatch(numbered(9, 1), slots)
    assert receive_first()[0, 0] == 10
    receive_third = buffer.begin_dispatch(numbered(9, 1), slots)
    second, third = receive_second(), receive_third()
    assert buffer.combine(second.rows, second.handle)[0, 0] == 14
    assert buffer.combine(third.rows, third.handle)[0, 0] == 18


def test_only_other_ranks_are_waited_for_and_not_what_this_one_computes(interpreted, monkeypatch):
    shape = replace(SHAPE, num_ranks=1)
    (window,) = virtual_windows(shape, device="cpu")
    now = 0.0

    def pass_time(seconds):
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(peer, "_settle", lambda _device: pass_time(5.0))
    monkeypatch.setattr(peer, "time", SimpleNamespace(monotonic=lambda: pass_time(1.0)))
    buffer = EpBuffer(shape, PeerBackend(shape, window, timeout_s=9.0), device="cpu")
    came = buffer.dispatch(numbered(5, 1), torch.tensor([[0, 1]]))
    assert buffer.waited_s == 1.0
    buffer.combine(came.rows, came.handle)
    assert buffer.waited_s == 2.0


@pytest.mark.parametrize("layout", [RowLayout(is_fixed=True), RowLayout(rows_per_slot=5)])
def test_a_fixed_layout_has_as_many_rows_whatever_arrives(layout, interpreted):
    for rows in ([numbered(10, 3), numbered(20, 2)], [numbered(0, 0), numbered(0, 0)]):
        _, buffers = virtual_buffers()
        slots = [s[: len(x)] for s, x in zip(SLOTS, rows, strict=True)]
        for came in dispatched(buffers, rows, slots, layout=layout):
            assert came.rows.shape[:-1].numel() == layout.most_rows(SHAPE)


def poisoned(windows, shape):
    """Fill the slabs, which no rank reads before it is written."""
    first = WindowMap.of_shape(shape).rows
    for window in windows:
        window.local[first:] = 0xFF


def test_rows_beyond_the_capacity_are_an_error_on_all_ranks_and_overwrite_nothing(interpreted):
    shape = replace(SHAPE, capacity=2)
    windows, buffers = virtual_buffers(shape)
    poisoned(windows, shape)
    # Three rows for rank 0 from rank 1, which has room for two; the slab of rank 0 lies before.
    seen = failures(buffers, [numbered(10, 1), numbered(20, 3)], [[[-1, 3]], [[0, -1]] * 3])
    assert [type(error) for error in seen] == [CapacityError] * 2
    assert [error.ranks for error in seen] == [(1,)] * 2
    assert "larger capacity" in str(seen[0])
    where = WindowMap.of_shape(shape)
    # The first exchange uses the second half of a window.
    slab = windows[0].local[where.rows : where.answers].view(torch.float32)
    slab = slab[: 2 * 2 * 2 * 128].view(2, 2, 2, 128)
    assert slab[1, 1, :, 0].tolist() == [20, 21]
    assert slab[0].isnan().all()
    assert slab[1, 0].isnan().all()
    assert windows[0].local[where.answers :].eq(0xFF).all()


def test_slots_that_do_not_exist_are_an_error_on_all_ranks(interpreted):
    _, buffers = virtual_buffers()
    seen = failures(buffers, [numbered(10, 1), numbered(20, 1)], [[[0, 6]], [[0, 1]]])
    assert [type(error) for error in seen] == [UnknownSlotError] * 2
    assert {error.ranks for error in seen} == {(0,)}


def test_ranks_of_different_generations_are_named(interpreted):
    _, buffers = virtual_buffers()
    for buffer, generation in zip(buffers, (4, 5), strict=True):
        buffer.switch(generation)
    seen = failures(buffers, [numbered(0, 0)] * 2, [[], []])
    assert [type(error) for error in seen] == [GenerationMismatchError] * 2
    assert [error.ranks for error in seen] == [(1,), (0,)]
    assert "rank 1 runs 5" in str(seen[0])


def test_a_silent_rank_is_named_and_the_buffer_rejects_later_calls(interpreted):
    _, (buffer, _) = virtual_buffers(timeout_s=0.05)
    with pytest.raises(
        PeerMissingError, match=r"rank 1 did not send rows within 0\.05 s"
    ) as caught:
        buffer.dispatch(numbered(0, 2), torch.tensor([[0, 1], [2, 3]]))
    assert caught.value.ranks == (1,)
    with pytest.raises(AllToAllError, match="form a new group"):
        buffer.dispatch(numbered(0, 0), torch.empty(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("x", "slots", "named"),
    [
        (torch.zeros(5, 128), torch.zeros(5, 2, dtype=torch.int64), "room for 4"),
        (torch.zeros(2, 128), torch.zeros(2, 2), "slots_TK must be int64"),
        (torch.zeros(2, 128), torch.zeros(2, 3, dtype=torch.int64), r"slots_TK must be \[2, 2\]"),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), "x must be"),
        (torch.zeros(2, 128).bfloat16(), torch.zeros(2, 2, dtype=torch.int64), "must be float32"),
        (torch.zeros(2, 256)[:, ::2], torch.zeros(2, 2, dtype=torch.int64), "neighbouring"),
        (empty_rows((2, 128), device="cpu"), torch.zeros(2, 2, dtype=torch.int64), "x is FP8"),
    ],
)
def test_rows_that_break_the_contract_are_rejected_before_anything_is_sent(x, slots, named):
    buffer = EpBuffer(SHAPE, backend=None, device="cpu")
    with pytest.raises(KernelInputError, match=named):
        buffer.begin_dispatch(x, slots)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 2}, "rank 2"),
        ({"top_k": 0}, "top_k"),
        ({"capacity": 0}, "pair_rows"),
        ({"payload": Payload.FP8, "dim": 64}, "multiple of 128"),
        ({"payload": Payload.BF16, "dim": 3}, "even"),
    ],
)
def test_impossible_sizes_are_rejected(change, named):
    with pytest.raises(KernelInputError, match=named):
        replace(SHAPE, **change)


def test_a_flag_carries_status_generation_and_sequence_and_wraps_around():
    flag = int(
        flag_of(
            sequence=torch.tensor([2**31 + 5]),
            generation=torch.tensor([2**30 + 9]),
            status=torch.tensor([TOO_MANY_ROWS]),
        )
    )
    assert (sequence_of(flag), generation_of(flag), status_of(flag)) == (5, 9, TOO_MANY_ROWS)


def test_reported_faults_take_precedence_over_missing_flags():
    own, other, full = (
        int(
            flag_of(
                sequence=torch.tensor([s]), generation=torch.tensor([g]), status=torch.tensor([x])
            )
        )
        for s, g, x in ((3, 1, FINE), (3, 2, FINE), (3, 1, TOO_MANY_ROWS))
    )
    late = own - 1
    with pytest.raises(GenerationMismatchError):
        raise_faults([own, other, None], own=own, timeout_s=1.0, what="rows")
    with pytest.raises(CapacityError):
        raise_faults([own, full, late], own=own, timeout_s=1.0, what="rows")
    with pytest.raises(PeerMissingError, match="ranks 1, 2 did not"):
        raise_faults([own, late, None], own=own, timeout_s=1.0, what="rows")
    raise_faults([own, own], own=own, timeout_s=1.0, what="rows")


LARGER = replace(SHAPE, num_ranks=4, slots_per_rank=2, top_k=3, max_tokens=50)


def test_the_order_of_pairs_is_that_of_a_loop(generator):
    slots = torch.randint(-1, 8, (40, 3), generator=generator)
    outgoing = Outgoing.of_slots(slots, LARGER)
    pairs = [(int(slot), pair) for pair, slot in enumerate(slots.flatten())]
    wanted = sorted(pair for pair in pairs if pair[0] >= 0)
    assert outgoing.order_N[: len(wanted)].tolist() == [pair for _, pair in wanted]


@pytest.mark.parametrize("capacity", [None, 9])
def test_the_kernel_orders_pairs_as_the_reference_and_places_answers(
    capacity, generator, interpreted
):
    shape = replace(LARGER, capacity=capacity)
    slots = torch.randint(-2, 10, (40, 3), generator=generator)
    outgoing = Outgoing.of_slots(slots, shape)
    sequence, generation = torch.tensor([2**31 + 4]), torch.tensor([9])
    tokens, places = (torch.full((120,), -7, dtype=torch.int32) for _ in range(2))
    table, unknown = torch.zeros(3, 4, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    flag = torch.zeros(1, dtype=torch.int64)
    # Several steps of the loop over pairs.
    order_pairs_kernel[(9,)](
        slots, sequence, generation, tokens, places, table, unknown, flag, 120,
        NUM_SLOTS=2, CAPACITY=shape.pair_rows, TOP_K=3, PAIRS=32, num_warps=1,
    )  # fmt: skip
    num_placed = int(outgoing.counts_RS.sum())
    assert tokens[:num_placed].tolist() == (outgoing.order_N[:num_placed] // 3).tolist()
    assert (tokens[num_placed:] == -7).all()
    counts = outgoing.counts_RS
    assert torch.equal(table[0].flatten(), (counts.flatten().cumsum(0) - counts.flatten()).int())
    assert torch.equal(table[1:], torch.stack([counts, counts.cumsum(1) - counts]).int())
    assert int(unknown) == int(((slots < -1) | (slots >= 8)).sum())
    assert int(sequence) == 2**31 + 5
    assert int(flag) == 9 << 31 | 5
    sent_to, wanted = [0] * 4, [-1] * 120
    for pair in outgoing.order_N[:num_placed].tolist():
        rank = int(slots.flatten()[pair]) // 2
        if sent_to[rank] < shape.pair_rows:
            wanted[pair] = rank * shape.pair_rows + sent_to[rank]
        sent_to[rank] += 1
    assert places.tolist() == wanted
    assert (max(sent_to) > shape.pair_rows) is (capacity is not None)


@pytest.mark.parametrize(
    "layout", [RowLayout(), RowLayout(alignment=8), RowLayout(rows_per_slot=40)]
)
def test_the_kernel_places_rows_as_the_reference_without_those_of_a_faulty_rank(
    layout, generator, interpreted
):
    window = virtual_windows(LARGER, device="cpu")[1]
    where = WindowMap.of_shape(LARGER)
    counts = torch.randint(0, 9, (2, 4, 2), generator=generator)
    flag = torch.tensor([3 << 31 | 5])
    flags = torch.tensor([[0] * 4, [int(flag), int(flag) - 1, int(flag), int(flag)]])
    for offset, numbers in ((where.flags, flags), (where.counts, counts)):
        here = window.local[offset : offset + numbers.numel() * 8]
        here.copy_(numbers.flatten().view(torch.uint8))
    backend = PeerBackend(replace(LARGER, rank=1), window, timeout_s=0.01, config=CONFIG)
    table, rows = torch.zeros(3, 4, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(PeerMissingError) as caught:
        backend._wait(flag, table, rows, layout=layout)
    assert caught.value.ranks == (1,)
    counts[1, 1] = 0
    incoming = Incoming.of_counts(counts[1], layout)
    assert torch.equal(table[0], incoming.starts_RS.int())
    assert torch.equal(table[1], incoming.counts_RS.int())
    assert torch.equal(table[2], (counts[1].cumsum(1) - counts[1]).int())
    assert torch.equal(rows, torch.stack([incoming.rows_S, incoming.ends_S]))


def test_the_places_of_arriving_rows_are_those_of_a_loop(generator):
    counts = torch.randint(0, 4, (3, 5), generator=generator)
    incoming = Incoming.of_counts(counts, RowLayout())
    order = sorted((slot, rank) for rank in range(3) for slot in range(5))
    place, wanted = 0, {}
    for slot, rank in order:
        wanted[rank, slot] = list(range(place, place + int(counts[rank, slot])))
        place += int(counts[rank, slot])
    flat = [p for rank in range(3) for slot in range(5) for p in wanted[rank, slot]]
    assert incoming.places().tolist() == flat
    assert int(incoming.num_rows) == place


def test_a_captured_graph_raises_nothing_until_checked(interpreted, monkeypatch):
    monkeypatch.setattr(peer, "_is_capturing", lambda: True)
    backends = [
        PeerBackend(replace(SHAPE, rank=rank), window, timeout_s=1e-6, config=CONFIG)
        for rank, window in enumerate(virtual_windows(SHAPE, device="cpu"))
    ]
    buffers = [EpBuffer(SHAPE, backend, device="cpu") for backend in backends]
    fixed = RowLayout(is_fixed=True)
    here = dispatched(buffers, [numbered(10, 3), numbered(20, 2)], SLOTS, layout=fixed)
    # The number of rows is unknown, so there is room for the maximum.
    assert here[0].rows.shape == (2 * 4 * 2, 128)
    assert here[0].rows[:5, 7].tolist() == [10, 12, 21, 11, 12]
    backends[0].check()
    lonely = buffers[0].dispatch(numbered(10, 3), torch.tensor(SLOTS[0]), layout=fixed)
    assert lonely.rows_of_slot.tolist() == [2, 1, 1]
    with pytest.raises(PeerMissingError, match="rank 1 did not send"):
        backends[0].check()
    backends[0].check()


def test_a_captured_step_of_many_exchanges_waits_long_for_a_lost_rank_only_once(
    interpreted, monkeypatch
):
    from triton.runtime.interpreter import InterpreterBuilder

    polls, kernel, atomic = [], peer.wait_flags_kernel, InterpreterBuilder.create_atomic_rmw

    def polled(*arguments):
        polls[-1] += 1
        return atomic(*arguments)

    class Watched:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                polls.append(0)
                with monkeypatch.context() as patch:
                    patch.setattr(InterpreterBuilder, "create_atomic_rmw", polled)
                    kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(peer, "wait_flags_kernel", Watched())
    monkeypatch.setattr(peer, "_is_capturing", lambda: True)
    window, _ = virtual_windows(SHAPE, device="cpu")
    backend = PeerBackend(SHAPE, window, timeout_s=5e-6, config=CONFIG)
    buffer = EpBuffer(SHAPE, backend, device="cpu")
    for _ in range(2):
        for _ in range(2):
            layout = RowLayout(is_fixed=True)
            came = buffer.dispatch(numbered(10, 3), torch.tensor(SLOTS[0]), layout=layout)
            buffer.combine(came.rows, came.handle)
        with pytest.raises(PeerMissingError, match="rank 1 did not send"):
            backend.check()
    assert polls == 2 * [5, 1, 1, 1]
    # The first look is no wait.
    assert buffer.waited_s == pytest.approx(2 * 4e-6)
    # A device that polls twice as fast must poll twice as often.
    moments = iter([0.0, 0.01])
    monkeypatch.setattr(peer, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(peer, "_is_capturing", lambda: False)
    backend._polls_launch.fill_(7)
    backend.measure_polls()
    assert polls.pop() == 7
    monkeypatch.setattr(peer, "_is_capturing", lambda: True)
    buffer.dispatch(numbered(10, 3), torch.tensor(SLOTS[0]), layout=layout)
    assert polls.pop() == 10
