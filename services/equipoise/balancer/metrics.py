"""`BalancerCollector`: the balancer's metrics, read from its state when somebody asks.

Keeps nothing and changes nothing. What there is of a pool is `pool_metrics.py`'s business.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from equipoise.balancer.pool_metrics import PoolMetrics
from equipoise.balancer.runner import Clock
from equipoise.balancer.seat import Seat


class BalancerCollector(Collector):
    """Collects from the pools that the balancer of `seat` leads; a follower shows none."""

    def __init__(self, seat: Seat, *, clock: Clock) -> None:
        self._seat = seat
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand now."""
        pools = self._seat.led
        yield GaugeMetricFamily(
            "equipoise_leader", "1 if this balancer leads, else 0.", value=float(pools is not None)
        )
        yield GaugeMetricFamily(
            "equipoise_leader_term",
            "Highest fencing number of a leader that this balancer knows of.",
            value=float(self._seat.highest_term),
        )
        metrics = PoolMetrics(now=self._clock())
        if pools is not None:
            for name in pools.names():
                metrics.add(pools.find(name).pool)
        yield from metrics.families()
