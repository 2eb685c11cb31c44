"""`Drafter`: drafts tokens by multi-token prediction (arXiv 2412.19437, section 2.2).

A draft costs one layer instead of all of them, and the model verifies it in its next step. Runs the
modules after each step; the scheduler decides which sequences draft and what to accept.

Module k runs on every row of a step, because it has latents of its own. It sees a position once: if
the following tokens were drafts then, and were rejected, deeper modules keep latents of the wrong
tokens. That may cost later drafts, never tokens. Drafts may depend on the batch: the modules use
the fast form. Their experts are spread over the ranks like those of other layers, so all ranks run
a module together, some of them without rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from equipoise_model.sampling import sample
from equipoise_model.sampling_params import SamplingRow
from equipoise_model.serving_model import ServingModel
from equipoise_model.step import StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLine:
    """One sequence's part of a step."""

    num_rows: int
    """Rows of the sequence in this step; the first is `tokens[0]`."""
    tokens: Sequence[int]
    """The rows' tokens and those known to follow, at least one. Rows from the last of `tokens` on
    are rejected drafts."""
    sampling: SamplingRow | None
    """How to draft the token after `tokens`; None to only store the rows' latents."""


class Drafter:
    """The first `num_drafts` modules of a model that has them; used from the engine's thread."""

    def __init__(self, model: ServingModel, *, num_drafts: int) -> None:
        assert 1 <= num_drafts <= model.num_mtp_layers
        self._lm_head = model.lm_head
        self.num_drafts = num_drafts

    @torch.no_grad()
    def draft(
        self,
        output: StepOutput,
        lines: Sequence[DraftLine],
        tokens_by_depth: Sequence[Sequence[int]],
    ) -> list[tuple[int, ...]]:
        """Draft tokens for each line, in the order of the step's rows.

        All ranks of a step call this together. `tokens_by_depth` holds the rows that each rank
        brings to each module that any of them runs: all of its step's rows or none. Lines without
        sampling get no draft, nor does a line beyond the modules that this rank runs. A draft is
        sampled as the token itself will be, with the same penalties, temperature, seed and random
        number, so that the two are likely to be equal.
        If the modules' logits are not finite, the draft is any token; the model rejects it.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        guesses: list[tuple[int, ...]] = [() for _ in lines]
        hidden_TD, device = output.hidden_TD, output.hidden_TD.device
        asked = {
            index: _without_logprobs(line.sampling)
            for index, line in enumerate(lines)
            if line.sampling is not None
        }
        rows_S = torch.tensor(_last_rows(lines), dtype=torch.int64, device=device)
        for depth, tokens_by_rank in enumerate(tokens_by_depth, start=1):
            is_own = bool(lines) and depth <= self.num_drafts
            following = _following(lines, guesses, depth=depth) if is_own else []
            hidden_TD = output.draft(
                hidden_TD,
                torch.tensor(following, dtype=torch.int64, device=device),
                depth=depth,
                tokens_by_rank=tokens_by_rank,
            )
            if not is_own:
                continue
            logits_SV = self._lm_head(hidden_TD[rows_S])
            chosen = sample(logits_SV, list(asked.values()))
            for (index, row), one in zip(asked.items(), chosen, strict=True):
                guesses[index] += (one.token,)
                asked[index] = row.after(one.token)
        return guesses


def _without_logprobs(row: SamplingRow) -> SamplingRow:
    return replace(row, params=replace(row.params, logprobs=None))


def _last_rows(lines: Sequence[DraftLine]) -> list[int]:
    """For each line with sampling, the row that predicts the first unknown token."""
    rows, first = [], 0
    for line in lines:
        if line.sampling is not None:
            rows.append(first + len(line.tokens) - 2)
        first += line.num_rows
    return rows


def _following(
    lines: Sequence[DraftLine], guesses: Sequence[tuple[int, ...]], *, depth: int
) -> list[int]:
    """The token `depth` positions after every row; arbitrary for rows that do not count."""
    following: list[int] = []
    for line, guessed in zip(lines, guesses, strict=True):
        tokens = (*line.tokens, *guessed)
        wanted = range(depth, depth + line.num_rows)
        following += [tokens[min(place, len(tokens) - 1)] for place in wanted]
    return following
