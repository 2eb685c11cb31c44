"""Slots chosen so that ranks' loads of one layer and step come out even, in two launches.

Contract: `replica_balance`'s division and order, bit by bit, for a layout in which no slot is given
twice. Choices [T, K] may be empty. A choice that is no expert (padding) has slot -1 and takes no
place. Counts of all ranks' choices are integers, and no sum depends on timing, so all ranks compute
the same.

Launch 1 is one program. It works on replicated experts only, at most as many as there are redundant
slots, as a matrix [experts, replicas] in registers, and on the slots' loads as [ranks, slots per
rank]; in each round, values move between the two through shared memory. Launch 2 has a program per
expert, which gives the expert's choices their places among its replicas.

A layout whose matrices would not fit (`LayoutSizes.fit`) is computed by the torch twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import require
from equipoise_kernels.fp8.jit import constant, jit, next_power_of_two, tl
from equipoise_kernels.fp8.moe.routes import SlotTables
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization
from equipoise_kernels.replica_balance import (
    FRACTION_BITS,
    ROUNDS,
    STEP_HALVES,
    balanced_replicas,
)
from equipoise_kernels.replica_choice import SHARE_BITS

MAX_ELEMENTS = 2048
"""Elements of a matrix of launch 1, with both sides rounded up to powers of two."""

_LEAST_PLACES = 8
"""Layouts with fewer replicas of an expert share one compilation."""
_PAIRS = 512
"""Choices that a program of launch 2 reads at a time."""
_ELEMENTS_PER_WARP = 256
_LEAST_WARPS = 4

# Counts that launch 1 reads at a time.
_COUNTS = constant(4096)
_FRACTION_BITS = constant(FRACTION_BITS)
_STEP_HALVES = constant(STEP_HALVES)
_SHARE_BITS = constant(SHARE_BITS)


def balance_to_slots(
    expert_ids_TK: Tensor,
    counts_RE: Tensor,
    tables: SlotTables,
    *,
    rank: int,
    slots_per_rank: int,
) -> Tensor:
    """Return the slot of every choice of a rank, int64 [T, K]; -1 for what is no expert.

    Args:
        expert_ids_TK: this rank's choices, int64.
        counts_RE: how often each rank chose each expert, int64, below 2^24 for each expert over all
            ranks; those of `rank` are `count_experts(expert_ids_TK)`.
        tables: the layer's replicas.
        rank: the rank that has these choices.
        slots_per_rank: physical slots of each rank; rank = slot // slots_per_rank.

    Raises:
        KernelInputError: the arguments break the contract.
    """
    require("expert_ids", expert_ids_TK, torch.int64, contiguous=True)
    require("counts", counts_RE, torch.int64, contiguous=True, like=expert_ids_TK)
    require("slots_of_expert", tables.slots_of_expert_ER, like=expert_ids_TK)
    if expert_ids_TK.dim() != 2 or counts_RE.dim() != 2:
        raise KernelInputError(
            f"expert_ids and counts must be matrices, not {list(expert_ids_TK.shape)} and "
            f"{list(counts_RE.shape)}"
        )
    num_ranks, num_experts = counts_RE.shape
    require("replica_count", tables.replica_count_E, shape=(num_experts,))
    if not 0 <= rank < num_ranks or slots_per_rank < 1:
        raise KernelInputError(
            f"need a rank of {num_ranks} and slots on it, not {rank} and {slots_per_rank}"
        )
    if num_ranks * slots_per_rank < num_experts:
        raise KernelInputError(
            f"{num_experts} experts need as many slots: {num_ranks} ranks have "
            f"{slots_per_rank} each"
        )
    out_TK = torch.empty_like(expert_ids_TK)
    if out_TK.numel() > 0:
        REPLICA_BALANCE.on(out_TK.device)(
            expert_ids_TK,
            counts_RE,
            tables,
            rank=rank,
            slots_per_rank=slots_per_rank,
            out_TK=out_TK,
        )
    return out_TK


def replica_balance_reference(
    expert_ids_TK: Tensor,
    counts_RE: Tensor,
    tables: SlotTables,
    *,
    rank: int,
    slots_per_rank: int,
    out_TK: Tensor,
) -> None:
    """The torch twin."""
    num_experts = counts_RE.shape[1]
    is_expert_TK = (expert_ids_TK >= 0) & (expert_ids_TK < num_experts)
    # Padding is for one more expert, which nobody counts.
    ids_TK = expert_ids_TK.where(is_expert_TK, num_experts)
    slots_ER = functional.pad(tables.slots_of_expert_ER, (0, 0, 0, 1))
    ends_ER = tables.share_ends_ER
    replicas_TK = balanced_replicas(
        ids_TK,
        functional.pad(counts_RE, (0, 1)),
        slots_ER,
        functional.pad(tables.replica_count_E, (0, 1), value=1),
        rank=rank,
        slots_per_rank=slots_per_rank,
        share_ends_ER=None if ends_ER is None else functional.pad(ends_ER, (0, 0, 0, 1)),
    )
    slots_TK = slots_ER[ids_TK, replicas_TK.clamp(max=slots_ER.shape[1] - 1)]
    out_TK.copy_(slots_TK.masked_fill(~is_expert_TK, -1))


def replica_balance_triton(
    expert_ids_TK: Tensor,
    counts_RE: Tensor,
    tables: SlotTables,
    *,
    rank: int,
    slots_per_rank: int,
    out_TK: Tensor,
) -> None:
    """Launch both kernels, or compute the torch twin if the layout does not fit."""
    num_ranks, num_experts = counts_RE.shape
    slots_ER = tables.slots_of_expert_ER
    sizes = LayoutSizes(
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        most_replicas=slots_ER.shape[1],
    )
    if not sizes.fit:
        replica_balance_reference(
            expert_ids_TK,
            counts_RE,
            tables,
            rank=rank,
            slots_per_rank=slots_per_rank,
            out_TK=out_TK,
        )
        return
    ends_ER = replica_ends_triton(counts_RE, tables, slots_per_rank=slots_per_rank)
    balanced_slots_kernel[(num_experts + 1,)](
        expert_ids_TK,
        counts_RE,
        slots_ER,
        tables.replica_count_E,
        ends_ER,
        out_TK,
        rank,
        expert_ids_TK.numel(),
        num_experts,
        slots_ER.shape[1],
        slots_ER.stride(0),
        **sizes.slots_options,
    )


def replica_ends_triton(counts_RE: Tensor, tables: SlotTables, *, slots_per_rank: int) -> Tensor:
    """Launch the first kernel, and return `replica_ends` of experts with several replicas.

    Int64 [E, R]; rows of other experts are not written. The layout must fit.
    """
    num_ranks, num_experts = counts_RE.shape
    slots_ER = tables.slots_of_expert_ER
    num_places = slots_ER.shape[1]
    sizes = LayoutSizes(
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        most_replicas=num_places,
    )
    shares_ER = slots_ER if tables.share_ends_ER is None else tables.share_ends_ER
    ends_ER = torch.empty(num_experts, num_places, dtype=torch.int64, device=counts_RE.device)
    notes_N = ends_ER.new_empty(num_ranks * slots_per_rank + sizes.rows)
    replica_ends_kernel[(1,)](
        counts_RE,
        slots_ER,
        tables.replica_count_E,
        shares_ER,
        notes_N,
        ends_ER,
        num_experts,
        num_ranks,
        slots_per_rank,
        num_places,
        slots_ER.stride(0),
        shares_ER.stride(0),
        **sizes.ends_options,
        HAS_SHARES=tables.share_ends_ER is not None,
    )
    return ends_ER


@jit
def replica_ends_kernel(
    counts_ptr: tl.tensor,
    slots_of_expert_ptr: tl.tensor,
    replica_count_ptr: tl.tensor,
    share_ends_ptr: tl.tensor,
    notes_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_experts: int,
    num_ranks: int,
    slots_per_rank: int,
    num_places: int,
    table_stride: int,
    share_stride: int,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """Divide the choices of experts with several replicas; a single program.

    Notes are for every slot what it holds, and then the experts with several replicas. A slot holds
    either the load of an expert without other replicas, or replica n, as -1 - n.
    """
    num_slots = num_ranks * slots_per_rank
    held_ptr, several_ptr = notes_ptr, notes_ptr + num_slots
    slot_of_rank = tl.arange(0, SLOTS)[None, :]
    slot_of_all = tl.arange(0, RANKS)[:, None] * slots_per_rank + slot_of_rank
    is_slot = (slot_of_rank < slots_per_rank) & (slot_of_all < num_slots)
    tl.store(held_ptr + slot_of_all, tl.zeros([RANKS, SLOTS], tl.int64), mask=is_slot)
    tl.debug_barrier()

    loads = _summed(counts_ptr, num_ranks, num_experts, EXPERTS)
    num_several = _note_experts(
        loads,
        held_ptr,
        several_ptr,
        slots_of_expert_ptr,
        replica_count_ptr,
        num_experts,
        num_slots,
        table_stride,
        ROWS,
    )
    tl.debug_barrier()

    row = tl.arange(0, ROWS)
    place = tl.arange(0, PLACES)[None, :]
    is_row = row < num_several
    experts = tl.load(several_ptr + row, mask=is_row, other=0).to(tl.int32)
    counts = tl.load(replica_count_ptr + experts, mask=is_row, other=1)[:, None]
    is_used = is_row[:, None] & (place < tl.minimum(counts, num_places))
    slots = tl.load(
        slots_of_expert_ptr + experts[:, None] * table_stride + place, mask=is_used, other=-1
    )
    is_used &= (slots >= 0) & (slots < num_slots)
    replica = row[:, None] * PLACES + place
    tl.store(held_ptr + slots, -1 - replica.to(tl.int64), mask=is_used)
    tl.debug_barrier()

    held = tl.load(held_ptr + slot_of_all, mask=is_slot, other=0)
    is_replica = held < 0
    replica_of_slot = tl.reshape(tl.where(is_replica, -1 - held, 0), [RANKS * SLOTS]).to(tl.int32)
    alone = tl.sum(tl.maximum(held, 0), axis=1)
    rank_of_replica = tl.where(is_used, slots // slots_per_rank, 0)
    rank_of_replica = tl.reshape(rank_of_replica, [ROWS * PLACES]).to(tl.int32)
    replicas_of_rank = tl.sum(is_replica.to(tl.int32), axis=1)
    meeting = tl.reshape(tl.gather(replicas_of_rank, rank_of_replica, axis=0), [ROWS, PLACES])
    meeting = tl.where(is_used, meeting, 1)
    twice = 2 * tl.max(meeting, axis=1)[:, None]
    step = tl.minimum(twice, _STEP_HALVES)

    load = tl.where(is_row, tl.gather(loads.to(tl.int32), experts, axis=0), 0)[:, None]
    parts = load.to(tl.int64) << _FRACTION_BITS
    if HAS_SHARES:
        shares_ptr = share_ends_ptr + experts[:, None] * share_stride + place
        served = _by_shares(parts, shares_ptr, place, is_used)
    else:
        served = parts * (place + 1) // counts - parts * place // counts
        served = tl.where(is_used, served, 0)
    for _ in range(ROUNDS):
        of_slot = tl.gather(tl.reshape(served, [ROWS * PLACES]), replica_of_slot, axis=0)
        of_slot = tl.where(is_replica, tl.reshape(of_slot, [RANKS, SLOTS]), 0)
        of_rank = tl.gather(alone + tl.sum(of_slot, axis=1), rank_of_replica, axis=0)
        others = tl.reshape(of_rank, [ROWS, PLACES]) - served
        wanted = tl.where(is_used, tl.maximum(_level(others, is_used, parts) - others, 0), 0)
        served = (served * (twice - step) + wanted * step) // twice
    total = tl.sum(served, axis=1)[:, None]
    ends = (2 * tl.cumsum(served, axis=1) * load + total) // tl.maximum(2 * total, 1)
    tl.store(ends_ptr + experts[:, None] * num_places + place, ends,
             mask=is_row[:, None] & (place < num_places))  # fmt: skip


@jit
def _summed(
    counts_ptr: tl.tensor, num_ranks: int, num_experts: int, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Choices of all ranks for each expert, int64 [EXPERTS]."""
    BLOCK: tl.constexpr = _COUNTS // EXPERTS
    expert = tl.arange(0, EXPERTS)[None, :]
    sums = tl.zeros([EXPERTS], tl.int64)
    for first in range(0, num_ranks, BLOCK):
        rank = first + tl.arange(0, BLOCK)[:, None]
        inside = (rank < num_ranks) & (expert < num_experts)
        counts = tl.load(counts_ptr + rank * num_experts + expert, mask=inside, other=0)
        sums += tl.sum(counts, axis=0)
    return sums


