"""The 64-bit flag with which a rank announces its rows to another, and any fault.

From the top: 1 bit unused, 2 bits status, 30 bits generation of the layout, 31 bits sequence number
of the exchange. A rank writes its rows first, then the flag. Sequence and generation are read from
device memory, so that captured graphs advance them. Both wrap around, and are only compared for
equality.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise_kernels.errors import (
    AllToAllError,
    CapacityError,
    GenerationMismatchError,
    PeerMissingError,
    UnknownSlotError,
)

SEQUENCE_BITS = 31
GENERATION_BITS = 30
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
GENERATION_MASK = (1 << GENERATION_BITS) - 1

FINE, TOO_MANY_ROWS, UNKNOWN_SLOT = 0, 1, 2

NO_FAULT = -1
"""Stands for the flag of a rank without a fault; flags are not negative."""


def flag_of(*, sequence: Tensor, generation: Tensor, status: Tensor) -> Tensor:
    """Return the flag as int64 [1], from three integer tensors [1] on one device."""
    shifted = (generation & GENERATION_MASK) << SEQUENCE_BITS
    high = status.to(torch.int64) << (SEQUENCE_BITS + GENERATION_BITS)
    return high | shifted | (sequence & SEQUENCE_MASK)


def sequence_of(flag: int) -> int:
    """Sequence number of a flag."""
    return flag & SEQUENCE_MASK


def generation_of(flag: int) -> int:
    """Generation of a flag."""
    return (flag >> SEQUENCE_BITS) & GENERATION_MASK


def status_of(flag: int) -> int:
    """Status of a flag: FINE, TOO_MANY_ROWS or UNKNOWN_SLOT."""
    return flag >> (SEQUENCE_BITS + GENERATION_BITS)


def raise_faults(seen: Sequence[int | None], *, own: int, timeout_s: float, what: str) -> None:
    """Raise an error for faulty flags of any rank, given in rank order; None is a missing flag.

    Faults that ranks reported take precedence over missing flags: a failed rank sends nothing more.

    Args:
        seen: flags.
        own: this rank's flag.
        timeout_s: how long the flags were waited for.
        what: what they announce, for the message: "rows".

    Raises:
        GenerationMismatchError: a rank runs another generation.
        CapacityError: a rank has more rows for one rank than fit.
        UnknownSlotError: a rank named a slot that does not exist.
        PeerMissingError: a rank's flag did not arrive in time.
    """
    here = {
        rank: flag
        for rank, flag in enumerate(seen)
        if flag is not None and sequence_of(flag) == sequence_of(own)
    }
    generation = generation_of(own)
    others = {rank: generation_of(flag) for rank, flag in here.items()}
    others = {rank: number for rank, number in others.items() if number != generation}
    if others:
        named = ", ".join(f"rank {rank} runs {number}" for rank, number in others.items())
        raise GenerationMismatchError(
            f"this rank runs generation {generation} of the layout, but {named}: "
            "all ranks must switch at one step",
            ranks=tuple(others),
        )
    _raise_status(
        here,
        TOO_MANY_ROWS,
        CapacityError,
        "had more rows for one rank or slot than the buffer holds: give it a larger capacity",
    )
    _raise_status(
        here, UNKNOWN_SLOT, UnknownSlotError, "named slots that the pool does not have: fix the map"
    )
    missing = tuple(rank for rank in range(len(seen)) if rank not in here)
    if missing:
        raise PeerMissingError(
            f"{_named(missing)} did not send {what} within {timeout_s:g} s: gone, stuck, or at "
            "another step; form a new group without them",
            ranks=missing,
        )


def _raise_status(here: dict[int, int], status: int, kind: type[AllToAllError], words: str) -> None:
    ranks = tuple(rank for rank, flag in here.items() if status_of(flag) == status)
    if ranks:
        raise kind(f"{_named(ranks)} {words}", ranks=ranks)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
