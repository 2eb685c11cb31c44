"""`Move`: one expert copied into one slot; its sources, and the waves of a change."""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import EMPTY, Checksums, ExpertTable, Indices, Load, Slots
from equipoise.planning.change import LayoutChange, changes_by_layers
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.topology import Topology
from equipoise.planning.wave_places import waves_in_places

CHECKSUM_BYTES = 16
"""BLAKE2b-128 over an expert's bytes in the order gate, up, down (weights, then scales)."""

MAX_RANK_SOURCES = 4
"""Ranks among the sources of a move, in front of the checkpoint. A rank that hangs costs a puller 5
s once; after four, ten of the 30 s that a wave has by default are left for the checkpoint."""

_MOST_COMPARED = 2 * MAX_RANK_SOURCES
"""Holders of an expert that are compared for each of its moves; more than that take turns."""


def checksums_digest(checksums: Checksums) -> bytes:
    """Digest of a table of experts' checksums, uint8 [layers, experts, 16]: 16 bytes."""
    return hashlib.blake2b(checksums.tobytes(), digest_size=CHECKSUM_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """Fetch the expert from a rank that holds it in the current generation."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Read the expert from the checkpoint; always possible, always the last resort."""


Source = RankSource | CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy logical `expert` of MoE layer `layer` into physical `slot`, verified by `checksum`."""

    layer: int
    slot: int
    expert: int
    checksum: bytes
    sources: tuple[Source, ...]
    """In the order to try them."""


def moves_into(
    held: ExpertTable, target: Layout, *, topology: Topology, checksums: Checksums
) -> dict[int, tuple[Move, ...]]:
    """Compute the moves from `held`, int32 [layers, slots] or EMPTY, to `target`, by rank.

    `checksums` is uint8 [layers, experts, 16]. The sources of a move are the rank itself if it
    holds the expert in another slot, then ranks of its node, then other ranks, then the checkpoint:
    `MAX_RANK_SOURCES` ranks at most. Among equally near holders, the one that is first choice of
    the fewest moves so far comes first, or if there are many, they take turns, so that the copies
    do not all come from one holder.
    """
    assert target.num_ranks == topology.num_ranks, "ranks of one epoch"
    assert held.shape == target.expert_of_slot.shape, "slots of one epoch"
    num_layers, num_experts = target.num_layers, target.num_experts
    assert checksums.shape == (num_layers, num_experts, CHECKSUM_BYTES), "a checksum per expert"
    moves: dict[int, list[Move]] = {rank: [] for rank in range(topology.num_ranks)}
    times_first = [0] * topology.num_ranks
    rank_of_slot = np.repeat(np.arange(target.num_ranks), target.slots_of_rank).tolist()
    sources_of: dict[tuple[int, ...], tuple[Source, ...]] = {}
    changed = is_moved(held, target.expert_of_slot)
    digests = checksums.tobytes()
    for layer in np.flatnonzero(changed.any(axis=1)).tolist():
        holders = _holders(held[layer], target, rank_of_slot)
        experts = target.expert_of_slot[layer].tolist()
        for slot in np.flatnonzero(changed[layer]).tolist():
            expert, rank = experts[slot], rank_of_slot[slot]
            ranks = holders[expert].nearest(rank, topology, times_first)
            if ranks:
                times_first[ranks[0]] += 1
            sources = sources_of.get(ranks)
            if sources is None:
                sources = (*(RankSource(rank=one) for one in ranks), CheckpointSource())
                sources_of[ranks] = sources
            cell = (layer * num_experts + expert) * CHECKSUM_BYTES
            moves[rank].append(
                Move(
                    layer=layer,
                    slot=slot,
                    expert=expert,
                    checksum=digests[cell : cell + CHECKSUM_BYTES],
                    sources=sources,
                )
            )
    return {rank: tuple(of_rank) for rank, of_rank in moves.items()}


def waves(
    current: Layout,
    target: Layout,
    *,
    expert_bytes: int,
    max_wave_bytes: int,
    gain_of_layer: Load | None = None,
) -> Sequence[LayoutChange]:
    """Cut a change into waves of a few layers each; every layout on the way is valid.

    A wave takes whole layers while no rank stages more than `max_wave_bytes`, but at least one.
    Layers that do not change are in no wave; a change of shares counts, although it stages nothing.
    Layers that share places are cut by `waves_in_places`.
    The layers with the highest `gain_of_layer`, [layers] in any unit, come first, else those with
    the lowest index. Generations count from that of `target`; the last wave leads to its placement.
    """
    moved = current.expert_of_slot != target.expert_of_slot
    is_even = current.share_of_slot is None and target.share_of_slot is None
    changes = moved if is_even else moved | (current.shares() != target.shares())
    moves_of_rank = np.add.reduceat(moved, current.first_slot[:-1], axis=1, dtype=np.int64)
    priority = np.zeros(current.num_layers) if gain_of_layer is None else -gain_of_layer
    is_changed = changes.any(axis=1)
    layers = [layer for layer in np.argsort(priority, kind="stable").tolist() if is_changed[layer]]
    most_moves = max_wave_bytes // expert_bytes
    if current.has_empty_slots or target.has_empty_slots:
        return waves_in_places(current, target, layers=layers, most_moves=most_moves)
    batches = _batches(layers, moves_of_rank, most_moves=most_moves)
    return changes_by_layers(current, target, batches=batches, first_generation=target.generation)


class _Holders:
    """The ranks that hold an expert of a layer."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        """In order."""
        self._of_node: dict[str, list[int]] = {}
        self._num_moves = 0

    def nearest(self, rank: int, topology: Topology, times_first: list[int]) -> tuple[int, ...]:
        """Return the sources of a move into a slot of `rank`, the nearest and least used one first.

        If there are many holders, they take turns.
        """
        if len(self.ranks) < 2:  # Most experts have only one holder.
            return tuple(self.ranks)
        node_of_rank, num_ranks = topology.node_of_rank, topology.num_ranks
        if len(self.ranks) <= _MOST_COMPARED:
            in_order = sorted(
                self.ranks,
                key=lambda holder: (
                    holder != rank,
                    node_of_rank[holder] != node_of_rank[rank],
                    times_first[holder],
                    (holder - rank) % num_ranks,  # Breaks ties so that first choices differ.
                ),
            )
            return tuple(in_order[:MAX_RANK_SOURCES])
        return self._some_in_turn(rank, node_of_rank)

    def _some_in_turn(self, rank: int, node_of_rank: Sequence[str]) -> tuple[int, ...]:
        """Return the rank itself if it holds the expert, then holders of its node, then others."""
        if not self._of_node:
            for holder in self.ranks:
                self._of_node.setdefault(node_of_rank[holder], []).append(holder)
        at = bisect_left(self.ranks, rank)
        found = [one for one in self.ranks[at : at + 1] if one == rank]
        for some in (self._of_node.get(node_of_rank[rank], []), self.ranks):
            begin = self._num_moves % max(1, len(some))
            few = some[begin : begin + MAX_RANK_SOURCES]
            few += some[: min(begin, MAX_RANK_SOURCES - len(few))]
            found += [holder for holder in few if holder not in found] if found else few
            if len(found) >= MAX_RANK_SOURCES:
                break
        self._num_moves += 1
        return tuple(found[:MAX_RANK_SOURCES])


def _holders(held: Slots, layout: Layout, rank_of_slot: list[int]) -> list[_Holders]:
    """Find the ranks that hold each expert of a layer."""
    holders = [_Holders() for _ in range(layout.num_experts)]
    for rank, expert in zip(rank_of_slot, held.tolist(), strict=True):
        if expert != EMPTY:
            ranks = holders[expert].ranks
            if not ranks or ranks[-1] != rank:  # The slots of a rank are next to each other.
                ranks.append(rank)
    return holders


def _batches(layers: list[int], moves_of_rank: Indices, *, most_moves: int) -> list[list[int]]:
    """Group consecutive layers while no rank has more than `most_moves`, at least one each."""
    in_order = moves_of_rank[layers]
    before = np.zeros((len(layers) + 1, in_order.shape[1]), dtype=np.int64)
    np.cumsum(in_order, axis=0, out=before[1:])
    # Usually two neighbours already exceed the bound; check that for all layers at once.
    joins = (in_order[1:] + in_order[:-1]).max(axis=1, initial=0) <= most_moves
    batches: list[list[int]] = []
    begin = 0
    for place, layer in enumerate(layers):
        if place and joins[place - 1] and (before[place + 1] - before[begin]).max() <= most_moves:
            batches[-1].append(layer)
        else:
            begin = place
            batches.append([layer])
    return batches
