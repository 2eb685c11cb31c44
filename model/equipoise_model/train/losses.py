"""The three losses of DeepSeek-V3's pre-training (arXiv 2412.19437), and one for specialisation.

Each is a plain function of the forward pass's results, so that tests can check its closed form.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from equipoise_model.plain.router import Routing


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it."""
    return _shifted_cross_entropy(logits_BTV, tokens_BT, offset=1)


def mtp_loss(logits_BTV: Tensor, tokens_BT: Tensor, *, depth: int = 1) -> Tensor:
    """Mean cross-entropy of the multi-token-prediction module `depth` (equation 24).

    Position t of its logits predicts token t + depth + 1. Positions whose target is beyond the
    sequence do not count, whether their logits are given or not.
    """
    return _shifted_cross_entropy(logits_BTV, tokens_BT, offset=depth + 1)


def sequence_balance_loss(routing: Routing, *, num_sequences: int) -> Tensor:
    """Sequence-wise balance loss of one layer before its weight alpha (equations 17 to 20).

    Rows belong to `num_sequences` sequences of equal length, one after another. For each sequence,
    sum over experts f (the expert's share of assignments, 1 when even) times P (its mean normalised
    affinity); then take the mean over sequences. Even routing gives 1. Counts the assignments made
    with the selection bias; the equation writes them without it, and the report does not say which
    is meant.
    """
    ids_TK, scores_TE = routing.expert_ids_TK, routing.scores_TE
    num_experts, top_k = scores_TE.shape[1], ids_TK.shape[1]
    chosen_TE = torch.zeros_like(scores_TE).scatter(1, ids_TK, 1.0)
    chosen_BTE = chosen_TE.unflatten(0, (num_sequences, -1))
    f_BE = chosen_BTE.mean(dim=1) * (num_experts / top_k)
    p_BE = _mean_affinities(scores_TE, num_sequences=num_sequences)
    loss: Tensor = (f_BE * p_BE).sum(dim=-1).mean()
    return loss


def specialization_loss(
    routing: Routing, *, num_sequences: int, num_domains: int, target: float
) -> Tensor:
    """How far one layer's experts are from separating domains while sharing the work, in nats.

    Sequences are of equal length and alternate between `num_domains` domains. For each domain, take
    the mean normalised affinity per expert. The loss is the mean over pairs of domains of what
    their Jensen-Shannon divergence lacks to `target` (at most log(2)), plus the unevenness of the
    mean over domains: log(num_experts) less its entropy. It is at least 0. Pushed further,
    affinities would saturate and leave nothing for the selection bias to balance.

    Mod-Squad (arXiv 2212.08066) trains experts for tasks with such an information measure.
    """
    p_BE = _mean_affinities(routing.scores_TE, num_sequences=num_sequences)
    p_DE = p_BE.unflatten(0, (-1, num_domains)).mean(dim=0)
    one, other = torch.triu_indices(num_domains, num_domains, offset=1)
    entropy_D = _entropy(p_DE)
    divergence_P = _entropy((p_DE[one] + p_DE[other]) / 2) - (entropy_D[one] + entropy_D[other]) / 2
    unevenness = math.log(p_DE.shape[1]) - _entropy(p_DE.mean(dim=0))
    return (target - divergence_P).clamp(min=0).mean() + unevenness


def _mean_affinities(scores_TE: Tensor, *, num_sequences: int) -> Tensor:
    """Each sequence's mean of its tokens' affinities, normalised to sum to 1, [B, E]."""
    affinity_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    means: Tensor = affinity_TE.unflatten(0, (num_sequences, -1)).mean(dim=1)
    return means


def _entropy(p_XE: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(p_XE).sum(dim=-1)
    return entropy


def _shifted_cross_entropy(logits_BTV: Tensor, tokens_BT: Tensor, *, offset: int) -> Tensor:
    targets_BT = tokens_BT[:, offset:]
    logits_BTV = logits_BTV[:, : targets_BT.shape[1]]
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
