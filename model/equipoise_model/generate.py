"""`greedy`: batch generation in one process, the reference for every other way to serve.

Scheduling, streaming and several processes are the worker's responsibility.
"""

from collections.abc import Collection, Sequence

import torch

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.latent_cache import LatentCache, blocks_for
from equipoise_model.plain.transformer import Transformer
from equipoise_model.step import StepBatch


def greedy(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    experts: ExpertParallel | None = None,
    chunk_tokens: int | None = None,
) -> list[list[int]]:
    """Continue all prompts at once with the most likely token, the lowest id among equals.

    Args:
        model: with the experts that `experts` places.
        prompts: at least one token each.
        max_tokens: tokens to generate per prompt, at least 1; prompt and output together must fit
            `max_position_embeddings`.
        stop_tokens: each ends its sequence early and is part of the output.
        experts: where experts are; slot e holds expert e by default.
        chunk_tokens: most tokens of a prompt per step; all of them by default.

    Returns:
        The generated tokens of each prompt.
    """
    assert max_tokens >= 1
    assert all(prompts)
    device = model.embed_tokens.weight.device
    experts = experts or ExpertParallel.local(model.config, device=device)
    longest = max(map(len, prompts), default=0)
    max_len = longest + max_tokens
    tables = block_tables(len(prompts), max_len=max_len)
    cache = LatentCache(
        model.config,
        num_blocks=max(len(prompts), 1) * blocks_for(max_len),
        max_len=max_len,
        dtype=model.embed_tokens.weight.dtype,
        device=device,
    )
    sequences = [list(prompt) for prompt in prompts]
    num_run = [0] * len(prompts)
    running = list(range(len(prompts)))
    while running:
        chunks = [
            (row, range(num_run[row], len(sequences[row]))[: chunk_tokens or longest])
            for row in running
        ]
        next_tokens = _step(
            model, cache, experts, sequences=sequences, tables=tables, chunks=chunks
        )
        for (row, chunk), token in zip(chunks, next_tokens, strict=True):
            num_run[row] = chunk.stop
            if chunk.stop < len(sequences[row]):
                continue
            sequences[row].append(token)
            if token in stop_tokens or len(sequences[row]) == len(prompts[row]) + max_tokens:
                running.remove(row)
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def block_tables(num_sequences: int, *, max_len: int) -> list[range]:
    """A table per sequence, with blocks of its own for all its positions."""
    size = blocks_for(max_len)
    return [range(size * first, size * (first + 1)) for first in range(num_sequences)]


def _step(
    model: Transformer,
    cache: LatentCache,
    experts: ExpertParallel,
    *,
    sequences: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    chunks: Sequence[tuple[int, range]],
) -> list[int]:
    """Run positions of sequences; return the most likely token after each chunk."""
    device = model.embed_tokens.weight.device
    places = [(row, position) for row, chunk in chunks for position in chunk]
    ends = torch.tensor([len(chunk) for _, chunk in chunks]).cumsum(0) - 1
    batch = StepBatch(
        tokens_T=torch.tensor([sequences[row][p] for row, p in places], device=device),
        positions_T=torch.tensor([p for _, p in places], device=device),
        sequences_T=torch.tensor([row for row, _ in places], device=device),
        block_tables=tables,
        sample_rows_S=ends.to(device),
    )
    tokens: list[int] = model.step(batch, cache, experts).logits_SV.argmax(dim=-1).tolist()
    return tokens
