"""`sample`: the next token of each row of logits, by each request's `SamplingParams`.

Pure functions, vectorised over a batch of requests with different parameters. A row's result
depends on that row alone: every step works along rows, and `sampling_draws` supplies randomness,
keyed by the request's seed and the token's position.

Steps follow the order of vLLM: tokens that are not allowed, biases, penalties, temperature, min-p,
top-k, top-p. (Hugging Face has min-p last.)

Sampling takes many times the memory of the logits that it works on. Many rows are therefore taken
in parts, and what is not needed any more is overwritten.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equipoise_model.sampling_draws import uniforms
from equipoise_model.sampling_params import (
    SampledToken,
    SamplingParams,
    SamplingRow,
    TokenCounts,
)

LOGITS_AT_ONCE = 2**23
"""Logits that are worked on together, at the least one row: 64 rows of DeepSeek-V3's 129,280
tokens. With fewer, a step would launch more kernels."""

_BYTES_PER_LOGIT = 64
"""Tensors take up to 42 bytes, if all parameters are set: tests measure them. CUDA's stable sort
allocates 32 by its source (indices with segments twice, keys, the radix sort's buffers) beside 28
of tensors, which has not been measured."""

_FAULTY = SampledToken(
    token=0, logprob=0.0, fault="no token is allowed, or logits or probabilities are not finite"
)


@torch.no_grad()
def sample(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample a token for each row of logits [S, V], on any device.

    A row whose logits or probabilities are not finite gets a `SampledToken` with a `fault`; the
    other rows are not affected.
    """
    assert logits_SV.shape[0] == len(rows)
    return [one for part in _parts(logits_SV) for one in _sample_part(logits_SV[part], rows[part])]


def rows_at_once(num_tokens: int) -> int:
    """Return how many rows of so many logits are worked on together."""
    return max(1, LOGITS_AT_ONCE // num_tokens)


def sampling_bytes(num_rows: int, num_tokens: int) -> int:
    """Return the most memory of sampling or scoring so many rows, beside the logits themselves."""
    return min(num_rows, rows_at_once(num_tokens)) * num_tokens * _BYTES_PER_LOGIT


def _parts(logits_SV: Tensor) -> list[slice]:
    num_rows, num_tokens = logits_SV.shape
    size = rows_at_once(num_tokens)
    return [slice(first, first + size) for first in range(0, num_rows, size)]


def _sample_part(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    logits_SV, is_finite_S = _finite_rows(logits_SV.float())
    log_peak_S = _log_peaks(logits_SV)
    penalized_SV, stays_finite_S = _finite_rows(_penalized(logits_SV, rows))
    tokens_S = penalized_SV.argmax(dim=-1)
    drawn = [row for row, one in enumerate(rows) if not one.params.greedy]
    if drawn:
        of_drawn = [rows[row] for row in drawn]
        numbers = uniforms([r.params.seed for r in of_drawn], [r.position for r in of_drawn])
        probabilities_RV = _probabilities(penalized_SV[drawn], [r.params for r in of_drawn])
        probabilities_RV, stays_finite_R = _finite_rows(probabilities_RV)
        stays_finite_S[drawn] &= stays_finite_R
        tokens_S[drawn] = draw(probabilities_RV, torch.from_numpy(numbers))
    num_top = [row.params.logprobs or 0 for row in rows]
    sampled = _described(logits_SV, tokens_S, num_top=num_top, log_peak_S=log_peak_S)
    is_good = (is_finite_S & stays_finite_S).tolist()
    return [one if good else _FAULTY for one, good in zip(sampled, is_good, strict=True)]


@torch.no_grad()
def score(
    logits_SV: Tensor, tokens: Sequence[int], *, num_top: Sequence[int]
) -> list[SampledToken]:
    """Describe known tokens, one for each row of logits, with `num_top` of the most likely.

    Rows whose logits are not finite get a `fault`. The result is bitwise that of `sample`.
    """
    assert logits_SV.shape[0] == len(tokens) == len(num_top)
    return [
        one
        for part in _parts(logits_SV)
        for one in _score_part(logits_SV[part], tokens[part], num_top=num_top[part])
    ]


def _score_part(
    logits_SV: Tensor, tokens: Sequence[int], *, num_top: Sequence[int]
) -> list[SampledToken]:
    logits_SV, is_finite_S = _finite_rows(logits_SV.float())
    tokens_S = torch.tensor(tokens, device=logits_SV.device)
    log_peak_S = _log_peaks(logits_SV)
    scored = _described(logits_SV, tokens_S, num_top=num_top, log_peak_S=log_peak_S)
    return [one if g else _FAULTY for one, g in zip(scored, is_finite_S.tolist(), strict=True)]


@torch.no_grad()
def probabilities(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distribution that `sample` draws from, float32 [S, V]; greedy rows have a single 1."""
    assert logits_SV.shape[0] == len(rows)
    penalized_SV = _penalized(logits_SV.float(), rows)
    best_S1 = penalized_SV.argmax(dim=-1, keepdim=True)
    probabilities_SV = torch.zeros_like(penalized_SV).scatter_(1, best_S1, 1.0)
    drawn = [row for row, one in enumerate(rows) if not one.params.greedy]
    if drawn:
        of_drawn = [rows[row].params for row in drawn]
        probabilities_SV[drawn] = _probabilities(penalized_SV[drawn], of_drawn)
    return probabilities_SV


def draw(probabilities_SV: Tensor, numbers_S: Tensor) -> Tensor:
    """Return the first token, int64 [S], at which the cumulative probability exceeds a number.

    `numbers_S` is float64 in [0, 1). Rows need not sum to 1. A token of probability 0 is never
    drawn.
    """
    sums_SV = probabilities_SV.double().cumsum_(dim=-1)
    total_S = sums_SV[:, -1]
    below_S = torch.nextafter(total_S, torch.zeros_like(total_S))
    goal_S = torch.minimum(numbers_S.to(total_S.device) * total_S, below_S)
    return torch.searchsorted(sums_SV, goal_S.unsqueeze(-1), right=True).squeeze(-1)


def _penalized(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after what rows do not allow, their biases and their penalties."""
    return penalize(bias(allow(logits_SV, rows), rows), rows)


def allow(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Set the logits of tokens that a row does not allow to minus infinity."""
    masks = {row: one.allowed for row, one in enumerate(rows) if one.allowed is not None}
    if not masks:
        return logits_SV
    chosen, words_RW = list(masks), np.stack(list(masks.values()))
    bits_RV = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little")
    is_out_RV = torch.from_numpy(bits_RV[:, : logits_SV.shape[1]] == 0).to(logits_SV.device)
    kept_RV = logits_SV[chosen].masked_fill(is_out_RV, -math.inf)
    return logits_SV.index_copy(0, torch.tensor(chosen, device=logits_SV.device), kept_RV)


def bias(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply biases and bans; returns the same tensor if no row has any."""
    entries = [
        (index, token, value)
        for index, row in enumerate(rows)
        for token, value in (*row.params.logit_bias, *((one, -math.inf) for one in row.banned))
    ]
    if not entries:
        return logits_SV
    places, tokens, values = zip(*entries, strict=True)
    device = logits_SV.device
    where = (torch.tensor(places, device=device), torch.tensor(tokens, device=device))
    return logits_SV.index_put(where, logits_SV.new_tensor(values), accumulate=True)


def penalize(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply the penalties of tokens so far; returns the same tensor if no row has any.

    Rows with penalties must have `counts`.
    """
    chosen = [row for row, one in enumerate(rows) if one.params.penalizes]
    if not chosen:
        return logits_SV
    logits_RV = logits_SV[chosen]
    penalized = [rows[row] for row in chosen]
    counts = [row.counts for row in penalized if row.counts is not None]
    in_output_RV = _output_counts(counts, penalized, like=logits_RV)
    seen_RV = _in_prompts(counts, like=logits_RV) | (in_output_RV > 0)
    column = partial(_column, params=[row.params for row in penalized], like=logits_RV)
    factor_R1 = column("repetition_penalty")
    repeated_RV = torch.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    logits_RV = logits_RV - column("frequency_penalty") * in_output_RV
    logits_RV = logits_RV - column("presence_penalty") * (in_output_RV > 0)
    return logits_SV.index_copy(0, torch.tensor(chosen, device=logits_SV.device), logits_RV)


def _column(name: str, params: Sequence[SamplingParams], *, like: Tensor) -> Tensor:
    """One parameter of every request, as a column for rows of logits."""
    return like.new_tensor([[getattr(one, name)] for one in params])


def _output_counts(
    counts: Sequence[TokenCounts], rows: Sequence[SamplingRow], *, like: Tensor
) -> Tensor:
    """How often each token is in each row's output, in the shape and dtype of `like`."""
    listed = [one.in_output(row.drafts) for one, row in zip(counts, rows, strict=True)]
    places = np.repeat(np.arange(len(rows)), [tokens.shape[1] for tokens in listed])
    places_N, tokens_N, counts_N = torch.from_numpy(
        np.stack([places, *np.concatenate(listed, axis=1)])
    ).to(like.device)
    return torch.zeros_like(like).index_put_(
        (places_N, tokens_N), counts_N.to(like.dtype), accumulate=True
    )


def _in_prompts(counts: Sequence[TokenCounts], *, like: Tensor) -> Tensor:
    """Whether each token is in each row's prompt, bool, in the shape of `like`."""
    in_prompt_RV = np.zeros(like.shape, dtype=np.bool_)
    for row_V, one in zip(in_prompt_RV, counts, strict=True):
        row_V[: len(one.in_prompt)] = one.in_prompt
    return torch.from_numpy(in_prompt_RV).to(like.device)


def _probabilities(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distributions of penalized logits, which are overwritten; no row is greedy."""
    # Subtract the maximum first: a low temperature must not overflow large logits.
    logits_RV -= logits_RV.amax(dim=-1, keepdim=True)
    logits_RV /= _column("temperature", params, like=logits_RV)
    # Relative to the largest logarithm, 0, so min_p is a bound.
    least = [[math.log(one.min_p) if one.min_p > 0 else -math.inf] for one in params]
    least_R1 = torch.tensor(least, device=logits_RV.device)
    logits_RV.masked_fill_(logits_RV < least_R1, -math.inf)
    # Only the rows that need it are sorted.
    chosen = [row for row, one in enumerate(params) if one.top_k > 0 or one.top_p < 1]
    if chosen:
        is_out_CV = _unlikely(logits_RV[chosen], [params[row] for row in chosen])
        kept_CV = logits_RV[chosen].masked_fill_(is_out_CV, -math.inf)
        logits_RV.index_copy_(0, torch.tensor(chosen, device=logits_RV.device), kept_CV)
    return logits_RV.softmax(dim=-1)


def _unlikely(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Whether top-k or top-p exclude each token, bool [R, V]."""
    device, num_tokens = logits_RV.device, logits_RV.shape[1]
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    most_R1 = torch.tensor([[one.top_k or num_tokens] for one in params], device=device)
    out_RV = torch.arange(num_tokens, device=device) >= most_R1
    shares_RV = sorted_RV.masked_fill_(out_RV, -math.inf).softmax(dim=-1)
    # Rounding may push sums past 1, so a share of 1 sets no bound at all.
    bounds = [[one.top_p if one.top_p < 1 else math.inf] for one in params]
    bound_R1 = torch.tensor(bounds, dtype=torch.float64, device=device)
    out_RV |= shares_RV.double().cumsum_(dim=-1).sub_(shares_RV) >= bound_R1
    return torch.empty_like(out_RV).scatter_(1, order_RV, out_RV)


def _finite_rows(values_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the rows without a finite maximum; also return which rows have one, bool [S].

    The maximum is NaN if any value is, and infinite if all are minus infinity.
    """
    is_finite_S = values_SV.amax(dim=-1).isfinite()
    if is_finite_S.all():
        return values_SV, is_finite_S
    return torch.where(is_finite_S.unsqueeze(-1), values_SV, 0.0), is_finite_S


def _log_peaks(logits_SV: Tensor) -> list[float]:
    """Return the log of the largest probability of each row.

    All others follow by subtraction. Logarithms are taken one by one: those of a whole tensor are
    rounded in ways that depend on an element's index.
    """
    return [math.log(peak) for peak in logits_SV.softmax(dim=-1).amax(dim=-1).tolist()]


def _described(
    logits_SV: Tensor,
    tokens_S: Tensor,
    *,
    num_top: Sequence[int],
    log_peak_S: Sequence[float],
) -> list[SampledToken]:
    """Build tokens with their log probabilities, and the top tokens of rows that ask for them."""
    largest_S1 = logits_SV.amax(dim=-1, keepdim=True)
    below_S = (logits_SV.gather(1, tokens_S.unsqueeze(-1)) - largest_S1).squeeze(-1).tolist()
    sampled = []
    for row, (token, below) in enumerate(zip(tokens_S.tolist(), below_S, strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if num_top[row]:
            top = tuple((t, b + log_peak_S[row]) for t, b in _top(logits_SV[row], num_top[row]))
        sampled.append(SampledToken(token=token, logprob=below + log_peak_S[row], top=top))
    return sampled


def _top(logits_V: Tensor, count: int) -> list[tuple[int, float]]:
    """The largest logits, relative to the largest, the lower token first among equals."""
    least = logits_V.topk(min(count, logits_V.shape[0])).values[-1]
    tokens_K = (logits_V >= least).nonzero().squeeze(-1)
    values_K, order_K = logits_V[tokens_K].sort(descending=True, stable=True)
    below_K = (values_K - values_K[0])[:count].tolist()
    return list(zip(tokens_K[order_K][:count].tolist(), below_K, strict=True))
