"""Which rows belong to which group: the three schedules of a grouped product.

Defines each schedule (the contract is in `gemm.grouped`): on the host as a dataclass, on the device
as two functions, for the number of row tiles and for the rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import QuantizedRows, require
from equipoise_kernels.fp8.jit import constant, jit, tl

GROUP_ALIGNMENT = 128

# 0 is the contiguous schedule.
_PREFIX_SUM = constant(1)
_MASKED = constant(2)
_ALIGNMENT = constant(GROUP_ALIGNMENT)


def _even_share(num_rows: int, *, num_groups: int) -> int:
    """Rows per group, for choosing a configuration."""
    return -(-num_rows // num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousRows:
    """Each row names its group: int32 [R], -1 for padding."""

    number: ClassVar[int] = 0
    group_of_row: Tensor

    @property
    def groups(self) -> Tensor:
        """The tensor that the kernel reads."""
        return self.group_of_row

    def check(self, a: QuantizedRows, *, num_groups: int) -> None:
        """Raise KernelInputError unless the tensor matches the rows."""
        del num_groups
        _check("group_of_row", self.group_of_row, a, rank=2, size=a.codes.shape[0])

    expected_rows_per_group = staticmethod(_even_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSumRows:
    """Where each group's rows end: int32 [G], not decreasing."""

    number: ClassVar[int] = 1
    group_ends: Tensor
    """Ends of the groups."""
    expected_rows: int | None = None
    """Expected rows per group, a hint for choosing a configuration; an even share by default."""

    @property
    def groups(self) -> Tensor:
        """The tensor that the kernel reads."""
        return self.group_ends

    def check(self, a: QuantizedRows, *, num_groups: int) -> None:
        """Raise KernelInputError unless the tensor matches the rows."""
        _check("group_ends", self.group_ends, a, rank=2, size=num_groups)

    def expected_rows_per_group(self, num_rows: int, *, num_groups: int) -> int:
        """Rows per group, for choosing a configuration."""
        if self.expected_rows is not None:
            return self.expected_rows
        return _even_share(num_rows, num_groups=num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRows:
    """How many rows each group has."""

    number: ClassVar[int] = 2
    rows_of_group: Tensor
    """Rows of each group, int32 [G]."""
    expected_rows: int | None = None
    """Expected rows per group, a hint for choosing a configuration; the capacity M by default."""

    @property
    def groups(self) -> Tensor:
        """The tensor that the kernel reads."""
        return self.rows_of_group

    def check(self, a: QuantizedRows, *, num_groups: int) -> None:
        """Raise KernelInputError unless the tensor matches the rows."""
        _check("rows_of_group", self.rows_of_group, a, rank=3, size=num_groups)
        if a.codes.shape[0] != num_groups:
            raise KernelInputError(
                f"rows must be [G, M, K] with G = {num_groups}, not {list(a.codes.shape)}"
            )

    def expected_rows_per_group(self, num_rows: int, *, num_groups: int) -> int:
        """Rows per group, for choosing a configuration."""
        del num_groups
        return num_rows if self.expected_rows is None else self.expected_rows


Schedule = ContiguousRows | PrefixSumRows | MaskedRows


def _check(name: str, groups: Tensor, a: QuantizedRows, *, rank: int, size: int) -> None:
    require(name, groups, torch.int32, shape=(size,), contiguous=True, like=a.codes)
    if a.codes.dim() != rank:
        raise KernelInputError(f"rows must have {rank} dimensions with {name}, not {a.codes.dim()}")


def rows_by_group(
    schedule: Schedule, *, num_rows: int, num_groups: int
) -> Iterator[tuple[int, Any]]:
    """Yield each group that has rows, with an index of them; for the torch twin.

    Args:
        schedule: which rows belong to which group.
        num_rows: R of the flat schedules; the masked one does not need it.
        num_groups: G.
    """
    groups = schedule.groups.tolist()
    if isinstance(schedule, MaskedRows):
        yield from ((g, (g, slice(0, max(count, 0)))) for g, count in enumerate(groups))
    elif isinstance(schedule, PrefixSumRows):
        start = 0
        for group, end in enumerate(groups):
            yield group, slice(start, min(max(end, start), num_rows))
            start = -(-max(end, 0) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    else:
        for first in range(0, num_rows, GROUP_ALIGNMENT):
            block = schedule.group_of_row[first : first + GROUP_ALIGNMENT]
            if 0 <= groups[first] < num_groups:
                yield groups[first], first + torch.nonzero(block == groups[first]).flatten()


@jit
def row_tiles(
    groups_ptr: tl.tensor,
    num_rows: int,
    num_groups: int,
    SCHEDULE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Number of row tiles, and with MASKED the cumulative number per group."""
    if SCHEDULE == _MASKED:
        group = tl.arange(0, PADDED_GROUPS)
        counts = tl.load(groups_ptr + group, mask=group < num_groups, other=0)
        tiles = tl.cdiv(tl.minimum(tl.maximum(counts, 0), num_rows), BLOCK_M)
        return tl.sum(tiles, axis=0), tl.cumsum(tiles, axis=0)
    return tl.cdiv(num_rows, BLOCK_M), tl.arange(0, PADDED_GROUPS)


@jit
def tile_rows(
    groups_ptr: tl.tensor,
    row_tile: tl.tensor,
    tiles_until: tl.tensor,
    num_rows: int,
    num_groups: int,
    SCHEDULE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """A tile's group (outside [0, G) for none), its int64 row numbers, and which are real."""
    if SCHEDULE == _MASKED:
        group = tl.sum((tiles_until <= row_tile).to(tl.int32), axis=0)
        before = tl.max(tl.where(tiles_until <= row_tile, tiles_until, 0), axis=0)
        count = tl.load(groups_ptr + group, mask=group < num_groups, other=0)
        rows = ((row_tile - before) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
        is_row = rows < tl.minimum(count, num_rows)
    else:
        first_row = row_tile * BLOCK_M
        rows = first_row.to(tl.int64) + tl.arange(0, BLOCK_M)
        if SCHEDULE == _PREFIX_SUM:
            every = tl.arange(0, PADDED_GROUPS)
            ends = tl.load(groups_ptr + every, mask=every < num_groups, other=0)
            last_ends = tl.load(
                groups_ptr + every - 1, mask=(every > 0) & (every <= num_groups), other=0
            )
            starts = tl.cdiv(tl.maximum(last_ends, 0), _ALIGNMENT) * _ALIGNMENT
            group = tl.max(tl.where((starts <= first_row) & (first_row < ends), every, -1), axis=0)
            end = tl.load(groups_ptr + group, mask=group >= 0, other=0)
            is_row = rows < tl.minimum(end, num_rows)
        else:
            first_of_block = first_row // _ALIGNMENT * _ALIGNMENT
            group = tl.load(groups_ptr + first_of_block)
            mine = tl.load(groups_ptr + rows, mask=rows < num_rows, other=-1)
            is_row = mine == group
    return group, rows, is_row
