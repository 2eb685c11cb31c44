"""A plan as the model and the drafter take it: tensors of tokens, and lines to continue."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from equipoise.rank.header import StepHeader
from equipoise.worker.sequence import StepPlan
from equipoise_model.drafting import DraftLine
from equipoise_model.sampling_params import SampledToken, SamplingRow
from equipoise_model.step import StepBatch


def step_batch(plan: StepPlan) -> StepBatch:
    """Return the tokens of all chunks as the model's input."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    samples: list[int] = []
    for index, chunk in enumerate(plan.chunks):
        first_scored = len(tokens) + chunk.score_from
        samples += range(first_scored, first_scored + len(chunk.scored))
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.start + len(chunk.tokens))
        sequences += [index] * len(chunk.tokens)
        samples += range(len(tokens) - len(chunk.sampling), len(tokens))
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        block_tables=[chunk.blocks for chunk in plan.chunks],
        sample_rows_S=torch.tensor(samples, dtype=torch.int64),
    )


def wanted_logits(plan: StepPlan, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Part a step's logits into those that score prompts and those to sample from."""
    if not any(chunk.scored for chunk in plan.chunks):
        return logits_SV[:0], logits_SV
    is_scoring = [
        scores
        for chunk in plan.chunks
        for scores in (*(True for _ in chunk.scored), *(False for _ in chunk.sampling))
    ]
    scoring_S = torch.tensor(is_scoring, device=logits_SV.device)
    return logits_SV[scoring_S], logits_SV[~scoring_S]


def sampling_rows(plan: StepPlan) -> list[SamplingRow]:
    """Return how to sample from each row of logits, with the tokens that grammars allow there."""
    rows: list[SamplingRow] = []
    for chunk in plan.chunks:
        if chunk.constraint is None or not chunk.sampling:
            rows += chunk.sampling
            continue
        masks = chunk.constraint.masks(chunk.drafts)
        pairs = zip(chunk.sampling, masks, strict=True)
        rows += [replace(row, allowed=mask) for row, mask in pairs]
    return rows


def draft_lines(plan: StepPlan, sampled: Sequence[SampledToken]) -> list[DraftLine]:
    """Return what the drafter continues: each chunk's tokens, with the accepted samples."""
    tokens = iter(sampled)
    lines = []
    for chunk in plan.chunks:
        standing = [one.token for one in chunk.accepted([next(tokens) for _ in chunk.sampling])]
        sampling = None
        if chunk.sampling:
            sampling = chunk.sampling[len(standing) - 1].after(standing[-1])
            if chunk.constraint is not None:
                mask = chunk.constraint.mask_ahead(standing)
                sampling = None if mask is None else replace(sampling, allowed=mask)
        lines.append(
            DraftLine(
                num_rows=len(chunk.tokens),
                tokens=(*chunk.known, *standing, *chunk.upcoming),
                sampling=sampling,
            )
        )
    return lines


def tokens_by_batch(headers: tuple[StepHeader, ...]) -> list[list[int]]:
    """Return the rows that each rank brings to each micro-batch of a step.

    There is a second one if any rank wants it; to the others it is empty.
    """
    second = [one.num_second for one in headers]
    first = [one.num_tokens - one.num_second for one in headers]
    return [first, second] if any(second) else [first]


def draft_tokens(headers: tuple[StepHeader, ...]) -> list[list[int]]:
    """Return the rows that each rank brings to each draft module that any of them runs.

    All ranks run a module if any of them does, because its experts are spread over all of them.
    """
    return [
        [one.num_tokens if one.num_drafts >= depth else 0 for one in headers]
        for depth in range(1, 1 + max(one.num_drafts for one in headers))
    ]
