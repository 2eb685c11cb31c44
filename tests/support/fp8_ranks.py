"""An FP8 model over several ranks, each serving its own text, compared with one rank alone."""

import numpy as np
import torch

from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.gemm import dense, grouped
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import StagedExperts
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables
from equipoise_model.step import StepBatch
from tests.support.fp8_models import NARROW

SLOTS_PER_RANK = 3
ROOM = 4
"""Rows that a buffer has room for; the texts' beginnings are longer."""

# Tokens of each rank in each step. Some have none, and the layout changes before the third.
CHUNKS = ((5, 1, 1, 0, 2), (0, 6, 1, 1, 3), (2, 1, 0, 1, 2), (1, 1, 1, 1, 2))
SWITCH_BEFORE = 2


def compute_rows_one_by_one():
    """Make a row's bits independent of how many come together, which no library promises."""

    def one_by_one(a, weight, *, out):
        for row in range(len(out)):
            one = QuantizedRows(codes=a.codes[row : row + 1], scales=a.scales[row : row + 1])
            dense.gemm_reference(one, weight, out=out[row : row + 1])

    grouped.gemm_reference = one_by_one


def layout_of(config, num_ranks, generation):
    """Every expert somewhere, and the rest anywhere."""
    rng = np.random.default_rng([num_ranks, generation])
    experts = np.arange(config.num_placed_experts)
    extra = rng.integers(0, len(experts), num_ranks * SLOTS_PER_RANK - len(experts))
    return rng.permutation(np.concatenate([experts, extra]))[np.newaxis]


def placement_of(config, num_ranks, generation):
    return PlacementTables.from_layout(
        layout_of(config, num_ranks, generation),
        num_experts=config.num_placed_experts,
        num_ranks=num_ranks,
        generation=generation,
    )


def second_halves(sizes, step):
    """Rows of each rank's second micro-batch: as many as of the first, then one, then all but one.

    A first one that is larger than the buffer's room is sent in parts.
    """
    return [0 if size < 2 else [size // 2, 1, size - 1][step % 3] for size in sizes]


def served_alone(folder, rank, chunks, *, shared_as_routed, is_cut=False):
    """Logits of one rank's text by a model that holds every expert itself."""
    checkpoint = Checkpoint.open(folder, keep_fp8=True, shared_as_routed=shared_as_routed)
    config = checkpoint.config
    model = Fp8Transformer(config, num_slots=config.num_placed_experts, num_spare=0)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, [list(range(config.num_placed_experts))])
    return served(model, ExpertParallel.local(config), rank, chunks, is_cut=is_cut)


class Part:
    """The model with one rank's slots of the first layout."""

    def __init__(self, folder, *, rank, num_ranks, shared_as_routed=False, graphs=None):
        self.rank, self.num_ranks = rank, num_ranks
        self.checkpoint = Checkpoint.open(folder, keep_fp8=True, shared_as_routed=shared_as_routed)
        self.config = self.checkpoint.config
        self.model = Fp8Transformer(
            self.checkpoint.config, num_slots=SLOTS_PER_RANK, num_spare=1, graphs=graphs
        )
        self.checkpoint.load_dense(self.model)
        self.checkpoint.load_slots(self.model, self.own(1).tolist())

    def own(self, generation):
        first = self.rank * SLOTS_PER_RANK
        return layout_of(self.config, self.num_ranks, generation)[:, first : first + SLOTS_PER_RANK]

    def switch(self, experts):
        """To the second generation."""
        moves = {
            (layer, slot): self.checkpoint.read_expert(layer, int(expert))
            for (layer, slot), expert in np.ndenumerate(self.own(2))
            if expert != self.own(1)[layer, slot]
        }
        if moves:
            StagedExperts.prepare(moves, self.model.slots).apply()
        experts.switch(placement_of(self.config, self.num_ranks, 2))

    def serve(self, experts, *, is_cut=False, **agreed):
        return served(
            self.model,
            experts,
            self.rank,
            *CHUNKS[: self.num_ranks],
            switch=lambda: self.switch(experts),
            is_cut=is_cut,
            **agreed,
        )

    def step(self, experts):
        """One row of this rank's."""
        self.model.step(_batch([5], 0, 1), _cache(), experts)


def served(model, experts, rank, *chunks, switch=lambda: None, is_cut=False, **agreed):
    """Logits of the last row of each step that has one, None of the others.

    `chunks` are those of all ranks, or of this one alone. `agreed` is what else ranks agree on.
    """
    own = rank if len(chunks) > 1 else 0
    tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(rank)).tolist()
    cache, seen, start = _cache(), [], 0
    for index, sizes in enumerate(zip(*chunks, strict=True)):
        size = sizes[own]
        if index == SWITCH_BEFORE:
            switch()
        second = second_halves(sizes, index) if is_cut else []
        if any(second):
            first = [size - cut for size, cut in zip(sizes, second, strict=True)]
            experts.agree([first, second], **agreed)
        else:
            experts.agree([sizes], **agreed)
        output = model.step(_batch(tokens, start, size), cache, experts)
        seen.append(output.logits_SV.float() if size else None)
        start += size
    return seen


def _cache():
    return LatentCache(NARROW, num_blocks=4, max_len=16, dtype=torch.bfloat16)


def _batch(tokens, start, size):
    return StepBatch(
        tokens_T=torch.tensor(tokens[start : start + size], dtype=torch.int64),
        positions_T=torch.arange(start, start + size),
        sequences_T=torch.zeros(size, dtype=torch.int64),
        block_tables=[[3]] if size else [],
        sample_rows_S=torch.tensor([size - 1] if size else [], dtype=torch.int64),
    )
