"""Routing: which logical experts a token goes to, and with what weights.

Implements the rule of DeepSeek-V3 (arXiv 2412.19437, sections 2.1.2 and 4.5): sigmoid affinities, a
bias that affects only the choice, a limit on groups. Knows nothing of replicas, slots or ranks.
"""

from torch import Tensor


def route(
    scores_TE: Tensor,
    bias_E: Tensor,
    *,
    num_groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts and their weights for each row.

    Args:
        scores_TE: float32 affinities in (0, 1), sigmoids of the router's logits. T may be 0.
        bias_E: float32, added for the choice only; may be negative.
        num_groups: groups of consecutive experts, each of at least 2 (or one group of all).
        top_groups: groups a row may use: those with the largest sum of their best two scores.
        top_k: experts per row; at most the experts in `top_groups` groups.
        normalize: whether to divide weights by their sum.
        scale: factor of the weights.

    Returns:
        Expert ids, int64 [T, K], and weights, float32 [T, K], differentiable in `scores_TE`. Both
        are in descending order of biased score; the lower expert comes first among equals, and NaN
        last.
    """
    choice_TE = scores_TE.detach() + bias_E
    choice_TE = choice_TE.masked_fill(choice_TE.isnan(), float("-inf"))
    if top_groups < num_groups:
        choice_TE = _only_best_groups(choice_TE, num_groups=num_groups, top_groups=top_groups)
    ids_TK = _best(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * scale


def _only_best_groups(choice_TE: Tensor, *, num_groups: int, top_groups: int) -> Tensor:
    grouped_TGM = choice_TE.unflatten(1, (num_groups, -1))
    group_scores_TG = grouped_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best_Tg = _best(group_scores_TG, top_groups)
    outside_TG = group_scores_TG.new_ones(group_scores_TG.shape).scatter(1, best_Tg, 0.0).bool()
    # Minus infinity, not 0: biased scores may be negative.
    kept_TGM: Tensor = grouped_TGM.masked_fill(outside_TG.unsqueeze(-1), float("-inf"))
    return kept_TGM.flatten(1)


def _best(values_TN: Tensor, count: int) -> Tensor:
    """Indices of each row's largest values, the first of equals first, unlike `topk`."""
    return values_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
