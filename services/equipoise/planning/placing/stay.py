"""Permutes a placement so that few experts move.

Ranks are interchangeable, and so are the slots of a rank. Neither permutation changes the balance;
both change the bytes to move.
"""

from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import ExpertTable, Indices, Slots
from equipoise.planning.placing.compiled import compiled, part


def relabel(
    table: ExpertTable, held: ExpertTable, *, first_slot: Indices, num_nodes: int = 1
) -> ExpertTable:
    """Assign each rank the set of experts most similar to what it holds; int32 [layers, slots].

    Greedy by experts in common: at least half of the best assignment, and more than 95 % of it on
    recorded loads of a 256-expert model.

    Args:
        table: the wanted placement, int32 [layers, slots].
        held: the placement in use, int32 [layers, slots].
        first_slot: int64 [ranks + 1]; rank r owns slots first_slot[r] to first_slot[r + 1] - 1.
            Only ranks with equally many slots exchange their sets.
        num_nodes: nodes of equally many consecutive ranks. Sets are first assigned to whole nodes,
            then to ranks within them, so that experts that share a node keep sharing one.
    """
    placed = np.array(table, dtype=np.int32, order="C")
    in_use = np.ascontiguousarray(held, dtype=np.int32)
    bounds = np.ascontiguousarray(first_slot, dtype=np.int64)
    num_experts = 1 + max(int(placed.max()), int(in_use.max()))
    ranks_per_node = (len(bounds) - 1) // num_nodes
    if num_nodes > 1:
        _match_layers(placed, in_use, bounds[::ranks_per_node].copy(), num_experts)
    for node in range(num_nodes):
        of_node = bounds[node * ranks_per_node : (node + 1) * ranks_per_node + 1]
        _match_layers(placed, in_use, of_node.copy(), num_experts)
    return placed


def align(table: ExpertTable, held: ExpertTable, *, first_slot: Indices) -> ExpertTable:
    """Order each rank's slots so that experts that stay on their rank stay in their slot."""
    aligned = np.array(table, dtype=np.int32, order="C")
    in_use = np.ascontiguousarray(held, dtype=np.int32)
    num_experts = 1 + max(int(aligned.max()), int(in_use.max()))
    _align_layers(aligned, in_use, np.ascontiguousarray(first_slot, dtype=np.int64), num_experts)
    return aligned


class _Chain(NamedTuple):
    """Linked lists of the slots of each expert; -1 ends a list."""

    first: Indices
    length: Indices
    next: Indices
    """[slots]; the others are [experts]."""


@compiled
def _match_layers(table: Slots, held: Slots, bounds: Indices, num_experts: int) -> None:
    """Permute the blocks of slots between `bounds` of each layer to match those of `held`."""
    chain = _chain(num_experts, table.shape[1])
    block_of_slot = np.empty(table.shape[1], dtype=np.int64)
    for block in range(len(bounds) - 1):
        block_of_slot[bounds[block] : bounds[block + 1]] = block
    wanted = np.empty(table.shape[1], dtype=np.int32)
    begin, end = bounds[0], bounds[-1]
    for layer in range(len(table)):
        wanted[begin:end] = table[layer, begin:end]
        _link(chain, wanted, begin, end)
        block_of_place = _match(held[layer], bounds, chain, block_of_slot)
        _unlink(chain, wanted, begin, end)
        for place in range(len(bounds) - 1):
            source = bounds[block_of_place[place]]
            for position in range(bounds[place + 1] - bounds[place]):
                table[layer, bounds[place] + position] = wanted[source + position]


