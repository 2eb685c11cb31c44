"""`uniforms`: random numbers that depend only on seed and position.

Implements the counter-based generator Philox-4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). There is no shared state, so requests do not affect each other's draws,
and a request that is retried elsewhere draws the same numbers.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], *, stream: int = 0
) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1), of 53 random bits, for each 64-bit seed and position.

    Streams (32 bits) are independent; a position that needs several numbers uses one stream for
    each.
    """
    seeds_S = np.array(seeds, dtype=np.uint64)
    positions_S = np.array(positions, dtype=np.uint64)
    zeros_S = np.zeros_like(positions_S)
    counter = (positions_S & _LOW, positions_S >> _HALF, zeros_S + np.uint64(stream), zeros_S)
    high_S, low_S, _, _ = philox(counter, key=(seeds_S & _LOW, seeds_S >> _HALF))
    bits_S = (high_S << _HALF | low_S) >> np.uint64(11)
    numbers_S: npt.NDArray[np.float64] = bits_S.astype(np.float64) * 2.0**-53
    return numbers_S


def philox(
    counter: tuple[Words, Words, Words, Words], *, key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Return four random words per counter; all are 32-bit numbers in 64 bits, of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
