"""Chooses replicas so that ranks' loads of one layer and step come out even.

Every rank knows how many assignments each rank has for each expert, and computes the same numbers
of assignments for replicas. An expert's assignments, in the order of ranks and tokens, fill its
replicas one after another: so no rank asks another one where to send a row.

Water filling, all experts at once: in each round, every expert moves its assignments part of the
way to where they would level the ranks that hold it. The way is shorter the more experts with
several replicas meet on a rank, because they all move at once. The end state has the lowest
possible maximum. All numbers are integers, so that ranks and backends agree bit by bit: the FP8
kernels in `fp8/moe/replica_balance.py` compute the same.
"""

import torch
from torch import Tensor

from equipoise_kernels.replica_choice import SHARE_BITS

# `fp8/moe/replica_balance.py` uses these numbers too.
ROUNDS = 8
"""More gain less than 0.002 of balancedness with 32 redundant slots on 32 ranks."""

FRACTION_BITS = 8
"""Assignments are divided into parts of 1/2^8 until the last round."""

STEP_HALVES = 3
"""Halves of the distance to the level that experts move, divided by how many meet on a rank."""

_FAR = 1 << 50


def count_experts(expert_ids_TK: Tensor, *, num_experts: int) -> Tensor:
    """Count one rank's assignments for each expert, int64 [E]."""
    ids_N = expert_ids_TK.flatten()
    return ids_N.new_zeros(num_experts).scatter_add_(0, ids_N, torch.ones_like(ids_N))


def balanced_replicas(
    expert_ids_TK: Tensor,
    counts_RE: Tensor,
    slots_of_expert_ER: Tensor,
    replica_count_E: Tensor,
    *,
    rank: int,
    slots_per_rank: int,
    share_ends_ER: Tensor | None = None,
) -> Tensor:
    """Return the replica of every assignment of a rank, int64 [T, K].

    Args:
        expert_ids_TK: logical experts, int64.
        counts_RE: assignments that each rank has for each expert, int64; those of `rank` are
            `count_experts(expert_ids_TK)`.
        slots_of_expert_ER: physical slots of each replica, int64; unused entries are arbitrary.
        replica_count_E: replicas of each expert, int64, at least 1.
        rank: the rank that has these assignments.
        slots_per_rank: physical slots of each rank; rank = slot // slots_per_rank.
        share_ends_ER: the layout's shares, as in `replica_choice`; None for even ones. They are
            where levelling starts.
    """
    ends_ER = replica_ends(
        counts_RE.sum(0),
        slots_of_expert_ER,
        replica_count_E,
        num_ranks=counts_RE.shape[0],
        slots_per_rank=slots_per_rank,
        share_ends_ER=share_ends_ER,
    )
    before_E = counts_RE[:rank].sum(0)
    places_TK = before_E[expert_ids_TK] + _places(expert_ids_TK, counts_RE[rank])
    return (places_TK.unsqueeze(-1) >= ends_ER[expert_ids_TK]).sum(-1)


def replica_ends(
    load_E: Tensor,
    slots_of_expert_ER: Tensor,
    replica_count_E: Tensor,
    *,
    num_ranks: int,
    slots_per_rank: int,
    share_ends_ER: Tensor | None = None,
    rounds: int = ROUNDS,
) -> Tensor:
    """Return where each replica's part of its expert's assignments ends, int64 [E, R].

    `load_E` has the assignments of all ranks for each expert, int64, below 2^24. Ends ascend to the
    load, which the last replica and unused entries have.
    """
    numbers_R = torch.arange(1, slots_of_expert_ER.shape[1] + 1, device=load_E.device)
    is_used_ER = numbers_R <= replica_count_E.unsqueeze(1)
    ranks_ER = slots_of_expert_ER.div(slots_per_rank, rounding_mode="floor")
    ranks_ER = ranks_ER.masked_fill(~is_used_ER, num_ranks)
    parts_E1 = load_E.unsqueeze(1) << FRACTION_BITS
    if share_ends_ER is None:
        ends_ER = parts_E1 * numbers_R // replica_count_E.unsqueeze(1)
        ends_ER = torch.minimum(ends_ER, parts_E1)
    else:
        ends_ER = (parts_E1 * share_ends_ER) >> SHARE_BITS
    served_ER = ends_ER.diff(dim=1, prepend=torch.zeros_like(parts_E1))
    twice_E1 = 2 * _most_meeting(ranks_ER, replica_count_E, num_ranks=num_ranks)
    step_E1 = twice_E1.clamp(max=STEP_HALVES)
    for _ in range(rounds):
        others_ER = (_by_rank(served_ER, ranks_ER, num_ranks)[ranks_ER] - served_ER).where(
            is_used_ER, _FAR
        )
        # Water fills the k emptiest ranks to a level: the lowest such level is the true one.
        levels_ER = (others_ER.sort(dim=1).values.cumsum(1) + parts_E1) // numbers_R
        wanted_ER = (levels_ER.amin(1, keepdim=True) - others_ER).clamp(min=0)
        served_ER = (served_ER * (twice_E1 - step_E1) + wanted_ER * step_E1) // twice_E1
    ends_ER = served_ER.cumsum(1)
    total_E1 = ends_ER[:, -1:]
    return (2 * ends_ER * load_E.unsqueeze(1) + total_E1) // (2 * total_E1).clamp(min=1)


def _most_meeting(ranks_ER: Tensor, replica_count_E: Tensor, *, num_ranks: int) -> Tensor:
    """Return how many experts with several replicas are on the rank of each that has most: [E, 1].

    At least 1.
    """
    several_ER = (replica_count_E > 1).to(torch.int64).unsqueeze(1).expand(ranks_ER.shape)
    meeting_R = _by_rank(several_ER, ranks_ER, num_ranks)
    meeting_R[num_ranks] = 0
    return meeting_R[ranks_ER].amax(1, keepdim=True).clamp(min=1)


def _by_rank(values_ER: Tensor, ranks_ER: Tensor, num_ranks: int) -> Tensor:
    """Add up by rank, int64 [ranks + 1]; the last one is of unused entries."""
    sums_R = values_ER.new_zeros(num_ranks + 1)
    return sums_R.scatter_add_(0, ranks_ER.flatten(), values_ER.flatten())


def _places(expert_ids_TK: Tensor, count_E: Tensor) -> Tensor:
    """Number each expert's assignments from 0, in the order of tokens."""
    ids_N = expert_ids_TK.flatten()
    order_N = ids_N.argsort(stable=True)
    first_E = count_E.cumsum(0) - count_E
    places_N = torch.empty_like(ids_N)
    numbers_N = torch.arange(len(ids_N), device=ids_N.device)
    places_N[order_N] = numbers_N - first_E[ids_N[order_N]]
    return places_N.view(expert_ids_TK.shape)
