"""`BalancerCollector`: the balancer's metrics, read from its state on every scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from equipoise.balancer.clock import Clock
from equipoise.balancer.failures import Failures
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.seat import Seat
from equipoise.balancer.telemetry.pool_metrics import PoolMetrics

REMOVED_AFTER_S = 86_400.0
"""Seconds without workers, or of this term, after which a pool counts as removed: its series end,
and with them its alerts."""


class BalancerCollector(Collector):
    """Collects from the pools that the balancer of `seat` leads, and those that it cannot read."""

    def __init__(self, seat: Seat, *, clock: Clock) -> None:
        self._seat = seat
        self._clock = clock
        self._failures = Failures("the metrics")

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        pools = self._seat.led
        yield GaugeMetricFamily(
            "equipoise_leader", "1 if this balancer leads, else 0.", value=float(pools is not None)
        )
        yield GaugeMetricFamily(
            "equipoise_leader_term",
            "Highest term (fencing number) that this balancer has seen.",
            value=float(self._seat.highest_term),
        )
        yield GaugeMetricFamily(
            "equipoise_ready",
            "1 if this balancer could accept workers if it led, else 0.",
            value=float(not self._seat.not_ready),
        )
        yield GaugeMetricFamily(
            "equipoise_store_readable",
            "0 if this balancer's latest read of the store failed, else 1.",
            value=float(not self._seat.store_fault),
        )
        yield from self._policy()
        yield from self._election()
        metrics = PoolMetrics(now=self._clock())
        if pools is not None:
            for name in pools.names():
                with self._failures.confined(name):
                    runner = pools.find(name)
                    if not self._is_removed(runner):
                        metrics.add(runner.pool)
        for name in self._seat.pools.unreadable:
            metrics.add_unreadable(name)
        yield from metrics.families()

    def _is_removed(self, runner: PoolRunner) -> bool:
        empty_since_s = runner.empty_since_s
        return empty_since_s is not None and self._clock() - empty_since_s > REMOVED_AFTER_S

    def _policy(self) -> Iterator[Metric]:
        book = self._seat.policies
        yield GaugeMetricFamily(
            "equipoise_policy_rejected",
            "1 while the policy file is rejected and an earlier policy is in force, else 0.",
            value=float(book.latest_rejection is not None),
        )
        yield CounterMetricFamily(
            "equipoise_policy_rejections", "Policy files rejected.", value=float(book.num_rejected)
        )

    def _election(self) -> Iterator[Metric]:
        longest = GaugeMetricFamily(
            "equipoise_election_timeout_seconds",
            "Timeout of a wait of the leader election.",
            labels=("wait",),
        )
        reached = CounterMetricFamily(
            "equipoise_election_timeouts",
            "Times that a wait of the leader election reached its timeout.",
            labels=("wait",),
        )
        for timeout in self._seat.timeouts:
            longest.add_metric([timeout.name], timeout.timeout_s)
            reached.add_metric([timeout.name], float(timeout.reached))
        yield longest
        yield reached
