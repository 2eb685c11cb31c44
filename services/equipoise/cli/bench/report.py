"""`report`: what a benchmark's measurements say. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equipoise.cli.bench.clients import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values of one kind, milliseconds; all None if there are none."""

    count: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """A benchmark in numbers.

    `ttft` is from a request's begin to its first word, `itl` from each word to the next, `e2e` to
    its end; only requests that ended well count in them and in the rates.
    """

    requests: int
    failed: int
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Spread
    itl: Spread
    e2e: Spread


def report(served: Sequence[Served]) -> BenchReport:
    """Judge all requests of a run; there is at least one."""
    good = [one for one in served if not one.failure]
    duration_s = max(one.ended_s for one in served) - min(one.began_s for one in served)
    output_tokens = sum(one.num_tokens for one in good)
    return BenchReport(
        requests=len(served),
        failed=len(served) - len(good),
        failures=dict(Counter(one.failure for one in served if one.failure).most_common()),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        input_tokens=sum(one.num_prompt_tokens for one in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
        ttft=_spread(ttfts_s(good)),
        itl=_spread(itls_s(good)),
        e2e=_spread(e2es_s(good)),
    )


def ttfts_s(served: Sequence[Served]) -> list[float]:
    """Seconds to each request's first word, of those that had one."""
    return [one.words_s[0] - one.began_s for one in served if one.words_s]


def itls_s(served: Sequence[Served]) -> list[float]:
    """Seconds from each word to the next of its request."""
    return [later - earlier for one in served for earlier, later in pairwise(one.words_s)]


def e2es_s(served: Sequence[Served]) -> list[float]:
    """Seconds to each request's end."""
    return [one.ended_s - one.began_s for one in served]


def _spread(values_s: Sequence[float]) -> Spread:
    if not values_s:
        return Spread(count=0, mean_ms=None, p50_ms=None, p90_ms=None, p99_ms=None)
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(values_s, [50, 90, 99]))
    return Spread(
        count=len(values_s),
        mean_ms=float(np.mean(values_s)) * 1e3,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
    )
