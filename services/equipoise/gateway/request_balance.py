"""How evenly requests are spread over the ranks of a pool, as balancedness. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from equipoise.gateway.rank_load import RankLoad, RankState


class BurdenKind(StrEnum):
    """Kinds of work that requests bring to a rank."""

    TOKENS = "tokens"
    """Prompt tokens to prefill that this gateway sent lately."""

    ATTENTION = "attention"
    """Pairs of one of those and an earlier position."""

    LATENTS = "latents"
    """Tokens in the latent cache, with the expected rest of answers, now."""

    REQUESTS = "requests"
    """Requests, now."""


def request_balancedness(ranks: Sequence[RankLoad], *, now: float) -> Mapping[BurdenKind, float]:
    """Mean / max work over the ranks that take requests, by kind; without kinds that none has."""
    open_ranks = [rank for rank in ranks if rank.state is not RankState.CLOSED]
    burdens: Mapping[BurdenKind, Sequence[float]] = {
        BurdenKind.TOKENS: [rank.sent_tokens.at(now) for rank in open_ranks],
        BurdenKind.ATTENTION: [rank.sent_pairs.at(now) for rank in open_ranks],
        BurdenKind.LATENTS: [rank.latents.total for rank in open_ranks],
        BurdenKind.REQUESTS: [rank.requests.total for rank in open_ranks],
    }
    return {kind: balancedness(burden) for kind, burden in burdens.items() if any(burden)}


def balancedness(burdens: Sequence[float]) -> float:
    """Compute mean / max, as `planning.balance` does of a layer; some burden is above 0."""
    return sum(burdens) / len(burdens) / max(burdens)
