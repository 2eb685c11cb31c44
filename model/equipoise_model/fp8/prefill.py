"""Which rows of a step attend in the expanded form, and to which keys.

Long chunks of prompts do: `expands` says from which length, from operations and bytes alone. Keys
and values are rebuilt from cached latents, a stretch of positions at a time, so that their memory
is bounded. Stretches start at fixed positions, whatever else is in the step. Decides on the host,
before a step, without asking the device.

The result of a row differs from the absorbed form's in its last bits: FP8 has no batch-invariant
mode, and captured steps are always absorbed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Self

import numpy as np
import torch
from torch import Tensor

from equipoise_kernels.fp8.attention.mla_prefill import LEAST_WIDTH, QUERY_TILE
from equipoise_model.config import ModelConfig
from equipoise_model.step import StepBatch

STRETCH = 4096
"""Positions whose keys and values are rebuilt at a time: 268 MB in DeepSeek-V3's sizes."""

# Of an H200, measured: 16-bit products, and copies in memory.
_FLOP_S = 790e12
_BYTES_S = 4.3e12
# Launches that only the expanded form needs for a stretch: gathering, rebuilding, attending.
_LAUNCHES_S = 10e-6
# Heads that the absorbed form computes together: fewer take as long.
_HEAD_TILE = 64
_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive rows of a step that continue one sequence."""

    first_row: int
    """The first of them."""
    num_rows: int
    """Their number."""
    position: int
    """The position of the first."""
    blocks: Sequence[int]
    """The sequence's blocks of the cache, from position 0."""

    @property
    def num_positions(self) -> int:
        """Positions that the last row sees."""
        return self.position + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyStretch:
    """Positions whose keys are rebuilt together, and the rows that attend to them."""

    places_N: Tensor
    """Where their latents are, int64, in positions from the start of the cache."""
    segments_S6: Tensor
    """See `mla_prefill`."""
    most_queries: int
    """Rows of the longest chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpandedRows:
    """The rows of a step that attend in the expanded form."""

    stretches: tuple[KeyStretch, ...]
    """In this order, because later stretches of a sequence continue earlier ones."""
    absorbed_A: Tensor
    """The other rows, int64."""

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], *, num_rows: int, block_tokens: int) -> Self:
        """Plan chunks of a step of `num_rows` rows; the result is on the host."""
        stretches: list[list[tuple[Chunk, int]]] = []
        room = 0
        for chunk in chunks:
            for start in range(0, chunk.num_positions, STRETCH):
                size = min(STRETCH, chunk.num_positions - start)
                if size > room:
                    stretches.append([])
                    room = STRETCH
                stretches[-1].append((chunk, start))
                room -= size
        is_absorbed = np.ones(num_rows, dtype=np.bool_)
        for chunk in chunks:
            is_absorbed[chunk.first_row : chunk.first_row + chunk.num_rows] = False
        return cls(
            stretches=tuple(_stretch(parts, block_tokens=block_tokens) for parts in stretches),
            absorbed_A=torch.from_numpy(is_absorbed.nonzero()[0]),
        )

    def to(self, device: torch.device) -> Self:
        """Copy to a device."""
        stretches = (
            KeyStretch(
                places_N=one.places_N.to(device),
                segments_S6=one.segments_S6.to(device),
                most_queries=one.most_queries,
            )
            for one in self.stretches
        )
        return type(self)(stretches=tuple(stretches), absorbed_A=self.absorbed_A.to(device))


def expanded_rows(
    batch: StepBatch, *, config: ModelConfig, block_tokens: int
) -> ExpandedRows | None:
    """Plan a step's long chunks; None if there is none."""
    chunks = [
        chunk
        for chunk in _chunks(batch)
        if expands(config, num_queries=chunk.num_rows, num_positions=chunk.num_positions)
    ]
    if not chunks:
        return None
    return ExpandedRows.of_chunks(chunks, num_rows=batch.num_tokens, block_tokens=block_tokens)


