"""`LatentCache`: what serving keeps of past tokens. `CacheStep`: which queries attend together.

Knows shapes and places only; the arithmetic is `attention`'s.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_model.config import ModelConfig

# Positions that the first queries of a sequence attend to in the row-block form; later ones
# attend to a power of two times as many.
_SHORTEST_STRETCH = 64


class LatentCache:
    """Per decoder layer and cache row, one latent for every position of a sequence.

    A cache row belongs to one sequence at a time. Rows are never cleared: a position is seen only
    by queries at or after it, and it is written before they run, so what an earlier sequence left
    is out of sight.

    Args:
        config: sizes.
        num_rows: sequences that are cached at once.
        max_len: positions of a sequence, at most `max_position_embeddings`.
        dtype: the model's compute dtype.
        device: where the model is.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_rows: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        assert num_rows >= 1
        assert 1 <= max_len <= config.max_position_embeddings
        self.num_rows = num_rows
        self.max_len = max_len
        shape = (config.num_hidden_layers, num_rows, _stretch(max_len), config.latent_dim)
        # Zeros, not whatever memory holds: a masked position weighs nothing, but 0 x NaN is NaN.
        self._latents_LRPC = torch.zeros(shape, dtype=dtype, device=device)

    def fill(self, generator: torch.Generator) -> None:
        """Overwrite everything with noise, for trying a model out before it serves."""
        self._latents_LRPC.normal_(generator=generator)

    def begin_step(
        self, *, cache_rows_T: Tensor, positions_T: Tensor, row_block: int | None
    ) -> "CacheStep":
        """Place a step's tokens, int64 [T] each; T may be 0.

        Fast form (`row_block` None): sequences with one query attend together, a sequence with
        several attends alone. Batch-invariant form: groups of exactly `row_block` queries, each
        with a cache row of its own, and as long a stretch of cache as the query's position alone
        says; so its products have one shape, whatever it is batched with. A group that is not full
        repeats its last query, which gives the same result twice.
        """
        rows, positions = cache_rows_T.tolist(), positions_T.tolist()
        assert all(0 <= row < self.num_rows for row in rows)
        assert all(0 <= position < self.max_len for position in positions)
        chosen = (
            _by_sequence(rows, positions)
            if row_block is None
            else _by_stretch(positions, row_block=row_block)
        )
        groups = []
        for places, queries_per_row, length in chosen:
            places_N = torch.tensor(places, device=positions_T.device)
            groups.append(
                QueryGroup(
                    places_N=places_N,
                    positions_N=positions_T[places_N],
                    cache_rows_B=cache_rows_T[places_N[::queries_per_row]],
                    length=length,
                )
            )
        return CacheStep(
            latents_LRPC=self._latents_LRPC,
            cache_rows_T=cache_rows_T,
            positions_T=positions_T,
            groups=tuple(groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryGroup:
    """Queries that attend in one product, equally many of each of B cache rows.

    `places_N` says where they stand in the step, those of the first cache row first. `length`
    positions of the cache are in sight of the group; a query sees those up to its own.
    """

    places_N: Tensor
    positions_N: Tensor
    cache_rows_B: Tensor
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheStep:
    """One forward step's tokens in the cache: where they are kept, and who attends with whom."""

    latents_LRPC: Tensor
    cache_rows_T: Tensor
    positions_T: Tensor
    groups: tuple[QueryGroup, ...]

    def write(self, layer: int, latents_TC: Tensor) -> None:
        """Keep the latents of the step's tokens in decoder layer `layer`."""
        self.latents_LRPC[layer][self.cache_rows_T, self.positions_T] = latents_TC

    def read(self, layer: int, group: QueryGroup) -> Tensor:
        """Copies of the group's cache rows, positions after its queries too: [B, length, C]."""
        visible_RPC = self.latents_LRPC[layer, :, : group.length]
        return visible_RPC.index_select(0, group.cache_rows_B)


def stretches(max_len: int) -> Iterator[range]:
    """The positions whose queries attend to one stretch of cache, stretch by stretch."""
    start = 0
    while start < max_len:
        stop = _stretch(start + 1)
        yield range(start, min(stop, max_len))
        start = stop


def _by_sequence(
    rows: Sequence[int], positions: Sequence[int]
) -> Iterator[tuple[list[int], int, int]]:
    """Places, queries per cache row, and length of each group."""
    places_of_row = defaultdict(list)
    for place, row in enumerate(rows):
        places_of_row[row].append(place)
    singles = [places[0] for places in places_of_row.values() if len(places) == 1]
    if singles:
        yield singles, 1, 1 + max(positions[place] for place in singles)
    for places in places_of_row.values():
        if len(places) > 1:
            yield places, len(places), 1 + max(positions[place] for place in places)


def _by_stretch(
    positions: Sequence[int], *, row_block: int
) -> Iterator[tuple[list[int], int, int]]:
    """Places, queries per cache row, and length of each group."""
    places_of_stretch = defaultdict(list)
    for place, position in enumerate(positions):
        places_of_stretch[_stretch(position + 1)].append(place)
    for stretch, places in places_of_stretch.items():
        for first in range(0, len(places), row_block):
            group = places[first : first + row_block]
            yield group + group[-1:] * (row_block - len(group)), 1, stretch


def _stretch(length: int) -> int:
    """The stretch of cache that holds `length` positions."""
    return max(_SHORTEST_STRETCH, 1 << (length - 1).bit_length())
