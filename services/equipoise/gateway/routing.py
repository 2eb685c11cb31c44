"""Chooses the rank for a request. Pure: the ranks' state in, a rank and the reason out.

A rank's work is counted in tokens: those still to be generated for this gateway's requests and
those that its latent cache holds for them. Of requests from elsewhere only the number is known, and
what they hold of the cache, as the rank reports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

CACHED_TOKEN_WEIGHT = 0.25
"""Weight of a token in the cache, which costs each step some attention; a token to be generated
costs a step of its own."""

CROWDED_SHARE = 0.9
"""A latent cache above this share will soon be full: ranks with more room are preferred."""

FOREIGN_REQUEST_TOKENS = 128
"""Assumed work of a request from elsewhere."""


class RankState(IntEnum):
    """Whether a rank takes requests, best first."""

    OPEN = 0
    """It serves, as far as the gateway knows."""

    DOUBTFUL = 1
    """The balancer has lost contact with it. It may serve, so it is tried if no other rank can."""

    CLOSED = 2
    """It is leaving, or is no longer in the pool. It finishes the requests it has."""


@dataclass(slots=True, kw_only=True)
class RankLoad:
    """A rank and its work now."""

    name: str
    """Name for logs and messages."""

    address: str
    """host:port."""

    state: RankState
    """Whether it takes requests."""

    num_open: int = 0
    """Requests of this gateway."""

    num_unanswered: int = 0
    """Those of them that it has not accepted yet."""

    tokens_in_flight: int = 0
    """Tokens still to be run and generated for them."""

    kv_tokens: int = 0
    """Tokens that its latent cache holds for them."""

    num_foreign: int = 0
    """Requests from elsewhere."""

    foreign_kv_tokens: int = 0
    """Tokens that the cache holds for those."""

    kv_tokens_total: int = 0
    """Tokens that the cache has room for; 0 if unknown."""

    num_suspects: int = 0
    """Requests, not proven here yet, of which a choice ran on two ranks that failed."""

    num_failures: int = 0
    """Failures since it last accepted a request. While above 0, it gets one request at a time."""

    answers: bool | None = None
    """Whether it serves, by its latest answer or failure; None if it is not known."""

    silence: str = ""
    """Why it does not serve, if it does not."""

    latent_form: str = ""
    """What its latents look like; empty if unknown."""

    block_tokens: int = 0
    """Tokens per block of latents; 0 if unknown."""

    context_length: int = 0
    """Most tokens of prompt and output together; 0 if unknown."""

    resting_until_s: float = 0.0
    """Not to be tried before, on the clock of `now`."""

    resting_reason: str = ""
    """Reason for the latest backoff."""

    @property
    def trouble(self) -> str:
        """Why it does not serve; empty when it does. A full queue is no trouble."""
        if self.state is RankState.CLOSED:
            return "is leaving"
        if self.answers is None and self.state is RankState.DOUBTFUL:
            return "has lost its contact to the balancer"
        return f"does not serve: {self.silence}" if self.answers is False else ""

    @property
    def work_tokens(self) -> float:
        """All its work in one number, in tokens to be generated."""
        return (
            self.tokens_in_flight
            + CACHED_TOKEN_WEIGHT * (self.kv_tokens + self.foreign_kv_tokens)
            + FOREIGN_REQUEST_TOKENS * self.num_foreign
        )

    @property
    def is_crowded(self) -> bool:
        """Whether the latent cache is so full that requests will be preempted or wait for room."""
        held = self.kv_tokens + self.foreign_kv_tokens
        return 0 < self.kv_tokens_total * CROWDED_SHARE < held


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """The rank to use."""

    address: str
    """host:port."""

    reason: str
    """Why this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRankChoice:
    """No rank can take a request now."""

    reason: str
    """Why, for each rank."""

    retry_at_s: float | None
    """When one may, if nothing else changes; None if unknown."""


def choose(
    ranks: Sequence[RankLoad],
    *,
    now: float,
    avoid: frozenset[str],
    turn: int,
    is_suspect: bool = False,
) -> RankChoice | NoRankChoice:
    """Choose the rank with the least work among those that can take a request now.

    Addresses in `avoid` (they failed on this request) and doubtful ranks are chosen only when no
    other rank is available, crowded ranks when no other has room, and ranks that run a suspect when
    there is another. Two suspects never share a rank, so that neither is blamed for the other.
    Ranks with equal work take turns: `turn` counts requests.
    """
    rejections = {rank.address: rejection(rank, now=now, is_suspect=is_suspect) for rank in ranks}
    usable = [index for index, rank in enumerate(ranks) if not rejections[rank.address]]
    if not usable:
        why = "; ".join(f"{rank.name}: {rejections[rank.address]}" for rank in ranks)
        retries = [
            rank.resting_until_s
            for rank in ranks
            if rank.state is not RankState.CLOSED and rank.resting_until_s > now
        ]
        return NoRankChoice(reason=why or "no rank is known", retry_at_s=min(retries, default=None))

    def cost(index: int) -> tuple[bool, RankState, bool, bool, float, int]:
        rank = ranks[index]
        in_turn = (index - turn) % len(ranks)
        return (
            *(rank.address in avoid, rank.state, rank.num_suspects > 0),
            *(rank.is_crowded, rank.work_tokens, in_turn),
        )

    chosen = ranks[min(usable, key=cost)]
    return RankChoice(
        address=chosen.address,
        reason=f"{chosen.name} has the least work of {len(usable)} of {len(ranks)} ranks: "
        f"{chosen.tokens_in_flight} tokens in flight, {chosen.kv_tokens} in its cache, "
        f"{chosen.num_foreign} requests from elsewhere",
    )


def rejection(rank: RankLoad, *, now: float, is_suspect: bool = False) -> str:
    """Why a rank cannot take a request now; empty when it can."""
    if rank.state is RankState.CLOSED:
        return "is leaving"
    if rank.resting_until_s > now:
        return f"is in backoff: {rank.resting_reason}"
    if rank.num_failures and rank.num_unanswered:
        return f"is on trial with one request: {rank.resting_reason}"
    if is_suspect and rank.num_suspects:
        return "runs another request on which ranks failed"
    return ""