@jit
def _note_experts(
    loads: tl.tensor,
    held_ptr: tl.tensor,
    several_ptr: tl.tensor,
    slots_of_expert_ptr: tl.tensor,
    replica_count_ptr: tl.tensor,
    num_experts: int,
    num_slots: int,
    table_stride: int,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Note the loads of experts with one replica, list those with several, and count these."""
    expert = tl.arange(0, loads.shape[0])
    count = tl.load(replica_count_ptr + expert, mask=expert < num_experts, other=0)
    slot = tl.load(slots_of_expert_ptr + expert * table_stride, mask=count == 1, other=-1)
    is_alone = (slot >= 0) & (slot < num_slots)
    tl.store(held_ptr + slot, loads << _FRACTION_BITS, mask=is_alone)
    several = (count > 1).to(tl.int32)
    row = tl.cumsum(several, axis=0) - 1
    tl.store(several_ptr + row, expert.to(tl.int64), mask=(several > 0) & (row < ROWS))
    return tl.sum(several, axis=0)


@jit
def _by_shares(
    parts: tl.tensor, shares_ptr: tl.tensor, place: tl.tensor, is_used: tl.tensor
) -> tl.tensor:
    """What each replica gets by the layout's shares."""
    before = tl.load(shares_ptr - 1, mask=is_used & (place > 0), other=0)
    after = tl.load(shares_ptr, mask=is_used, other=0)
    return ((parts * after) >> _SHARE_BITS) - ((parts * before) >> _SHARE_BITS)


@jit
def _level(others: tl.tensor, is_used: tl.tensor, parts: tl.tensor) -> tl.tensor:
    """Height to which each row's water fills the space above others' loads, [rows, 1].

    Ranks that stand out of the water leave one after another; the level falls each time, so none
    comes back.
    """
    is_wet = is_used
    level = tl.zeros_like(parts)
    num_leaving = 1
    while num_leaving > 0:
        covered = tl.sum(tl.where(is_wet, others, 0), axis=1)[:, None]
        num_wet = tl.sum(is_wet.to(tl.int32), axis=1)[:, None]
        level = (covered + parts) // tl.maximum(num_wet, 1)
        is_leaving = is_wet & (others > level)
        num_leaving = tl.sum(tl.sum(is_leaving.to(tl.int32), axis=1), axis=0)
        is_wet = is_wet & (others <= level)
    return level


@jit
def balanced_slots_kernel(
    expert_ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_of_expert_ptr: tl.tensor,
    replica_count_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rank: int,
    num_pairs: int,
    num_experts: int,
    num_places: int,
    table_stride: int,
    RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Each program gives slots to the choices of one expert; the last, to those of none."""
    expert = tl.program_id(0)
    is_expert = expert < num_experts
    ranks = tl.arange(0, RANKS)
    before = tl.load(
        counts_ptr + ranks * num_experts + expert, mask=(ranks < rank) & is_expert, other=0
    )
    first_place = tl.sum(before, axis=0)
    count = tl.load(replica_count_ptr + expert, mask=is_expert, other=1)
    last_replica = tl.minimum(count, num_places).to(tl.int32) - 1
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        inside = pairs < num_pairs
        ids = tl.load(expert_ids_ptr + pairs, mask=inside, other=0)
        is_nobodys = (ids < 0) | (ids >= num_experts)
        is_own = tl.where(is_expert, ids == expert, is_nobodys) & inside
        hits = is_own.to(tl.int64)
        places = first_place + tl.cumsum(hits, axis=0) - hits
        replicas = tl.zeros([PAIRS], tl.int64)
        for replica in range(last_replica):
            end = tl.load(ends_ptr + expert * num_places + replica)
            replicas += (places >= end).to(tl.int64)
        slots = tl.load(slots_of_expert_ptr + expert * table_stride + replicas,
                        mask=is_own & is_expert, other=-1)  # fmt: skip
        tl.store(out_ptr + pairs, slots, mask=is_own)
        first_place += tl.sum(hits, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSizes:
    """Sizes of a layout, and of the matrices for it."""

    num_experts: int
    num_ranks: int
    slots_per_rank: int
    """Physical slots of each rank."""
    most_replicas: int
    """Width of the layout's tables."""

    @property
    def fit(self) -> bool:
        """Whether the kernels take it."""
        options = self.ends_options
        return (
            max(
                options["ROWS"] * options["PLACES"],
                options["RANKS"] * options["SLOTS"],
                options["EXPERTS"],
            )
            <= MAX_ELEMENTS
        )

    @property
    def rows(self) -> int:
        """Experts that may have several replicas, rounded up to a power of two."""
        redundant = self.num_ranks * self.slots_per_rank - self.num_experts
        return next_power_of_two(max(1, min(self.num_experts, redundant)))

    @property
    def ends_options(self) -> dict[str, int]:
        """Launch options of the first kernel, but for shares."""
        places = max(_LEAST_PLACES, next_power_of_two(self.most_replicas))
        return {
            "EXPERTS": next_power_of_two(self.num_experts),
            "RANKS": next_power_of_two(self.num_ranks),
            "SLOTS": next_power_of_two(self.slots_per_rank),
            "ROWS": self.rows,
            "PLACES": places,
            "ROUNDS": ROUNDS,
            "num_warps": max(_LEAST_WARPS, self.rows * places // _ELEMENTS_PER_WARP),
        }

    @property
    def slots_options(self) -> dict[str, int]:
        """Launch options of the second kernel."""
        return {
            "RANKS": next_power_of_two(self.num_ranks),
            "PAIRS": _PAIRS,
            "num_warps": _LEAST_WARPS,
        }


def specializations(sizes: LayoutSizes) -> list[Specialization]:
    """Specialisations for a layout: the first kernel with and without shares, and the second."""
    tables = "counts_ptr slots_of_expert_ptr replica_count_ptr ends_ptr"
    first = [
        Specialization(
            kernel=replica_ends_kernel,
            name=f"replica_ends {sizes} shares={has_shares}",
            types={f"{tables} share_ends_ptr notes_ptr": "*i64"},
            options=sizes.ends_options | {"HAS_SHARES": has_shares},
        )
        for has_shares in (False, True)
    ]
    second = Specialization(
        kernel=balanced_slots_kernel,
        name=f"balanced_slots {sizes}",
        types={f"{tables} expert_ids_ptr out_ptr": "*i64"},
        options=sizes.slots_options,
    )
    return [*first, second]


REPLICA_BALANCE: KernelOperation[Callable[..., None], None] = KernelOperation(
    name="replica_balance",
    backends={"reference": replica_balance_reference, "triton": replica_balance_triton},
    specializations=specializations,
)
