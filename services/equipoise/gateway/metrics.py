"""A gateway's metrics: what is counted of its requests, and what it tells of them.

Owns names, which docs/metrics.md explains. The number of series does not depend on the pool.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from equipoise.gateway.attempt import Made
from equipoise.gateway.errors import RequestError
from equipoise.gateway.ranks import Ranks
from equipoise.telemetry.histogram import LONG_S, SHORT_S, Histogram

_OUTCOMES = ("finished", "failed", "ended")


@dataclass(slots=True, kw_only=True)
class RequestTally:
    """Requests so far by outcome, breaks of ranks under them, and how long tokens took, seconds.

    `ended` are those whose client went away; `poison` were refused because ranks broke under them.
    """

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_OUTCOMES, 0))
    replays: int = 0
    poison: int = 0
    tokens: int = 0
    ttft_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))

    async def counted(
        self, parts: AsyncGenerator[Made, None], *, now: Callable[[], float]
    ) -> AsyncGenerator[Made, None]:
        """The same parts of a request, counted as they come."""
        last_s, is_first, outcome = now(), True, "ended"
        try:
            async with aclosing(parts):
                async for part in parts:
                    if part.tokens:
                        passed_s, last_s = now() - last_s, now()
                        self._note(part, passed_s=passed_s, is_first=is_first)
                        is_first = False
                    yield part
            outcome = "finished"
        except RequestError:
            outcome = "failed"
            raise
        finally:
            self.outcomes[outcome] += 1

    def _note(self, part: Made, *, passed_s: float, is_first: bool) -> None:
        self.tokens += len(part.tokens)
        if is_first:
            self.ttft_s.observe(passed_s)
        else:
            self.itl_s.observe(passed_s / len(part.tokens))


class GatewayCollector(Collector):
    """Collects from a tally and from the ranks' line."""

    def __init__(self, tally: RequestTally, *, ranks: Ranks) -> None:
        self._tally = tally
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand now."""
        tally = self._tally
        requests = CounterMetricFamily(
            "equipoise_gateway_requests", "Requests that ended, by outcome.", labels=("outcome",)
        )
        for outcome, count in tally.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily(
            "equipoise_gateway_replays", "Rank failures during a request.", value=tally.replays
        )
        yield CounterMetricFamily(
            "equipoise_gateway_poison_requests",
            "Requests rejected because they appear to crash the ranks that run them.",
            value=tally.poison,
        )
        yield CounterMetricFamily(
            "equipoise_gateway_tokens", "Tokens sent to clients.", value=tally.tokens
        )
        yield GaugeMetricFamily(
            "equipoise_gateway_queued_requests",
            "Requests waiting for a rank.",
            value=float(self._ranks.num_waiting),
        )
        yield GaugeMetricFamily(
            "equipoise_gateway_ready",
            "1 if a rank accepts requests, else 0.",
            value=float(not self._ranks.trouble()),
        )
        for name, text, histogram in (
            ("ttft_seconds", "Time from a request to its first token.", tally.ttft_s),
            ("itl_seconds", "Time between two tokens of a request.", tally.itl_s),
        ):
            yield HistogramMetricFamily(
                f"equipoise_gateway_{name}",
                text,
                buckets=histogram.buckets(),
                sum_value=histogram.sum,
            )
