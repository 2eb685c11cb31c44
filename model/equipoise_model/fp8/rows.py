"""`StepRows`: a step's tokens as tensors, for attention and the cache; `MicroBatch`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.prefill import ExpandedRows
from equipoise_model.latent_cache import LatentCache, blocks_for

PADDING = -1
"""The place of a padding row: its latent is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """T rows, each with a table of its own sequence's blocks."""

    tokens_T: Tensor
    """Token ids, int64."""
    positions_T: Tensor
    """Positions in the sequences, int64."""
    places_T: Tensor
    """Where each latent is stored, int64, in positions from the start of the cache."""
    tables_TS: Tensor
    """Blocks of each row's sequence, int32."""
    lengths_T: Tensor
    """Positions that each row sees, int32; its own is the last."""

    @classmethod
    def of(
        cls,
        *,
        tokens_T: Tensor,
        positions_T: Tensor,
        sequences_T: Tensor,
        block_tables: Sequence[Sequence[int]],
        block_tokens: int,
    ) -> Self:
        """Build from a batch on the host; the result is on the host too."""
        positions = positions_T.numpy()
        longest = int(positions.max()) + 1 if len(positions) else 1
        num_blocks = blocks_for(longest, block_tokens=block_tokens)
        tables = np.zeros((len(block_tables), num_blocks), dtype=np.int32)
        for row, blocks in zip(tables, block_tables, strict=True):
            row[: len(blocks)] = blocks[:num_blocks]
        tables_TS = tables[sequences_T.numpy()]
        blocks_T = np.take_along_axis(tables_TS, positions[:, None] // block_tokens, axis=1)[:, 0]
        places = blocks_T.astype(np.int64) * block_tokens + positions % block_tokens
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            places_T=torch.from_numpy(places),
            tables_TS=torch.from_numpy(tables_TS),
            lengths_T=(positions_T + 1).to(torch.int32),
        )

    @classmethod
    def padding(cls, num_rows: int, *, cache: LatentCache, device: torch.device) -> Self:
        """Padding rows, with tables as long as the cache allows: memory for other rows."""
        shape = (num_rows, blocks_for(cache.max_len, block_tokens=cache.block_tokens))
        return cls(
            tokens_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
            places_T=torch.full((num_rows,), PADDING, device=device),
            tables_TS=torch.zeros(shape, dtype=torch.int32, device=device),
            lengths_T=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.tokens_T.shape[0])

    def to(self, device: torch.device) -> Self:
        """Copy to a device."""
        return type(self)(**{name: getattr(self, name).to(device) for name in self.__slots__})

    def first(self, num_rows: int) -> Self:
        """Return views of the first rows."""
        return type(self)(**{name: getattr(self, name)[:num_rows] for name in self.__slots__})

    def at(self, rows_N: Tensor) -> Self:
        """Copy these rows, int64."""
        return type(self)(**{name: getattr(self, name)[rows_N] for name in self.__slots__})

    def overwrite(self, rows: Self) -> None:
        """Copy in these rows, and make the rest padding."""
        count = rows.num_rows
        self.places_T[count:].fill_(PADDING)
        self.lengths_T[count:].zero_()
        for name in self.__slots__:
            own, new = getattr(self, name)[:count], getattr(rows, name)
            (own[:, : new.shape[1]] if new.dim() > 1 else own).copy_(new)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows of a step that run together: all of them, unless the step is cut."""

    rows: StepRows
    experts: ExpertStep
    num_valid: Tensor | None = None
    """How many of the rows are real, the first ones, int32 [1]; None for all."""
    expanded: ExpandedRows | None = None
    """Which rows attend in the expanded form; None for none."""
