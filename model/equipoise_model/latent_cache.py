"""`LatentCache`: the latents of past tokens; `CacheStep`: which queries attend together.

The cache is paged, as in vLLM (arXiv 2309.06180): blocks of positions, and a table of blocks per
sequence. Attention does the arithmetic, and the scheduler assigns blocks to sequences.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise_kernels.formats import CODE, GROUP
from equipoise_kernels.fp8.attention.latents import Latents, PlainLatents, QuantizedLatents
from equipoise_model.config import ModelConfig
from equipoise_model.device import Arrive, beside, to_host

BLOCK_TOKENS = 16
"""Positions per block by default. Requests share whole blocks."""
KERNEL_BLOCK_TOKENS = 64
"""The same where a kernel attends: a step of Triton's and a block of FlashMLA's. With blocks of 16,
Triton's kernel looks every position up, and takes a fifth longer or more."""

# Positions that the first queries of a sequence attend to in the row-block form; later queries
# attend to a power of two times as many.
_SHORTEST_STRETCH = 64


class LatentCache:
    """Blocks of `block_tokens` positions, with a latent per position and decoder layer.

    A block belongs to one sequence at a time, or to several with the same prefix. Blocks are not
    cleared between sequences: a position is visible only to queries at or after it, and is written
    before they run, so leftovers of an earlier sequence are never seen. Blocks that may hold NaN
    must be cleared: a masked position has weight 0, but 0 x NaN is NaN.

    Args:
        config: sizes.
        num_blocks: blocks, shared by all sequences; a block has the same index in all layers.
        max_len: most positions of a sequence, at most `max_position_embeddings`.
        mtp: whether to store latents of the multi-token-prediction modules too.
        dtype: the model's compute dtype.
        device: the model's device.
        block_tokens: positions per block, a power of two.
        fp8: whether to store latents in FP8, as the kernels' `QuantizedLatents`; only for the FP8
            model, and if `kv_lora_rank` is a multiple of the group size.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        max_len: int,
        mtp: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_tokens: int = BLOCK_TOKENS,
        fp8: bool = False,
    ) -> None:
        assert num_blocks >= blocks_for(max_len, block_tokens=block_tokens)
        assert 1 <= max_len <= config.max_position_embeddings
        self.num_blocks = num_blocks
        self.max_len = max_len
        self.block_tokens = block_tokens
        self._rank = config.kv_lora_rank
        num_layers = config.num_hidden_layers + mtp * config.num_nextn_predict_layers
        # The last block stays zero and belongs to no sequence; short sequences read it beyond their
        # end. A masked position has weight 0, but 0 x NaN is NaN.
        places = (num_layers, num_blocks + 1, block_tokens)
        kinds: tuple[tuple[int, torch.dtype], ...] = ((config.latent_dim, dtype),)
        if fp8:
            assert self._rank % GROUP == 0
            kinds = (
                (self._rank, CODE),
                (self._rank // GROUP, torch.float32),
                (config.qk_rope_head_dim, torch.bfloat16),
            )
        self._stores = tuple(
            torch.zeros((*places, width), dtype=kind, device=device) for width, kind in kinds
        )

    @property
    def bytes_per_token(self) -> int:
        """Memory of one position in all layers, in bytes."""
        return sum(
            store.shape[0] * store.shape[-1] * store.element_size() for store in self._stores
        )

    @property
    def form(self) -> str:
        """Layers, widths and data types of a position, and positions of a block."""
        kinds = "+".join(
            f"{store.shape[-1]}:{str(store.dtype).removeprefix('torch.')}" for store in self._stores
        )
        return f"{self._stores[0].shape[0]}x{kinds}/{self.block_tokens}"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_per_token * self.block_tokens

    def read_block(self, block: int) -> bytes:
        """Copy a block to the host: store by store, each layer's [block_tokens, width]."""
        parts = (store[:, block].contiguous().view(torch.uint8) for store in self._stores)
        return to_host([part.flatten() for part in parts]).numpy().tobytes()

    def unpack(self, data: bytes) -> "ArrivingBlock":
        """Copy what `read_block` of an equal cache returned to the device, for `write_block`.

        Waits for the copies, beside all steps; on any thread.
        """
        assert len(data) == self.block_bytes
        parts, source, start = [], bytearray(data), 0
        with beside(self._stores[0].device, overwrites=False) as arrive:
            for store in self._stores:
                shape = (store.shape[0], *store.shape[2:])
                size = self.block_tokens * store.shape[0] * store.shape[-1] * store.element_size()
                part = torch.frombuffer(source, dtype=torch.uint8, count=size, offset=start)
                parts.append(part.view(store.dtype).view(shape).to(store.device))
                start += size
        return ArrivingBlock(parts=tuple(parts), arrive=arrive)

    def write_block(self, block: int, data: "ArrivingBlock") -> None:
        """Fill a block with what `unpack` returned, once."""
        data.arrive(*data.parts)
        for store, part in zip(self._stores, data.parts, strict=True):
            store[:, block] = part

    def latents(self, layer: int) -> Latents:
        """One layer's blocks in the kernels' format; the last is the zero block."""
        if len(self._stores) == 1:
            return PlainLatents(latents_BPC=self._stores[0][layer], rank=self._rank)
        codes_BPR, scales_BPG, rotary_BPP = (store[layer] for store in self._stores)
        return QuantizedLatents(codes_BPR=codes_BPR, scales_BPG=scales_BPG, rotary_BPP=rotary_BPP)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in all layers."""
        for store in self._stores:
            store[:, list(blocks)] = 0

    @property
    def _plain_latents(self) -> Tensor:
        """All unquantised latents, [layers, num_blocks + 1, block_tokens, C]."""
        (latents_LBPC,) = self._stores
        return latents_LBPC

    def fill(self, generator: torch.Generator) -> None:
        """Overwrite all blocks with noise, to test a model before it serves."""
        self._plain_latents[:, : self.num_blocks].normal_(generator=generator)

    def begin_step(
        self,
        *,
        block_tables: Sequence[Sequence[int]],
        sequences_T: Tensor,
        positions_T: Tensor,
        row_block: int | None,
    ) -> "CacheStep":
        """Place a step's tokens; T may be 0.

        `block_tables` lists the blocks of each sequence, from position 0 to at least the step's
        last. Token t is at `positions_T[t]` of sequence `sequences_T[t]`; both are int64 [T] on the
        host, where queries are grouped.

        Fast form (`row_block` None): sequences with one query attend together if their lengths are
        similar; a sequence with several queries attends alone. Batch-invariant form: groups of
        exactly `row_block` queries, each with its own table, over a stretch of cache whose length
        depends on the query's position alone. Every product then has the same shape, whatever the
        batch. A group that is not full repeats its last query, which computes the same result
        twice.
        """
        sequences, positions = sequences_T.tolist(), positions_T.tolist()
        assert all(0 <= position < self.max_len for position in positions)
        device = self._plain_latents.device
        positions_T = positions_T.to(device)
        blocks_of = [
            block_tables[sequence][position // self.block_tokens]
            for sequence, position in zip(sequences, positions, strict=True)
        ]
        assert all(0 <= block < self.num_blocks for block in blocks_of)
        chosen = (
            _by_sequence(sequences, positions)
            if row_block is None
            else _by_stretch(positions, row_block=row_block)
        )
        groups = []
        for places, queries_per_table, length in chosen:
            places_N = torch.tensor(places, device=device)
            tables = [block_tables[sequences[place]] for place in places[::queries_per_table]]
            unseen_NL = torch.arange(length, device=device) > positions_T[places_N].unsqueeze(1)
            groups.append(
                QueryGroup(
                    places_N=places_N,
                    blocks_BS=self._stretch_tables(tables, length=length),
                    unseen_BQL=unseen_NL.view(len(tables), queries_per_table, length),
                )
            )
        blocks_T = torch.tensor(blocks_of, dtype=torch.int64, device=device)
        return CacheStep(
            latents_LBPC=self._plain_latents,
            written_T=blocks_T * self.block_tokens + positions_T % self.block_tokens,
            groups=tuple(groups),
        )

    def _stretch_tables(self, tables: Sequence[Sequence[int]], *, length: int) -> Tensor:
        """Blocks of the first `length` positions; the zero block where a table is shorter."""
        size = blocks_for(length, block_tokens=self.block_tokens)
        padded = [[*table[:size], *[self.num_blocks] * (size - len(table))] for table in tables]
        return torch.tensor(padded, dtype=torch.int64, device=self._plain_latents.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrivingBlock:
    """A block from another cache, in memory of its own on the device."""

    parts: tuple[Tensor, ...]
    """Each store's part of it."""
    arrive: Arrive
    """Makes the computation wait for the copies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryGroup:
    """Queries that attend in one product: Q of each of B sequences, over L positions."""

    places_N: Tensor
    """The queries' rows in the step, those of the first sequence first."""
    blocks_BS: Tensor
    """The sequences' blocks."""
    unseen_BQL: Tensor
    """Positions that a query must not see: those after its own."""

    @property
    def length(self) -> int:
        """L: positions, from 0, that some query of the group may see."""
        return int(self.unseen_BQL.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheStep:
    """One step's tokens in the cache: where they are stored, and which queries attend together."""

    latents_LBPC: Tensor
    """The cache's latents of all layers."""
    written_T: Tensor
    """Where each token's latent is stored, in positions from the start of the cache."""
    groups: tuple[QueryGroup, ...]
    """Queries that attend together."""

    def without_rows(self) -> "CacheStep":
        """Return a step that stores and reads nothing."""
        return replace(self, written_T=self.written_T[:0], groups=())

    def write(self, layer: int, latents_TC: Tensor) -> None:
        """Store the latents of the step's tokens in decoder layer `layer`."""
        self.latents_LBPC[layer].flatten(0, 1)[self.written_T] = latents_TC

    def read(self, layer: int, group: QueryGroup) -> Tensor:
        """Copy the group's latents, including positions after its queries: [B, length, C]."""
        num_tables, num_blocks = group.blocks_BS.shape
        read_NPC = self.latents_LBPC[layer].index_select(0, group.blocks_BS.flatten())
        read_BLC = read_NPC.view(num_tables, num_blocks * read_NPC.shape[1], -1)
        return read_BLC[:, : group.length]


def blocks_for(num_tokens: int, *, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_tokens)


def stretches(max_len: int) -> Iterator[range]:
    """Yield the ranges of positions whose queries attend to the same stretch of cache."""
    start = 0
    while start < max_len:
        stop = stretch_length(start + 1)
        yield range(start, min(stop, max_len))
        start = stop


def _by_sequence(
    sequences: Sequence[int], positions: Sequence[int]
) -> Iterator[tuple[list[int], int, int]]:
    """Yield rows, queries per sequence, and length of each group."""
    places_of_sequence = defaultdict(list)
    for place, sequence in enumerate(sequences):
        places_of_sequence[sequence].append(place)
    # One long sequence must not lengthen all others.
    singles = defaultdict(list)
    for places in places_of_sequence.values():
        if len(places) == 1:
            singles[stretch_length(positions[places[0]] + 1)].append(places[0])
    for places in singles.values():
        yield places, 1, 1 + max(positions[place] for place in places)
    for places in places_of_sequence.values():
        if len(places) > 1:
            yield places, len(places), 1 + max(positions[place] for place in places)


def _by_stretch(
    positions: Sequence[int], *, row_block: int
) -> Iterator[tuple[list[int], int, int]]:
    """Yield rows, queries per sequence, and length of each group."""
    places_of_stretch = defaultdict(list)
    for place, position in enumerate(positions):
        places_of_stretch[stretch_length(position + 1)].append(place)
    for stretch, places in places_of_stretch.items():
        for first in range(0, len(places), row_block):
            group = places[first : first + row_block]
            yield group + group[-1:] * (row_block - len(group)), 1, stretch


def stretch_length(length: int) -> int:
    """Length of the stretch of cache that holds `length` positions."""
    return max(_SHORTEST_STRETCH, 1 << (length - 1).bit_length())
