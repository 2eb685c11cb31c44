"""`WorkerCollector`: one worker's metrics, read from its state at each scrape.

docs/metrics.md explains the names. The number of series does not depend on the model or the pool.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from equipoise.worker.latents.holds import HoldEnd
from equipoise.worker.latents.puller import PullOutcome
from equipoise.worker.parts import WorkerParts
from equipoise.worker.rank import Rank


class WorkerCollector(Collector):
    """Collects from a worker's parts and from its current rank."""

    def __init__(self, *, rank: Callable[[], Rank | None], parts: WorkerParts) -> None:
        self._rank = rank
        self._phase = parts.settings.phase
        self._scheduler = parts.scheduler
        self._timings = parts.timings
        self._waits = parts.waits
        self._latents = parts.latents
        self._puller = parts.latent_puller

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        rank = self._rank()
        phase = GaugeMetricFamily(
            "equipoise_worker_phase", "1 for the phase that the worker serves.", labels=("phase",)
        )
        phase.add_metric([self._phase], 1.0)
        yield phase
        yield from self._counters(rank)
        for name, text, value in (*_gauges_of_rank(rank), *self._gauges_of_requests()):
            yield GaugeMetricFamily(f"equipoise_worker_{name}", text, value=float(value))
        timings = self._timings
        for name, text, histogram in (
            ("step_seconds", "Duration of a step.", timings.step_s),
            ("itl_seconds", "Time from one token of a request to its next.", timings.itl_s),
            ("switch_stall_seconds", "Time that a switch delayed its step.", timings.stall_s),
        ):
            yield HistogramMetricFamily(
                f"equipoise_worker_{name}",
                text,
                buckets=histogram.buckets(),
                sum_value=histogram.sum,
            )

    def _counters(self, rank: Rank | None) -> Iterator[Metric]:
        counts = self._scheduler.counts
        timeouts = {timeout.name: timeout.reached for timeout in self._waits.all()}
        corrupted = self._timings.num_corrupted + (rank.puller.num_corrupted if rank else 0)
        scrubbed = self._timings.num_scrubbed
        if rank is not None and rank.scrubber is not None:
            scrubbed = rank.scrubber.num_verified
        yield _labelled("timeouts", "Times that a wait timed out.", "wait", timeouts)
        yield _labelled(
            "tokens",
            "Tokens run through the model, and tokens generated.",
            "kind",
            {"processed": counts.processed, "generated": counts.generated},
        )
        yield _labelled(
            "prefix_tokens",
            "Tokens of admitted requests, and prefix cache hits among them.",
            "kind",
            {"sought": counts.sought, "found": counts.found},
        )
        yield _labelled(
            "drafts",
            "Draft tokens verified, and accepted ones among them.",
            "kind",
            {"verified": counts.drafted, "accepted": counts.accepted},
        )
        yield from self._latent_counters()
        for name, text, value in (
            (
                "requests_preempted",
                "Requests preempted because the cache was full.",
                counts.preempted,
            ),
            ("checksum_failures", "Pulled experts that failed their checksum.", corrupted),
            (
                "slots_scrubbed",
                "Held slots that still had the checkpoint's bytes when hashed again.",
                scrubbed,
            ),
        ):
            yield CounterMetricFamily(f"equipoise_worker_{name}", text, value=value)

    def _latent_counters(self) -> Iterator[Metric]:
        counts, holds = self._scheduler.counts, self._scheduler.holds
        yield _labelled(
            "prefilled_tokens",
            "Tokens of admitted requests that were not cached, by why they were prefilled here.",
            "why",
            {
                "own": counts.prefilled_own,
                "tail": counts.prefilled_tail,
                "missing": counts.prefilled_missing,
            },
        )
        yield _labelled(
            "latent_pulls",
            "Prompts whose latents were to be fetched from another pool.",
            "outcome",
            {outcome: self._puller.outcomes[outcome] for outcome in PullOutcome},
        )
        yield _labelled(
            "latent_bytes",
            "Bytes of latents exchanged with other pools.",
            "direction",
            {"in": self._puller.num_bytes, "out": self._latents.num_sent_bytes},
        )
        yield _labelled(
            "latent_holds",
            "Holds of latents for other pools that have ended.",
            "ended",
            {how: holds.ended[how] for how in HoldEnd},
        )
        yield CounterMetricFamily(
            "equipoise_worker_latent_holds_taken",
            "Prompts whose latents were held for other pools.",
            value=holds.num_taken,
        )
        yield CounterMetricFamily(
            "equipoise_worker_latent_rejections",
            "Fetches of latents that were rejected.",
            value=self._latents.rejected.total(),
        )

    def _gauges_of_requests(self) -> Iterator[tuple[str, str, float]]:
        scheduler = self._scheduler
        yield "active_requests", "Requests that are generating.", scheduler.num_active
        yield "queued_requests", "Requests that are queued.", scheduler.num_queued
        yield (
            "drafting",
            "1 while speculative decoding is on; 0 if off, or too many requests are active.",
            scheduler.is_drafting,
        )
        yield (
            "held_tokens",
            "Tokens in latents that are held for other pools.",
            scheduler.holds.num_tokens,
        )
        yield (
            "cache_used_ratio",
            "Fraction of the cache's blocks that active requests hold.",
            scheduler.blocks.num_used / scheduler.blocks.num_blocks,
        )


def _gauges_of_rank(rank: Rank | None) -> Iterator[tuple[str, str, float]]:
    epoch, number, generation, staged = 0, -1, 0, 0
    if rank is not None:
        epoch, number = rank.join_epoch.epoch, rank.join_epoch.rank
        generation, staged = rank.engine.generation, rank.engine.staged_generation
    yield "serving", "1 if the worker takes part in steps, else 0.", rank is not None
    yield "rank", "Rank in the epoch; -1 if none.", number
    yield "epoch", "Epoch the worker serves in; 0 if none.", epoch
    yield "generation", "Generation of the latest step; 0 if none.", generation
    yield "staged_generation", "Generation that awaits the switch; 0 if none.", staged


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"equipoise_worker_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric([value], count)
    return family
