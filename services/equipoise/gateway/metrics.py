"""The gateway's metrics. docs/metrics.md explains each; none has a series per rank."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.handover import Direct
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.request_balance import request_balancedness
from equipoise.planning.phase import Phase
from equipoise.telemetry.histogram import LONG_S, SHORT_S, Histogram
from equipoise.wire.inference_messages import GeneratedTokens


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    """It could not be served, or the gateway stopped before it was complete."""
    REJECTED = "rejected"
    """Its client must change it."""
    NOT_ADMITTED = "not_admitted"
    """The gateway was stopping, or as many requests as allowed were open."""
    ENDED = "ended"
    """Its client abandoned it."""


@dataclass(slots=True, kw_only=True)
class RequestTally:
    """Counts of requests and tokens since the start."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Requests that ended, by outcome."""

    replays: int = 0
    """Failures of ranks while they ran a request."""

    poison: int = 0
    """Requests rejected because ranks failed while running them."""

    tokens: int = 0
    """Tokens passed on to clients."""

    ttft_s: Histogram = field(default_factory=lambda: Histogram(LONG_S))
    """Time to the first token, seconds."""

    itl_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    """Time between tokens, seconds."""

    num_handed_over: int = 0
    """Requests handed over from the prefill pool to a decode rank."""

    direct: Counter[Direct] = field(default_factory=Counter)
    """Prompts that decode ranks prefill although there is a prefill pool, by reason."""

    second_token_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    """Time from the first to the second token of a request that was handed over, seconds."""

    async def counted(
        self,
        parts: AsyncGenerator[GeneratedTokens, None],
        *,
        now: Callable[[], float],
        if_closed: Callable[[], Outcome] = lambda: Outcome.ENDED,
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """Yield the same parts of a request, and count them.

        `if_closed`: the outcome if the caller reads no further.
        """
        last_s, is_first, outcome = now(), True, Outcome.FAILED
        try:
            async with aclosing(parts):
                async for part in parts:
                    if part.tokens:
                        passed_s, last_s = now() - last_s, now()
                        self.tokens += len(part.tokens)
                        if is_first:
                            self.ttft_s.observe(passed_s)
                        else:
                            self.itl_s.observe(passed_s / len(part.tokens))
                        is_first = False
                    if part.finish is not None:
                        # The caller reads no further.
                        outcome = Outcome.FINISHED
                    yield part
            outcome = Outcome.FINISHED
        except InvalidRequestError:
            outcome = Outcome.REJECTED
            raise
        except (GeneratorExit, asyncio.CancelledError):
            if outcome is not Outcome.FINISHED:
                outcome = if_closed()
            raise
        finally:
            self.outcomes[outcome] += 1


class GatewayCollector(Collector):
    """Collects from a tally and from the rank table."""

    def __init__(
        self, tally: RequestTally, *, ranks: RankTable, prefill: RankTable | None = None
    ) -> None:
        """`prefill` are the ranks of the pool that prefills for `ranks`, if there is one."""
        self._tally = tally
        self._ranks = ranks
        self._prefill = prefill

    def collect(self) -> Iterator[Metric]:
        """The current values of all metrics."""
        tally = self._tally
        requests = CounterMetricFamily(
            "equipoise_gateway_requests", "Requests that ended, by outcome.", labels=("outcome",)
        )
        for outcome in Outcome:
            requests.add_metric([outcome], tally.outcomes[outcome])
        yield requests
        is_ready, num_waiting = not self._ranks.unready(), self._ranks.num_waiting
        poison = "Requests rejected because they appear to crash the ranks that run them."
        direct = CounterMetricFamily(
            "equipoise_gateway_direct",
            "Prompts that decode ranks prefill although there is a prefill pool, by reason.",
            labels=("reason",),
        )
        for reason in Direct:
            direct.add_metric([reason], tally.direct[reason])
        yield direct
        yield self._balancedness()
        moved = "Requests handed over from the prefill pool to a decode rank."
        for family, name, text, value in (
            (CounterMetricFamily, "replays", "Rank failures during a request.", tally.replays),
            (CounterMetricFamily, "poison_requests", poison, tally.poison),
            (CounterMetricFamily, "tokens", "Tokens sent to clients.", tally.tokens),
            (CounterMetricFamily, "handovers", moved, tally.num_handed_over),
            (GaugeMetricFamily, "queued_requests", "Requests waiting for a rank.", num_waiting),
            (GaugeMetricFamily, "ready", "1 if a rank accepts requests, else 0.", is_ready),
        ):
            yield family(f"equipoise_gateway_{name}", text, value=float(value))
        for name, text, histogram in (
            ("ttft_seconds", "Time from a request to its first token.", tally.ttft_s),
            ("itl_seconds", "Time between two tokens of a request.", tally.itl_s),
            (
                "second_token_seconds",
                "Time from the first to the second token of a request that was handed over.",
                tally.second_token_s,
            ),
        ):
            yield HistogramMetricFamily(
                f"equipoise_gateway_{name}",
                text,
                buckets=histogram.buckets(),
                sum_value=histogram.sum,
            )

    def _balancedness(self) -> Metric:
        family = GaugeMetricFamily(
            "equipoise_gateway_request_balancedness",
            "Mean / max over a pool's ranks of the work that requests bring, by kind.",
            labels=("phase", "of"),
        )
        tables = {Phase.MIXED: self._ranks}
        if self._prefill is not None:
            tables = {Phase.PREFILL: self._prefill, Phase.DECODE: self._ranks}
        for phase, table in tables.items():
            measured = request_balancedness(table.loads(), now=table.now())
            for kind, value in measured.items():
                family.add_metric([phase, kind], value)
        return family
