"""`report`: a benchmark's figures, from its results. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equipoise.cli.bench.clients import RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Mean and percentiles of a latency; None without samples."""

    count: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """A benchmark's figures. Latencies and rates count successful requests only."""

    requests: int
    """Requests sent."""
    failed: int
    """Requests that failed."""
    failures: dict[str, int]
    """Failed requests by reason."""
    duration_s: float
    """From the first request to the last end."""
    requests_per_s: float
    """Rate of successful requests."""
    input_tokens: int
    """Prompt tokens."""
    output_tokens: int
    """Generated tokens."""
    output_tokens_per_s: float
    """Rate of generated tokens."""
    ttft: LatencySummary
    """Time to first token."""
    itl: LatencySummary
    """Inter-token latency."""
    e2e: LatencySummary
    """End-to-end latency."""


def report(results: Sequence[RequestResult]) -> BenchReport:
    """Compute the figures of at least one result."""
    good = [one for one in results if not one.failure]
    duration_s = max(one.ended_s for one in results) - min(one.began_s for one in results)
    output_tokens = sum(one.num_tokens for one in good)
    return BenchReport(
        requests=len(results),
        failed=len(results) - len(good),
        failures=dict(Counter(one.failure for one in results if one.failure).most_common()),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        input_tokens=sum(one.num_prompt_tokens for one in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
        ttft=_summary(ttfts_s(good)),
        itl=_summary(itls_s(good)),
        e2e=_summary(e2es_s(good)),
    )


def ttfts_s(results: Sequence[RequestResult]) -> list[float]:
    """Time to first token of each request that had one, seconds."""
    return [one.chunks_s[0] - one.began_s for one in results if one.chunks_s]


def itls_s(results: Sequence[RequestResult]) -> list[float]:
    """Inter-token latencies, seconds."""
    return [later - earlier for one in results for earlier, later in pairwise(one.chunks_s)]


def e2es_s(results: Sequence[RequestResult]) -> list[float]:
    """End-to-end latency of each request, seconds."""
    return [one.ended_s - one.began_s for one in results]


def _summary(values_s: Sequence[float]) -> LatencySummary:
    if not values_s:
        return LatencySummary(count=0, mean_ms=None, p50_ms=None, p90_ms=None, p99_ms=None)
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(values_s, [50, 90, 99]))
    return LatencySummary(
        count=len(values_s),
        mean_ms=float(np.mean(values_s)) * 1e3,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
    )
