"""`WorkerCollector`: one worker's metrics, read from its state at each scrape.

docs/metrics.md explains the names. The number of series does not depend on the model or the pool.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from equipoise.worker.parts import WorkerParts
from equipoise.worker.rank import Rank


class WorkerCollector(Collector):
    """Collects from a worker's parts and from its current rank."""

    def __init__(self, *, rank: Callable[[], Rank | None], parts: WorkerParts) -> None:
        self._rank = rank
        self._scheduler = parts.scheduler
        self._timings = parts.timings
        self._waits = parts.waits

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        yield from self._requests()
        yield from self._epoch()
        reached = CounterMetricFamily(
            "equipoise_worker_bound_reached",
            "How often a wait reached its bound.",
            labels=("bound",),
        )
        for bound in self._waits.all():
            reached.add_metric([bound.name], bound.reached)
        yield reached
        timings = self._timings
        for name, text, histogram in (
            ("step_seconds", "Duration of a step.", timings.step_s),
            ("itl_seconds", "Time from one token of a request to its next.", timings.itl_s),
            ("step_stall_seconds", "Time that a switch held up its step.", timings.stall_s),
        ):
            yield HistogramMetricFamily(
                f"equipoise_worker_{name}",
                text,
                buckets=histogram.buckets(),
                sum_value=histogram.sum,
            )

    def _requests(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        counts, blocks = scheduler.counts, scheduler.blocks
        for name, text, kinds in (
            (
                "tokens",
                "Tokens that were run, and generated.",
                {"processed": counts.processed, "generated": counts.generated},
            ),
            (
                "prefix_tokens",
                "Tokens of admitted requests, and those in the cache already.",
                {"sought": counts.sought, "found": counts.found},
            ),
            (
                "drafts",
                "Guessed tokens that were verified, and that were right.",
                {"verified": counts.drafted, "accepted": counts.accepted},
            ),
        ):
            family = CounterMetricFamily(f"equipoise_worker_{name}", text, labels=("kind",))
            for kind, count in kinds.items():
                family.add_metric([kind], count)
            yield family
        yield CounterMetricFamily(
            "equipoise_worker_requests_paused",
            "Times that a request was paused because the cache had no room.",
            value=counts.paused,
        )
        for name, text, value in (
            ("active_requests", "Requests that are being generated.", scheduler.num_active),
            ("queued_requests", "Requests in line.", scheduler.num_queued),
            (
                "drafting",
                "1 while tokens are guessed, 0 while not, or too many requests are generated.",
                scheduler.is_drafting,
            ),
            (
                "kv_used_ratio",
                "Blocks of the cache that active requests hold, of all.",
                blocks.num_used / blocks.num_blocks,
            ),
        ):
            yield _gauge(name, text, value)

    def _epoch(self) -> Iterator[Metric]:
        rank = self._rank()
        epoch, number, generation, staged = 0, -1, 0, 0
        if rank is not None:
            epoch, number = rank.join_epoch.epoch, rank.join_epoch.rank
            generation, staged = rank.engine.generation, rank.engine.staged_generation
        for name, text, value in (
            ("serving", "1 while it takes part in steps, else 0.", rank is not None),
            ("rank", "Its rank in the epoch; -1 while it has none.", number),
            ("epoch", "Epoch it serves in; 0 while it serves in none.", epoch),
            ("generation", "Generation of the latest step; 0 before the first.", generation),
            ("staged_generation", "Generation that waits for the switch; 0 if none.", staged),
        ):
            yield _gauge(name, text, value)
        yield CounterMetricFamily(
            "equipoise_worker_checksum_failures",
            "Experts pulled whose bytes were not those promised.",
            value=self._timings.num_corrupted + (rank.num_corrupted if rank else 0),
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"equipoise_worker_{name}", text, value=float(value))
