"""`advise`: how many ranks the measured traffic of a prefill or decode pool calls for.

A prefill pool needs as many ranks as its prompts take, at the rate at which busy ranks prefill. A
decode pool needs as many as its requests fill, by slots or by cache. Nothing is moved by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from equipoise.planning.phase import Phase

MINUTES = 5
"""Minutes that must agree before the advice changes."""

MAX_MINUTES = 60
"""Minutes over which the rate of busy ranks is averaged."""

MOST_LOADED = 0.9
"""Load of a rank above which more ranks are advised."""

LEAST_LOADED = 0.8
"""Load of a rank, with fewer ranks, up to which fewer are advised."""

MIN_FULL_S = 10.0
"""Seconds of busy ranks without which the rate at which a rank prefills is unknown."""

MAX_GROWTH = 2
"""Most ranks advised, as a multiple of the present ones: a larger group has to be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """What a rank reports of its requests."""

    time_s: float
    """When the report arrived."""

    boot_id: str
    """The worker process that counts."""

    processed: int
    """Tokens run through the model since boot."""

    cached: int
    """Tokens of prompts found in the cache since boot, which did not have to run."""

    pending: int
    """Tokens of prompts that have not run yet."""

    slots: float
    """Requests, active and queued, as a multiple of those that the rank takes at a time."""

    cache: float
    """Share of the cache in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Use of ranks over some time; each field is a sum over ranks."""

    rank_s: float = 0.0
    """Time, seconds."""

    tokens: int = 0
    """Tokens processed."""

    pending_growth: int = 0
    """Tokens of prompts that were added to those waiting, less those taken from them."""

    full_tokens: int = 0
    """Tokens processed while a rank certainly had prompts to prefill."""

    full_s: float = 0.0
    """That time, seconds."""

    slots_s: float = 0.0
    """Share of slots in use x time, seconds."""

    cache_s: float = 0.0
    """Share of the cache in use x time, seconds."""

    def plus(self, other: "Use") -> "Use":
        """Add another rank's use, or that of another time."""
        return Use(
            rank_s=self.rank_s + other.rank_s,
            tokens=self.tokens + other.tokens,
            pending_growth=self.pending_growth + other.pending_growth,
            full_tokens=self.full_tokens + other.full_tokens,
            full_s=self.full_s + other.full_s,
            slots_s=self.slots_s + other.slots_s,
            cache_s=self.cache_s + other.cache_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksAdvice:
    """How many ranks a pool's traffic calls for."""

    ranks: int = 0
    """Ranks; 0 if unknown."""

    needed: float = 0.0
    """Ranks that the load of the latest minutes would fill completely; 0 if unknown."""

    reason: str
    """Why, human-readable."""


def use_between(before: RankUse, after: RankUse) -> Use:
    """Return the use of a rank between two successive reports; none if counters started again.

    The rank was busy throughout if it began with at least as many pending tokens as it then
    processed or found in its cache, and still has some.
    """
    elapsed_s, tokens = after.time_s - before.time_s, after.processed - before.processed
    cached = after.cached - before.cached
    if after.boot_id != before.boot_id or tokens < 0 or cached < 0 or elapsed_s <= 0:
        return Use()
    was_full = after.pending > 0 and tokens > 0 and tokens + cached <= before.pending
    return Use(
        rank_s=elapsed_s,
        tokens=tokens,
        pending_growth=after.pending - before.pending,
        full_tokens=tokens if was_full else 0,
        full_s=elapsed_s if was_full else 0.0,
        slots_s=elapsed_s * after.slots,
        cache_s=elapsed_s * after.cache,
    )


def advise(
    minutes: Sequence[Use], *, phase: Phase, num_ranks: int, least_ranks: int, before: int
) -> RanksAdvice:
    """Advise a number of ranks for a prefill or decode pool of `num_ranks`.

    `minutes` are those of the current epoch, oldest first, each with reports; the rate of busy
    ranks is that of all of them. `before` is the advice so far, 0 for none. It stays unless each
    of the latest `MINUTES` calls for more, or each for fewer. The ranks advised are at least
    `least_ranks`, which hold all experts, and at most `MAX_GROWTH` times the present ones.
    """
    latest = minutes[-MINUTES:]
    if len(latest) < MINUTES:
        return RanksAdvice(reason=f"measured for {len(latest)} of {MINUTES} minutes")
    if phase is Phase.PREFILL:
        full_s = sum(one.full_s for one in minutes)
        if full_s < MIN_FULL_S:
            return RanksAdvice(
                reason="no rank has had prompts queued for long enough to show how fast it prefills"
            )
        rate = sum(one.full_tokens for one in minutes) / full_s
        loads = [_arriving(one) / rate for one in latest]
        arriving = num_ranks * sum(map(_arriving, latest)) / MINUTES
        cause = f"prompts arrive at {arriving:,.0f} tokens/s, and a busy rank prefills {rate:,.0f}"
    else:
        loads = [max(one.slots_s, one.cache_s) / one.rank_s for one in latest]
        slots = sum(one.slots_s / one.rank_s for one in latest) / MINUTES
        cache = sum(one.cache_s / one.rank_s for one in latest) / MINUTES
        cause = f"requests use {slots:.0%} of the slots and {cache:.0%} of the cache"
    fewest = min(ceil(num_ranks * load / MOST_LOADED) for load in loads)
    most = max(ceil(num_ranks * load / LEAST_LOADED) for load in loads)
    wanted = min(max(before or num_ranks, fewest), most)
    ranks = max(1, least_ranks, min(wanted, MAX_GROWTH * num_ranks))
    needed = num_ranks * sum(loads) / MINUTES
    limit = f"; fewer than {least_ranks} cannot hold all experts" if wanted < least_ranks else ""
    return RanksAdvice(
        ranks=ranks,
        needed=needed,
        reason=f"{cause}: the load of {needed:.1f} ranks over the latest {MINUTES} minutes, "
        f"{needed / ranks:.0%} of {ranks}{limit}",
    )


def _arriving(use: Use) -> float:
    """Tokens of prompts per second and rank that arrived."""
    return max(0.0, (use.tokens + use.pending_growth) / use.rank_s)
