"""Which rank takes a request. Pure: the ranks' state in, a rank and the reason out.

A rank's work is known in tokens: those still to be made for this gateway's requests, those that
its latent cache holds for them, and, of requests that came by other ways, only their number and
what they hold of the cache, as the rank reported it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

CACHED_TOKEN_WEIGHT = 0.25
"""A token in the cache costs each step some attention; one to be made costs a step of its own."""

CROWDED_SHARE = 0.9
"""A latent cache that is fuller than this soon has no room: a rank with room goes before it."""

FOREIGN_REQUEST_TOKENS = 128
"""What a request is taken for of which nothing but its existence is known."""


class Standing(IntEnum):
    """Whether a rank may be given requests, best first."""

    OPEN = 0
    """It is there, as far as anybody knows."""

    DOUBTFUL = 1
    """The balancer does not hear it. It may serve all the same, so it is asked when no other is."""

    CLOSED = 2
    """It is leaving, or the pool has no such rank any more: it ends what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """A rank and its work at one moment.

    `tokens_in_flight` are still to be run and made, `kv_tokens` are held in the cache, both for
    the `num_open` requests of this gateway, of which it has not taken `num_unanswered` yet;
    `num_foreign` requests came by other ways and hold `foreign_kv_tokens`. The cache has room for
    `kv_tokens_total`, unknown if 0. `num_suspects` of the requests have made no token since ranks
    broke under them twice. A rank that failed (`on_trial`) is asked to take one
    request at a time until it does. `resting_until_s` is on the clock of `now`; `resting_reason`
    says why it rests, or rested.
    """

    name: str
    address: str
    standing: Standing
    num_open: int = 0
    num_unanswered: int = 0
    tokens_in_flight: int = 0
    kv_tokens: int = 0
    num_foreign: int = 0
    foreign_kv_tokens: int = 0
    kv_tokens_total: int = 0
    num_suspects: int = 0
    on_trial: bool = False
    resting_until_s: float = 0.0
    resting_reason: str = ""

    @property
    def work_tokens(self) -> float:
        """All the rank's work in one number, in tokens to be made."""
        return (
            self.tokens_in_flight
            + CACHED_TOKEN_WEIGHT * (self.kv_tokens + self.foreign_kv_tokens)
            + FOREIGN_REQUEST_TOKENS * self.num_foreign
        )

    @property
    def is_crowded(self) -> bool:
        """Whether the latent cache is so full that requests will be paused or wait for room."""
        held = self.kv_tokens + self.foreign_kv_tokens
        return 0 < self.kv_tokens_total * CROWDED_SHARE < held


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rank to ask, and why it."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChoice:
    """Why no rank can be asked, and when one may be if nothing else happens (None: unknown)."""

    reason: str
    retry_at_s: float | None


def choose(
    ranks: Sequence[RankLoad],
    *,
    now: float,
    avoid: frozenset[str],
    turn: int,
    is_suspect: bool = False,
) -> Choice | NoChoice:
    """The rank with the least work among those that may be asked now.

    Addresses in `avoid` (they broke under this very request) and doubtful ranks are taken only
    when no other may be asked, crowded ones when no other has room, and those that try a suspect
    when there is another. Two suspects never share a rank, so that one is not blamed for the other.
    Ranks with equal work take turns: `turn` counts requests.
    """
    refusals = {rank.address: refusal(rank, now=now, is_suspect=is_suspect) for rank in ranks}
    usable = [place for place, rank in enumerate(ranks) if not refusals[rank.address]]
    if not usable:
        why = "; ".join(f"{rank.name}: {refusals[rank.address]}" for rank in ranks)
        retries = [
            rank.resting_until_s
            for rank in ranks
            if rank.standing is not Standing.CLOSED and rank.resting_until_s > now
        ]
        return NoChoice(reason=why or "no rank is known", retry_at_s=min(retries, default=None))

    def cost(place: int) -> tuple[bool, Standing, bool, bool, float, int]:
        rank = ranks[place]
        in_turn = (place - turn) % len(ranks)
        avoided = rank.address in avoid
        tries_suspect = rank.num_suspects > 0
        return (
            *(avoided, rank.standing, tries_suspect),
            *(rank.is_crowded, rank.work_tokens, in_turn),
        )

    chosen = ranks[min(usable, key=cost)]
    return Choice(
        address=chosen.address,
        reason=f"{chosen.name} has the least work of {len(usable)} of {len(ranks)} ranks: "
        f"{chosen.tokens_in_flight} tokens in flight, {chosen.kv_tokens} in its cache, "
        f"{chosen.num_foreign} requests of others",
    )


def refusal(rank: RankLoad, *, now: float, is_suspect: bool = False) -> str:
    """Why a rank may not be asked now; empty when it may."""
    if rank.standing is Standing.CLOSED:
        return "is leaving"
    if rank.resting_until_s > now:
        return f"rests: {rank.resting_reason}"
    if rank.on_trial and rank.num_unanswered:
        return f"is on trial with one request: {rank.resting_reason}"
    if is_suspect and rank.num_suspects:
        return "tries another request under which ranks broke"
    return ""
