"""Chooses the rank for a request. Pure: the ranks' work in, a rank and the reason out.

Two costs, both as DeepSeek's balancers of prefill and decode even them (open-infra-index, day 6):

- Prefill: the tokens that the rank prefills before the first answer token. A prompt of n tokens
  after c cached ones costs n + (c n + n^2 / 2) / parity, where `parity` pairs of a token and an
  earlier position take as long as a token without attention. So a cached beginning and the work
  that waits are one number: a prompt follows its beginning until waiting costs more than
  prefilling it again.
- Room: the larger of the shares of request slots and cache in use, with this request.

What a request does on the rank says which counts: a prefill pool only prefills, a rank that
continues what another pool has prefilled only needs room, and one that does both pays both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from equipoise.gateway.rank_load import Booking, RankLoad, RankState
from equipoise.wire.block_keys import BlockKey

ROOM_WEIGHT = 0.25
"""Weight of a token of the cache in use, in tokens to prefill, for requests that need both. A
cached token costs every step some attention; a token to prefill costs one step all of its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs of a rank."""

    prompt_tokens: int
    """Tokens of the prompt, at least one."""

    answer_tokens: int
    """Tokens that it is expected to generate here."""

    is_prefilled_elsewhere: bool = False
    """Whether the rank fetches what another pool has prefilled of the prompt."""

    generates: bool = True
    """Whether the rank generates more than the first token."""

    keys: tuple[BlockKey, ...] = ()
    """Keys of the prompt's full blocks, without its last token."""

    block_tokens: int = 0
    """Tokens of those blocks; 0 for no keys."""

    def num_cached_on(self, rank: RankLoad) -> int:
        """Tokens of the prompt that a rank has probably cached."""
        if rank.block_tokens != self.block_tokens:
            return 0
        return rank.prefixes.num_cached(self.keys) * self.block_tokens

    def booking_on(self, rank: RankLoad) -> Booking:
        """The request's work on a rank."""
        if self.is_prefilled_elsewhere:
            num_cached = len(self.keys) * self.block_tokens
        else:
            num_cached = self.num_cached_on(rank)
        uncached = self.prompt_tokens - num_cached
        return Booking(
            pending_tokens=uncached,
            pending_pairs=num_cached * uncached + uncached**2 // 2,
            latents=self.prompt_tokens + self.answer_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """The rank to use."""

    address: str
    """host:port."""

    booking: Booking
    """The request's work there."""

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
    demand: Demand,
    now: float,
    avoid: frozenset[str],
    turn: int,
    is_suspect: bool = False,
) -> RankChoice | NoRankChoice:
    """Choose the rank of least cost among those that can take a request now.

    Addresses in `avoid` (they failed on this request) and doubtful ranks are chosen only when no
    other rank is available, crowded ranks when no other has room, and ranks that run a suspect when
    there is another. Two suspects never share a rank, so that neither is blamed for the other.
    Ranks of equal cost take turns: `turn` counts requests.
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
    costs = dict(zip(usable, _costs(ranks, usable, demand), strict=True))

    def order(index: int) -> tuple[bool, RankState, bool, bool, float, float, int]:
        rank, cost = ranks[index], costs[index]
        return (
            *(rank.address in avoid, rank.state, rank.num_suspects > 0, rank.is_crowded),
            *(cost.total, cost.other, (index - turn) % len(ranks)),
        )

    chosen = min(usable, key=order)
    return RankChoice(
        address=ranks[chosen].address,
        booking=costs[chosen].booking,
        reason=f"{ranks[chosen].name} has the lowest cost of {len(usable)} usable ranks of "
        f"{len(ranks)}: {costs[chosen].reason}",
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


def parity_tokens(ranks: Sequence[RankLoad]) -> float:
    """Pairs that take as long as one token without attention: the pool's median; 0 if unknown."""
    return median([rank.parity_tokens for rank in ranks if rank.parity_tokens] or [0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a request costs on one rank."""

    booking: Booking
    """Its work there."""

    waiting: float
    """Tokens that are queued for prefill there, with their attention."""

    prefill: float
    """Tokens to prefill until its prompt has been: those, and its own."""

    share: float
    """The larger share of request slots and cache in use, with it."""

    total: float
    """The cost, in tokens to prefill."""

    other: float
    """What decides between ranks of equal cost."""

    @property
    def reason(self) -> str:
        """The parts of the cost."""
        return (
            f"{self.waiting:.0f} tokens are queued for prefill, this prompt adds "
            f"{self.prefill - self.waiting:.0f}, and with it {self.share:.0%} of the rank's slots "
            "or cache are in use"
        )


def _costs(ranks: Sequence[RankLoad], usable: Sequence[int], demand: Demand) -> list[_Cost]:
    """The cost of each usable rank."""
    parity = parity_tokens(ranks)
    per_pair = 1 / parity if parity else 0.0
    # Shares of ranks of unequal size are weighed alike.
    mean_cache = sum(ranks[index].cache_tokens for index in usable) / len(usable)
    costs = []
    for index in usable:
        rank = ranks[index]
        booking = demand.booking_on(rank)
        waiting = rank.pending_tokens.total + rank.pending_pairs.total * per_pair
        prefill = waiting + booking.pending_tokens + booking.pending_pairs * per_pair
        share = rank.share_with(booking)
        room = ROOM_WEIGHT * mean_cache * share
        if not demand.generates:
            total, other = prefill, share
        elif demand.is_prefilled_elsewhere:
            total, other = room, prefill
        else:
            total, other = prefill + room, share
        costs.append(
            _Cost(
                booking=booking,
                waiting=waiting,
                prefill=prefill,
                share=share,
                total=total,
                other=other,
            )
        )
    return costs
