"""The order of choices on the device: largest number first, the lower index among equals.

Maps float32 numbers to integers in the same order, with an index in the low bits that makes all of
them distinct. The result then does not depend on the order of comparisons.
"""

from __future__ import annotations

from equipoise_kernels.fp8.jit import constant, jit, tl

# Below every number's key: already taken, or padding.
TAKEN = constant(-(1 << 31))
# The key of minus infinity.
LOWEST = constant(-2139095041)


@jit
def key(values: tl.tensor) -> tl.tensor:
    """Map float32 numbers to integers in the same order; NaN counts as minus infinity."""
    is_number = values == values  # noqa: PLR0124  what NaN is not
    bits = tl.where(is_number, values, float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def ranked(keys: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Make keys distinct: among equals, the lower index gets the larger key."""
    return (keys.to(tl.int64) << 16) | (0xFFFF - index)


@jit
def best(ranked_keys: tl.tensor) -> tl.tensor:
    """Index of the largest element of a matrix."""
    return 0xFFFF - (tl.max(tl.max(ranked_keys, axis=1), axis=0) & 0xFFFF)


@jit
def in_best_groups(keys: tl.tensor, TOP_GROUPS: tl.constexpr) -> tl.tensor:
    """Whether each group, [groups, 1], is among the best by the sum of its best two."""
    member = tl.arange(0, keys.shape[1])[None, :]
    members = ranked(keys, member)
    first = tl.max(members, axis=1)
    second = tl.max(tl.where(members == first[:, None], -(1 << 62), members), axis=1)
    sums = number(first >> 16) + number(second >> 16)
    group = tl.arange(0, keys.shape[0])
    # Padding experts have the TAKEN key, below every number's.
    remaining = ranked(tl.where(first >> 16 == TAKEN, TAKEN, key(sums)), group)
    chosen = tl.zeros([keys.shape[0]], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        is_best = remaining == tl.max(remaining, axis=0)
        chosen = tl.where(is_best, 1, chosen)
        remaining = tl.where(is_best, -(1 << 62), remaining)
    return (chosen == 1)[:, None]


@jit
def number(keys: tl.tensor) -> tl.tensor:
    """Invert `key`."""
    bits = keys.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
