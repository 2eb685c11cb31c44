"""Chooses one of an expert's replicas for each token, by their shares and without random state.

Shared by both data planes: the FP8 kernel in `fp8/moe/route.py` computes the same bits.

Uses a Weyl sequence: token n takes the fraction of n * phi + offset, and the replica whose share of
[0, 1) contains it. Replicas get their shares to within about log(n) / n, in every arithmetic
sub-sequence of tokens too; hashes would reach only 1 / sqrt(n). The offset is a hash of layer and
expert, so that a token's experts, and an expert's layers, do not all take their first replica at
the same time.
"""

from torch import Tensor

# `fp8/moe/route.py` uses these numbers too.
MASK = 0xFFFFFFFF
# The fraction of the golden ratio in 32 bits (Knuth, volume 3, section 6.4).
GOLDEN = 0x9E3779B1
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)

SHARE_BITS = 15
"""A share is a multiple of 1/2^15 of an expert's tokens."""


def choose_replicas(
    expert_ids_TK: Tensor,
    token_ids_T: Tensor,
    replica_count_E: Tensor,
    *,
    layer: int,
    share_ends_ER: Tensor | None = None,
) -> Tensor:
    """Return the replica of every assignment, int64 [T, K], in [0, replica count of the expert).

    Args:
        expert_ids_TK: logical experts, int64.
        token_ids_T: a running number per token, int64, at least 0.
        replica_count_E: replicas of each logical expert, int64, at least 1, below 2**31.
        layer: index of the MoE layer.
        share_ends_ER: where each replica's share of its expert's tokens ends, int64, ascending to
            2**SHARE_BITS, which the last replica and unused entries have; None for even shares.
    """
    offset_TK = _mix(expert_ids_TK + (layer << 16))
    fraction_TK = (token_ids_T.unsqueeze(1) * GOLDEN + offset_TK) & MASK
    if share_ends_ER is None:
        return (fraction_TK * replica_count_E[expert_ids_TK]) >> 32
    position_TK = fraction_TK >> (32 - SHARE_BITS)
    return (position_TK.unsqueeze(-1) >= share_ends_ER[expert_ids_TK]).sum(-1)


def _mix(values: Tensor) -> Tensor:
    """Mix 32-bit numbers with the finaliser of MurmurHash3 (public domain), in int64."""
    mixed = values & MASK
    mixed = ((mixed ^ (mixed >> 16)) * MIX_FACTORS[0]) & MASK
    mixed = ((mixed ^ (mixed >> 13)) * MIX_FACTORS[1]) & MASK
    return mixed ^ (mixed >> 16)
