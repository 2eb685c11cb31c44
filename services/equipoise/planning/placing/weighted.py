"""Weighted replicas: placement and shares found together.

With few redundant slots an even split wastes them: the second replica of an expert takes half of
its load wherever it is, even if one rank has room for more. Here ranks form *chains*. Each rank of
a chain is filled to the same load, and the expert that overflows continues on the next rank: the
wrap-around rule of McNaughton (1959, "Scheduling with deadlines and loss functions"). A chain of r
ranks with S slots each needs r - 1 replicas and holds r * (S - 1) + 1 experts, and all its ranks
carry the same load. What remains is to choose the experts of each chain so that the chains' means
are equal.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable, Indices, Load, Slots, Weights
from equipoise.planning.placing.compiled import compiled

TWO_SLOTS = 2

TOLERANCE = 1e-9
"""Fraction of the mean rank load below which two loads count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedPlacement:
    """Experts and shares of slots."""

    expert_of_slot: ExpertTable
    """int32 [layers, slots]; `EMPTY` where a slot is not needed."""
    share_of_slot: Weights
    """[layers, slots]: the fraction of its expert's load; those of an expert sum to 1."""


def needs_weights(*, num_slots: int, num_experts: int, num_ranks: int) -> bool:
    """Whether chains apply.

    With a redundant slot for every rank there is one chain only. That is worth it with two slots
    per rank, because other placements can hardly use that many replicas.
    """
    redundant, per_rank = num_slots - num_experts, num_slots // num_ranks
    is_worth_it = redundant < num_ranks or per_rank == TWO_SLOTS
    return redundant > 0 and per_rank >= TWO_SLOTS and is_worth_it


def place_weighted(load: Load, *, num_slots: int, num_ranks: int) -> WeightedPlacement:
    """Place experts and their shares for `load`, [layers, experts] in any unit.

    Steepest descent on the most loaded chain: experts are exchanged with it one by one, and ranks
    moved to or from it, while that lowers the larger mean of the two chains.
    """
    num_layers, num_experts = load.shape
    assert needs_weights(num_slots=num_slots, num_experts=num_experts, num_ranks=num_ranks)
    # A chain has fewer redundant slots than ranks. Experts without load take the place of others.
    blanks = np.zeros(max(num_slots - num_experts - num_ranks + 1, 0))
    expert_of_slot = np.empty((num_layers, num_slots), np.int32)
    share_of_slot = np.empty((num_layers, num_slots), np.float64)
    for layer in range(num_layers):
        total = load[layer].sum()
        # An idle layer is placed as if all experts had the same load.
        weights = load[layer] * num_ranks / total if total > 0 else np.ones(num_experts)
        _place_layer(
            np.concatenate((weights, blanks)),
            num_ranks,
            expert_of_slot[layer],
            share_of_slot[layer],
        )
    is_blank = expert_of_slot >= num_experts
    expert_of_slot[is_blank], share_of_slot[is_blank] = EMPTY, 0.0
    return WeightedPlacement(expert_of_slot=expert_of_slot, share_of_slot=share_of_slot)


@compiled
def _place_layer(
    weights: Weights,
    num_ranks: int,
    expert_of_slot: Slots,
    share_of_slot: Weights,
) -> None:
    """Fill one layer of the tables; `weights` sum to the number of ranks."""
    num_experts, num_slots = weights.size, expert_of_slot.size
    slots_per_rank = num_slots // num_ranks
    num_chains = num_ranks - (num_slots - num_experts)
    heaviest_first = np.argsort(-weights)
    chain_of, loads, ranks = _begin(weights, heaviest_first, slots_per_rank, num_ranks, num_chains)
    while _improve(weights, chain_of, loads, ranks, slots_per_rank == TWO_SLOTS):
        pass
    slot = 0
    for chain in range(num_chains):
        members = heaviest_first[chain_of[heaviest_first] == chain]
        end = slot + ranks[chain] * slots_per_rank
        _wrap(weights, members, slots_per_rank, expert_of_slot[slot:end], share_of_slot[slot:end])
        slot = end


@compiled
def _begin(
    weights: Weights, heaviest_first: Indices, slots_per_rank: int, num_ranks: int, num_chains: int
) -> tuple[Indices, Weights, Indices]:
    """Build the initial chains: the chain of each expert, and each chain's load and ranks.

    The hottest experts head one chain each. Further ranks go to the head with the most load per
    rank. The other experts follow, heaviest first, to the chain with the most room per free slot.
    """
    chain_of = np.empty(weights.size, np.int64)
    loads = weights[heaviest_first[:num_chains]]
    chain_of[heaviest_first[:num_chains]] = np.arange(num_chains)
    ranks = np.ones(num_chains, np.int64)
    for _ in range(num_ranks - num_chains):
        ranks[np.argmax(loads / ranks)] += 1
    places = ranks * (slots_per_rank - 1)
    for expert in heaviest_first[num_chains:]:
        roomiest, most_room = -1, -np.inf
        for chain in range(num_chains):
            if places[chain] > 0:
                room = (ranks[chain] - loads[chain]) / places[chain]
                if room > most_room:
                    roomiest, most_room = chain, room
        chain_of[expert] = roomiest
        loads[roomiest] += weights[expert]
        places[roomiest] -= 1
    return chain_of, loads, ranks