@part
def _match(held: Slots, bounds: Indices, chain: _Chain, block_of_slot: Indices) -> Indices:
    """Choose the block of each place, most experts in common first, [blocks].

    `chain` has the slots of each expert in the blocks. Goes down from a whole block in common to
    nothing, places and blocks in order. A place is revisited only when its best block is taken, so
    time grows with the slots and the replicas per expert, not with the square of the blocks.
    """
    num_blocks = len(bounds) - 1
    first, blocks, in_common_with = _experts_in_common(held, bounds, chain, block_of_slot)
    block_of_place = np.full(num_blocks, -1)
    size_of_free = bounds[1:] - bounds[:-1]  # 0 once a block is taken.
    most = size_of_free.copy()  # Upper bound on the experts in common, per place.
    for in_common in range(most.max(), -1, -1):
        for place in range(num_blocks):
            if most[place] != in_common or block_of_place[place] >= 0:
                continue
            size = bounds[place + 1] - bounds[place]
            best, block = -1, -1
            for entry in range(first[place], first[place + 1]):
                other = blocks[entry]
                # Most in common first, then the lowest number.
                score = (in_common_with[entry] + 1) * num_blocks - other
                if size_of_free[other] == size and score > best:
                    best, block = score, other
            most[place] = (best + block) // num_blocks - 1 if block >= 0 else 0
            if block < 0:  # No free block has anything in common: take the first.
                block = 0
                while size_of_free[block] != size:
                    block += 1
            if most[place] >= in_common:  # More, if both hold twins.
                block_of_place[place] = block
                size_of_free[block] = 0
    return block_of_place


@part
def _experts_in_common(
    held: Slots, bounds: Indices, chain: _Chain, block_of_slot: Indices
) -> tuple[Indices, Indices, Indices]:
    """Find the blocks that share experts with each place, and how many experts.

    Those of place p are at first[p] to first[p + 1].
    """
    num_blocks = len(bounds) - 1
    num_pairs = 0
    for slot in range(bounds[0], bounds[-1]):
        num_pairs += chain.length[held[slot]]
    first = np.zeros(num_blocks + 1, dtype=np.int64)
    blocks = np.empty(num_pairs, dtype=np.int64)
    in_common = np.empty(num_pairs, dtype=np.int64)
    common = np.zeros(num_blocks, dtype=np.int64)
    for place in range(num_blocks):
        end = first[place]
        for slot in range(bounds[place], bounds[place + 1]):
            source = chain.first[held[slot]]
            while source >= 0:
                blocks[end] = block_of_slot[source]
                common[blocks[end]] += 1
                source = chain.next[source]
                end += 1
        # Keep each block once, with its total; the next place overwrites the remaining entries.
        entry = first[place]
        for pair in range(entry, end):
            block = blocks[pair]
            blocks[entry], in_common[entry] = block, common[block]
            entry += int(common[block] > 0)
            common[block] = 0
        first[place + 1] = entry
    return first, blocks, in_common


@compiled
def _align_layers(table: Slots, held: Slots, first_slot: Indices, num_experts: int) -> None:
    chain = _chain(num_experts, table.shape[1])
    wanted = np.empty(table.shape[1], dtype=np.int32)
    is_taken = np.empty(table.shape[1], dtype=np.bool_)
    stays = np.empty(table.shape[1], dtype=np.bool_)
    for layer in range(len(table)):
        wanted[:] = table[layer]
        is_taken[:] = False
        for rank in range(len(first_slot) - 1):
            begin, end = first_slot[rank], first_slot[rank + 1]
            _link(chain, wanted, begin, end)
            for slot in range(begin, end):
                expert = held[layer, slot]
                source = chain.first[expert]
                stays[slot] = source >= 0
                if source >= 0:
                    chain.first[expert] = chain.next[source]
                    is_taken[source] = True
                    table[layer, slot] = expert
            _unlink(chain, wanted, begin, end)
            # New experts fill the remaining slots, in order.
            newcomer = begin
            for slot in range(begin, end):
                if stays[slot]:
                    continue
                while is_taken[newcomer]:
                    newcomer += 1
                table[layer, slot] = wanted[newcomer]
                newcomer += 1


@part
def _chain(num_experts: int, num_slots: int) -> _Chain:
    return _Chain(
        np.full(num_experts, -1),
        np.zeros(num_experts, dtype=np.int64),
        np.empty(num_slots, dtype=np.int64),
    )


@part
def _link(chain: _Chain, slots: Slots, begin: int, end: int) -> None:
    """Link the slots from `begin` to `end` by their expert, ascending."""
    for slot in range(end - 1, begin - 1, -1):
        expert = slots[slot]
        chain.next[slot] = chain.first[expert]
        chain.first[expert] = slot
        chain.length[expert] += 1


@part
def _unlink(chain: _Chain, slots: Slots, begin: int, end: int) -> None:
    for slot in range(begin, end):
        chain.first[slots[slot]] = -1
        chain.length[slots[slot]] = 0
