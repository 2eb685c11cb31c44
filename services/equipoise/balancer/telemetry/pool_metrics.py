"""`PoolMetrics`: the state and tally of pools as Prometheus metrics; see docs/metrics.md.

The number of series per pool is bounded: none per expert or per layer, and none per rank in pools
of more than `MAX_RANKS_LISTED` ranks.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness_per_layer
from equipoise.planning.expected_gain import GainOutcome
from equipoise.planning.node_traffic import NodeTraffic
from equipoise.planning.placing.chance import balancedness_by_chance
from equipoise.planning.slowness import slowdowns
from equipoise.pool.health import Health
from equipoise.pool.pool import Pool
from equipoise.telemetry.histogram import Histogram

MAX_RANKS_LISTED = 400
"""Larger pools have no series per rank."""

_P, _PHASE, _RANK = ("pool",), ("pool", "phase"), ("pool", "rank")

_GAUGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "pool_health": (("pool", "health"), "1 for the pool's current health, else 0."),
    "pool_unreadable": (
        _P,
        "1 while this balancer cannot read the pool's records, and so cannot lead it, else 0.",
    ),
    "ranks": (
        ("pool", "state"),
        "Ranks of the current epoch by state: serving, loading, silent or gone.",
    ),
    "intended_ranks": (_P, "Ranks that the pool is meant to have, by its workers' --num-ranks."),
    "advised_ranks": (
        _P,
        "Ranks that the traffic of a prefill or decode pool calls for, once it is measured.",
    ),
    "idle_ranks": (_P, "Ranks whose engine takes no forward passes."),
    "engine_info": (
        ("pool", "engine"),
        "1 for each engine that ranks are part of, by name and version; equipoise for its own.",
    ),
    "policy_info": (("pool", "hash"), "1 for the hash of the policy in force."),
    "pool_paused": (_P, "1 while an operator or the policy has planning paused, else 0."),
    "pool_pinned": (_P, "1 while an operator has the layout pinned, else 0."),
    "epoch": (_P, "Current epoch."),
    "generation": (_P, "Committed generation."),
    "rollout_generation": (_P, "Generation being rolled out; 0 if none."),
    "rollout_waves_left": (_P, "Waves that follow the current one."),
    "balancedness": (_PHASE, "Mean over layers of mean / max rank load in the latest window."),
    "balancedness_p5_layer": (
        _PHASE,
        "5th percentile over layers of mean / max rank load in the latest window.",
    ),
    "balancedness_min_layer": (
        _PHASE,
        "Lowest mean / max rank load of any layer in the latest window.",
    ),
    "balancedness_by_chance": (
        _PHASE,
        "Balancedness that evenly loaded ranks could have by chance in the latest window.",
    ),
    "rank_load_max_over_mean": (
        _PHASE,
        "Mean over layers of max / mean rank load in the latest window.",
    ),
    "step_seconds": (_P, "Mean duration of a step in the latest window, if workers report it."),
    "imbalance_seconds": (
        ("pool", "basis"),
        "Time per step that imbalance costs: `measured` or an `upper_bound`.",
    ),
    "imbalance_ratio": (
        ("pool", "basis"),
        "Fraction of a step that imbalance costs: `measured` or an `upper_bound`.",
    ),
    "rows_between_nodes": (
        ("pool", "kind"),
        "Rows (or outputs) sent between nodes per token and layer, and what each way would send.",
    ),
    "token_nodes": (_P, "Nodes that hold the slots of a token in a MoE layer, on average."),
    "token_nodes_max": (_P, "The most nodes that hold the slots of any token in a MoE layer."),
    "window_assignments": (_P, "Assignments in the latest window, all layers."),
    "gain_expected": (_P, "Expected gain in balancedness of the latest judged rollout."),
    "gain_realised": (_P, "Realised gain in balancedness of the latest judged rollout."),
    "rank_silence_max_seconds": (
        _P,
        "Longest time since the last message of any rank.",
    ),
    "store_up": (_P, "1 if the pool's latest write to the store succeeded, else 0."),
    "timeout_seconds": (("pool", "wait"), "Timeout of a wait."),
    "rank_load_ratio": (_RANK, "Load of a rank in the latest window as a multiple of the mean."),
    "rank_slowdown_ratio": (
        _RANK,
        "Compute time per step as a multiple of the median rank's, corrected for load.",
    ),
    "slow_ranks": (_P, "Ranks that are slower than the policy allows, corrected for load."),
    "excluded_workers": (_P, "Workers excluded for a while: slow ones, and ones that end epochs."),
    "quarantined_workers": (_P, "Workers quarantined for wrong bytes or another checkpoint."),
    "rank_silence_seconds": (_RANK, "Time since the last message of a rank."),
}

_COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "windows": (_P, "Windows closed."),
    "shifts": (_P, "Windows in which traffic had shifted."),
    "decisions": (("pool", "verdict"), "Verdicts, yes or no."),
    "rollouts": (("pool", "outcome"), "Rollouts that ended: completed, aborted or rolled_back."),
    "rollouts_judged": (
        ("pool", "outcome"),
        "Rollouts judged by their realised gain: kept, traffic_changed or rolled_back.",
    ),
    "waves": (_P, "Generations that all ranks switched to."),
    "slow_ranks_found": (_P, "Times that a rank was found to be slow."),
    "moves": (_P, "Moves: slots whose expert changed."),
    "pulled_bytes": (("pool", "source"), "Bytes pulled for moves, from a peer or the checkpoint."),
    "rejections": (("pool", "kind"), "Messages and workers rejected."),
    "timeouts": (
        ("pool", "wait"),
        "Times that a wait reached its timeout, including those of workers.",
    ),
}

_HISTOGRAMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "plan_seconds": (_P, "Time to compute a plan and its verdict."),
    "wave_seconds": (_P, "Time from the first Stage of a wave to the last Switched."),
    "wave_state_seconds": (("pool", "state"), "Time that a wave spent in a state."),
    "switch_stall_seconds": (_P, "Time that steps stalled at a switch, on the slowest rank."),
}


class PoolMetrics:
    """Metric families to which pools are added one by one; `now` is the time of their clock."""

    def __init__(self, *, now: float) -> None:
        self._now = now
        self._gauges = {
            name: GaugeMetricFamily(f"equipoise_{name}", text, labels=labels)
            for name, (labels, text) in _GAUGES.items()
        }
        self._counters = {
            name: CounterMetricFamily(f"equipoise_{name}", text, labels=labels)
            for name, (labels, text) in _COUNTERS.items()
        }
        self._histograms = {
            name: HistogramMetricFamily(f"equipoise_{name}", text, labels=labels)
            for name, (labels, text) in _HISTOGRAMS.items()
        }

    def families(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._gauges.values()
        yield from self._counters.values()
        yield from self._histograms.values()

    def add(self, pool: Pool) -> None:
        """Add one pool's state and tally."""
        self._add_state(pool)
        self._add_ranks(pool)
        self._add_balance(pool)
        self._add_tally(pool)
        for timeout in pool.counters.timeouts.all():
            self._gauge("timeout_seconds", pool, timeout.timeout_s, timeout.name)
            self._count("timeouts", pool, timeout.reached, timeout.name)
        for rejection in pool.counters.rejections.all():
            self._count("rejections", pool, rejection.count, rejection.kind)

    def add_unreadable(self, pool: str) -> None:
        """Add a pool that cannot be read, by its name; nothing else is known of it."""
        self._gauges["pool_unreadable"].add_metric([pool], 1.0)

    def _add_state(self, pool: Pool) -> None:
        health = pool.diagnosis().health
        for one in Health:
            self._gauge("pool_health", pool, one is health, one.value)
        rollout = pool.rollouts.current
        hold = pool.journal.hold
        self._gauge("pool_paused", pool, bool(hold.paused) or pool.policy.values.pause)
        self._gauge("pool_pinned", pool, bool(hold.pinned))
        self._gauge("policy_info", pool, 1, pool.policy.in_force.digest)
        self._gauge("epoch", pool, pool.roster.epoch)
        self._gauge("generation", pool, pool.layouts.stored_generation or 0)
        self._gauge("rollout_generation", pool, rollout.target.generation if rollout else 0)
        self._gauge("rollout_waves_left", pool, pool.rollouts.waves_left)
        self._gauge("store_up", pool, not pool.journal.store_fault)
        self._gauge("pool_unreadable", pool, False)
        self._gauge("slow_ranks", pool, len(pool.windows.slow))
        left_out = {*pool.attendance.excluded, *pool.interruptions.excluded}
        self._gauge("excluded_workers", pool, len(left_out))
        self._gauge("quarantined_workers", pool, len(pool.quarantine.workers))

    def _add_ranks(self, pool: Pool) -> None:
        states = dict.fromkeys(("serving", "loading", "silent", "gone"), 0)
        ages_s = []
        seated = pool.roster.seated()
        engines: set[str] = set()
        for member in seated:
            age_s = max(0.0, self._now - member.last_heard_s)
            ages_s.append(age_s)
            engines.add(member.hello.engine or "equipoise")
            if not member.connected:
                states["gone"] += 1
            elif member.rank in pool.attendance.silent:
                states["silent"] += 1
            else:
                states["serving" if member.serving else "loading"] += 1
            if len(seated) <= MAX_RANKS_LISTED:
                self._gauge("rank_silence_seconds", pool, age_s, str(member.rank))
        for state, count in states.items():
            self._gauge("ranks", pool, count, state)
        self._gauge("rank_silence_max_seconds", pool, max(ages_s, default=0.0))
        self._gauge("intended_ranks", pool, pool.roster.intended_ranks)
        self._gauge("idle_ranks", pool, sum(member.idle for member in seated))
        advice = pool.windows.advice
        if advice is not None and advice.ranks:
            self._gauge("advised_ranks", pool, advice.ranks)
        for engine in sorted(engines):
            self._gauge("engine_info", pool, 1, engine)

    def _add_balance(self, pool: Pool) -> None:
        window = pool.windows.latest
        if window is None:
            return
        self._gauge("window_assignments", pool, window.assignments)
        if not window.assignments:
            return
        self._add_phase(pool, window.phase.value, window.rank_load)
        self._add_imbalance(pool)
        if window.nodes is not None:
            self._add_nodes(pool, window.nodes)
        factors = None if window.pace is None else slowdowns(window.pace)
        if factors is not None and len(factors) <= MAX_RANKS_LISTED:
            for rank, factor in enumerate(factors):
                self._gauge("rank_slowdown_ratio", pool, factor, str(rank))
        rank_load = window.rank_load.sum(axis=0)
        if len(rank_load) <= MAX_RANKS_LISTED:
            for rank, ratio in enumerate(rank_load / rank_load.mean()):
                self._gauge("rank_load_ratio", pool, ratio, str(rank))

    def _add_imbalance(self, pool: Pool) -> None:
        imbalance = pool.windows.imbalance
        if imbalance is None:
            return
        basis = "measured" if imbalance.is_measured else "upper_bound"
        self._gauge("imbalance_ratio", pool, imbalance.share, basis)
        if imbalance.step_s is not None and imbalance.cost_s is not None:
            self._gauge("step_seconds", pool, imbalance.step_s)
            self._gauge("imbalance_seconds", pool, imbalance.cost_s, basis)

    def _add_nodes(self, pool: Pool, traffic: NodeTraffic) -> None:
        for kind, rows in (
            ("rows", traffic.sent_rows),
            ("outputs", traffic.sent_outputs),
            ("one_hop", traffic.direct_rows),
            ("two_hops", traffic.remote_nodes),
        ):
            self._gauge("rows_between_nodes", pool, rows, kind)
        self._gauge("token_nodes", pool, traffic.nodes)
        self._gauge("token_nodes_max", pool, traffic.most_nodes)

    def _add_phase(self, pool: Pool, phase: str, rank_load: Load) -> None:
        busy = rank_load.max(axis=1) > 0
        per_layer = balancedness_per_layer(rank_load[busy])
        by_chance = balancedness_by_chance(rank_load[busy])
        self._gauge("balancedness", pool, per_layer.mean(), phase)
        self._gauge("balancedness_p5_layer", pool, float(np.percentile(per_layer, 5)), phase)
        self._gauge("balancedness_min_layer", pool, per_layer.min(), phase)
        self._gauge("balancedness_by_chance", pool, by_chance.mean(), phase)
        self._gauge("rank_load_max_over_mean", pool, (1 / per_layer).mean(), phase)

    def _add_tally(self, pool: Pool) -> None:
        tally = pool.counters.tally
        self._count("windows", pool, pool.windows.num_closed)
        self._count("shifts", pool, tally.shifts)
        self._count("decisions", pool, tally.accepted, "yes")
        self._count("decisions", pool, tally.declined, "no")
        self._count("rollouts", pool, pool.rollouts.completed, "completed")
        self._count("rollouts", pool, pool.rollouts.aborted, "aborted")
        self._count("rollouts", pool, tally.rolled_back, "rolled_back")
        self._count("waves", pool, tally.waves)
        self._count("moves", pool, tally.moves)
        self._count("slow_ranks_found", pool, tally.slow_found)
        self._count("pulled_bytes", pool, tally.peer_bytes, "peer")
        self._count("pulled_bytes", pool, tally.checkpoint_bytes, "checkpoint")
        for outcome in GainOutcome:
            self._count("rollouts_judged", pool, tally.judged[outcome], outcome.value)
        if pool.decisions.judged:
            self._gauge("gain_expected", pool, pool.decisions.judged[0].expected.gain)
            self._gauge("gain_realised", pool, pool.decisions.judged[0].realised.gain)
        self._histogram("plan_seconds", pool, tally.plan_s)
        self._histogram("wave_seconds", pool, tally.wave_s)
        self._histogram("switch_stall_seconds", pool, tally.stall_s)
        for state, histogram in tally.state_s.items():
            self._histogram("wave_state_seconds", pool, histogram, state.value)

    def _gauge(self, name: str, pool: Pool, value: float, *labels: str) -> None:
        self._gauges[name].add_metric([pool.name, *labels], float(value))

    def _count(self, name: str, pool: Pool, value: float, *labels: str) -> None:
        self._counters[name].add_metric([pool.name, *labels], float(value))

    def _histogram(self, name: str, pool: Pool, histogram: Histogram, *labels: str) -> None:
        self._histograms[name].add_metric(
            [pool.name, *labels], buckets=histogram.buckets(), sum_value=histogram.sum
        )