@compiled
def _improve(
    weights: Weights, chain_of: Indices, loads: Weights, ranks: Indices, is_rank_movable: bool
) -> bool:
    """Apply the change that lowers the most loaded chain most; False if there is none."""
    worst = int(np.argmax(loads / ranks))
    least = loads[worst] / ranks[worst] - TOLERANCE
    mean, expert, partner = _best_swap(weights, chain_of, loads, ranks, worst)
    if is_rank_movable:
        mean_moved, moved, receiver = _best_move(weights, chain_of, loads, ranks, worst)
        if mean_moved < min(mean, least):
            giver = chain_of[moved]
            ranks[giver] -= 1
            ranks[receiver] += 1
            _hand_over(weights, chain_of, loads, moved, receiver)
            return True
    if mean >= least:
        return False
    receiver = chain_of[partner]
    _hand_over(weights, chain_of, loads, expert, receiver)
    _hand_over(weights, chain_of, loads, partner, worst)
    return True


@compiled
def _best_swap(
    weights: Weights, chain_of: Indices, loads: Weights, ranks: Indices, worst: int
) -> tuple[float, int, int]:
    """Find the best swap with the worst chain; returns the larger mean of both after it first."""
    best, best_expert, best_partner = np.inf, -1, -1
    for expert in np.nonzero(chain_of == worst)[0]:
        for partner in range(weights.size):
            chain, change = chain_of[partner], weights[expert] - weights[partner]
            if chain == worst or change <= 0:
                continue
            mean = max(
                (loads[worst] - change) / ranks[worst], (loads[chain] + change) / ranks[chain]
            )
            if mean < best:
                best, best_expert, best_partner = mean, expert, partner
    return best, best_expert, best_partner


@compiled
def _best_move(
    weights: Weights, chain_of: Indices, loads: Weights, ranks: Indices, worst: int
) -> tuple[float, int, int]:
    """Find the best move of an expert and a rank to or from the worst chain, likewise.

    Only with two slots per rank, where a rank brings exactly one expert.
    """
    best, best_expert, best_receiver = np.inf, -1, -1
    for expert in range(weights.size):
        giver = chain_of[expert]
        if ranks[giver] == 1:
            continue
        given = (loads[giver] - weights[expert]) / (ranks[giver] - 1)
        for receiver in range(loads.size):
            if receiver == giver or worst not in (giver, receiver):
                continue
            mean = max(given, (loads[receiver] + weights[expert]) / (ranks[receiver] + 1))
            if mean < best:
                best, best_expert, best_receiver = mean, expert, receiver
    return best, best_expert, best_receiver


@compiled
def _hand_over(
    weights: Weights, chain_of: Indices, loads: Weights, expert: int, receiver: int
) -> None:
    loads[chain_of[expert]] -= weights[expert]
    loads[receiver] += weights[expert]
    chain_of[expert] = receiver


@compiled
def _wrap(
    weights: Weights,
    members: Indices,
    slots_per_rank: int,
    expert_of_slot: Slots,
    share_of_slot: Weights,
) -> None:
    """Fill a chain's ranks one by one to their mean; `members` are heaviest first.

    Always succeeds: the remaining load is the mean of each remaining rank, so the heaviest waiting
    experts, with the part carried over, fill at least one rank.
    """
    num_ranks = expert_of_slot.size // slots_per_rank
    mean = weights[members].sum() / num_ranks
    carried, rest = members[0], weights[members[0]]
    waiting, left = members[1:].copy(), members.size - 1
    taken = slots_per_rank - 1
    for rank in range(num_ranks):
        splits = _choose(weights, waiting[:left], taken, mean - rest)
        chosen = waiting[left - taken : left]
        excess = max(0.0, rest + weights[chosen].sum() - mean) if rank < num_ranks - 1 else 0.0
        goes_on = carried if splits < 0 else splits
        slot = rank * slots_per_rank
        expert_of_slot[slot] = carried
        share_of_slot[slot] = _part(
            rest - (excess if goes_on == carried else 0.0), weights[carried]
        )
        for place in range(taken):
            expert = chosen[place]
            served = weights[expert] - (excess if goes_on == expert else 0.0)
            expert_of_slot[slot + 1 + place] = expert
            share_of_slot[slot + 1 + place] = _part(served, weights[expert])
        left -= taken
        carried, rest = goes_on, excess
    # Experts without load are split evenly.
    for slot in range(expert_of_slot.size):
        if weights[expert_of_slot[slot]] == 0:
            share_of_slot[slot] = 1.0 / (expert_of_slot == expert_of_slot[slot]).sum()


@compiled
def _choose(weights: Weights, waiting: Indices, taken: int, need: float) -> int:
    """Move experts that fill a rank to the end of `waiting`; returns the one that may overflow.

    Starts with the lightest. While they are too light, the first of them is exchanged for the
    lightest one that is heavy enough, or else the heaviest. The overflow is then less than the last
    exchange added, so that expert can continue on the next rank. Returns -1 if none was exchanged:
    the overflow is then less than the part carried here.
    """
    first = waiting.size - taken
    filled = weights[waiting[first:]].sum()
    splits = -1
    for place in range(first, waiting.size):
        if first == 0 or filled >= need - TOLERANCE:
            break
        index = first - 1
        while index > 0 and filled + weights[waiting[index]] - weights[waiting[place]] < (
            need - TOLERANCE
        ):
            index -= 1
        splits, displaced = waiting[index], waiting[place]
        filled += weights[splits] - weights[displaced]
        waiting[index : first - 1] = waiting[index + 1 : first].copy()
        waiting[first - 1], waiting[place] = displaced, splits
    return splits


@compiled
def _part(served: float, whole: float) -> float:
    return served / whole if whole > 0 else 0.0