def expands(config: ModelConfig, *, num_queries: int, num_positions: int) -> bool:
    """Whether the expanded form is faster for the last queries of so many positions.

    Compares the time of one layer, each phase bounded by its operations or by its bytes. With H
    heads, latents of C = R + P numbers, keys of q = n + P and values of v, Q queries, L positions
    and X pairs of a query and a position that it sees, in multiplications:

        absorbed    X (C + R) H              the latents' products
                    + Q R (n + v) H          absorbing keys into queries and values into outputs
        expanded    L R (n + v) H            rebuilding keys and values
                    + X (q + v) H            their products

    Without a prefix, L = Q, the expanded form always has fewer. Behind a long one, X is about Q L,
    and it has fewer from R (n + v) / (C + R - q - v) queries on: 171 in DeepSeek-V3's sizes. Bytes
    and launches move the limit: the absorbed form writes and reads wide queries and outputs, the
    expanded one keys and values. Kernels compute whole tiles of queries or heads.
    """
    widths = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    if any(width < LEAST_WIDTH or width & (width - 1) for width in widths):
        return False
    sizes = {"num_queries": num_queries, "num_positions": num_positions}
    return _expanded_s(config, **sizes) < _absorbed_s(config, **sizes)


def stretch_bytes(config: ModelConfig, *, num_queries: int, num_positions: int) -> int:
    """Memory of a stretch's latents, keys and values; 0 if such a chunk does not expand."""
    if not expands(config, num_queries=num_queries, num_positions=num_positions):
        return 0
    width = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return min(num_positions, STRETCH) * (config.latent_dim + width) * _BYTES


def _absorbed_s(config: ModelConfig, *, num_queries: int, num_positions: int) -> float:
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    width = config.latent_dim + rank
    products = _pairs(num_queries, num_positions) * width * _HEAD_TILE * ceil(heads / _HEAD_TILE)
    products += num_queries * rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    # Queries and outputs are written and read.
    numbers = num_positions * config.latent_dim + 2 * num_queries * heads * width
    return _seconds(products, numbers)


def _expanded_s(config: ModelConfig, *, num_queries: int, num_positions: int) -> float:
    heads, rank, value = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
    rebuilt = num_positions * heads * (config.qk_nope_head_dim + value)
    num_stretches = ceil(num_positions / STRETCH)
    before = num_positions - num_queries
    tiled = QUERY_TILE * ceil(num_queries / QUERY_TILE)
    products = _pairs(tiled, before + tiled) * heads * (config.qk_head_dim + value)
    # Outputs are float32, written for every stretch and read for all but the first.
    numbers = rebuilt + num_queries * heads * (config.qk_head_dim + 4 * num_stretches * value)
    rebuilding_s = _seconds(rebuilt * rank, num_positions * config.latent_dim + rebuilt)
    return num_stretches * _LAUNCHES_S + rebuilding_s + _seconds(products, numbers)


def _pairs(num_queries: int, num_positions: int) -> int:
    """Pairs of a query and a position that it sees."""
    before = num_positions - num_queries
    return num_queries * before + num_queries * (num_queries + 1) // 2


def _seconds(products: float, numbers: float) -> float:
    return max(2 * products / _FLOP_S, _BYTES * numbers / _BYTES_S)


def _chunks(batch: StepBatch) -> Iterator[Chunk]:
    """Split a step's rows where the sequence changes or positions are not consecutive."""
    positions, sequences = batch.positions_T.tolist(), batch.sequences_T.tolist()
    runs = groupby(range(batch.num_tokens), key=lambda row: (sequences[row], positions[row] - row))
    for (sequence, offset), rows in runs:
        first, *others = rows
        yield Chunk(
            first_row=first,
            num_rows=1 + len(others),
            position=first + offset,
            blocks=batch.block_tables[sequence],
        )


def _stretch(parts: Sequence[tuple[Chunk, int]], *, block_tokens: int) -> KeyStretch:
    """Plan one stretch: for each of its chunks, the positions from a start on."""
    segments, places, first_key = [], [], 0
    for chunk, start in parts:
        positions = np.arange(start, min(start + STRETCH, chunk.num_positions))
        blocks = np.asarray(chunk.blocks)[positions // block_tokens]
        places.append(blocks * block_tokens + positions % block_tokens)
        segments.append(
            [chunk.first_row, chunk.num_rows, chunk.position, first_key, len(positions), start]
        )
        first_key += len(positions)
    return KeyStretch(
        places_N=torch.from_numpy(np.concatenate(places)),
        segments_S6=torch.tensor(segments, dtype=torch.int32),
        most_queries=max(chunk.num_rows for chunk, _ in parts),
    )
