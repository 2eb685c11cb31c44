"""`Policy`: how loads become layouts. Values only; nothing here decides."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from equipoise.planning.errors import InvalidPolicyError

MIB = 1024 * 1024


class SlowWorkerAction(StrEnum):
    """What is done about a worker that is slow by itself."""

    REPORT = "report"
    """It is told in status, metrics and the log."""

    EXCLUDE = "exclude"
    """The others go on without it, and it may come back after a while."""


class StoreDown(StrEnum):
    """What goes on while the store takes no writes. Nothing is ever switched without it."""

    PAUSE = "pause"
    """Nothing is planned."""

    MEMORY = "memory"
    """Plans are made and judged, and verdicts kept to be written later; rollouts wait."""


class Algorithm(StrEnum):
    """How replicas are placed."""

    AUTO = "auto"
    """Plan both ways and keep the more balanced plan."""

    HIERARCHICAL = "hierarchical"
    """Expert groups stay within a node, so group-limited routing rarely leaves it."""

    GLOBAL = "global"
    """Any expert on any rank."""

    LOCAL = "local"
    """Between the two: most load stays on the home node of its group, as far as a dial says."""

    INCREMENTAL = "incremental"
    """From the placement in use, the moves that gain most: to a target, or within a budget."""


class Weighting(StrEnum):
    """Whether an expert's replicas may serve unequal shares of its load."""

    OFF = "off"
    """Plans split evenly; a layer that has shares keeps them until it is better off without."""

    AUTO = "auto"
    """Shares differ where that relieves a layer's busiest rank by more than loads jitter."""

    ON = "on"
    """Shares differ wherever that relieves the busiest rank at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often a pool is planned, what a plan must gain, and the bound of every wait.

    Raises:
        InvalidPolicyError: a value is outside its range.
    """

    pause: bool = False
    """Nothing is moved; loads are measured on, and every decision says so."""

    interval_s: float = 10.0
    """Seconds between decisions. Long enough that a window has traffic to judge by, short enough
    that a shift costs a few windows only."""

    report_interval_s: float = 1.0
    """Seconds between a worker's load reports. Ten reports fill a window, so that one late report
    hardly changes it."""

    heartbeat_interval_s: float = 1.0
    """Seconds between a worker's signs of life when it has nothing else to say."""

    slow_half_life_s: float = 60.0
    """Seconds after which load weighs half in the average that plans rest on. Half-lives are
    in seconds, not steps, so that they do not depend on traffic."""

    fast_half_life_s: float = 5.0
    """Seconds after which load weighs half in the average that notices a shift of traffic."""

    shift_threshold: float = 0.15
    """Total variation distance between fast and slow average, mean over layers, beyond sampling
    noise, that counts as a shift: 0.15 means that 15 % of the load goes to other experts."""

    min_assignments: float = 2000.0
    """Expert assignments per layer that a window needs before anything is decided on it. Fewer
    than some dozens per expert are mostly noise."""

    min_gain: float = 0.02
    """Balancedness (mean / max rank load) that a plan must gain on the latest window. Two
    hundredths shorten a balanced step by about as much as moving experts disturbs it."""

    cooldown_s: float = 0.0
    """Seconds after a switch in which nothing is planned, unless traffic shifted. 0: the other
    conditions suffice."""

    max_wave_bytes: int = 256 * MIB
    """Bytes that one rank stages at most for one generation, apart from a single layer that needs
    more. This is staging memory that a worker must have to spare."""

    max_wave_moves: int = 10_000
    """Experts that one rank stages at most for one generation, apart from a single layer that needs
    more. The bytes bound a wave; this is for those who count experts."""

    algorithm: Algorithm = Algorithm.INCREMENTAL
    """How replicas are placed. From what is there, so that a shift of traffic costs the few moves
    it needs and not a new placement of nearly everything."""

    locality: float = 0.25
    """For the algorithm `local`: 0 is hierarchical, 1 global. A quarter lets a fifth of the load
    leave its home node, which balances recorded loads of a 256-expert model to 0.97 and more."""

    weighted: Weighting = Weighting.OFF
    """Whether replicas may serve unequal shares. Worth most where few slots are redundant, and it
    lets a pool follow its traffic without copying; but only workers that know shares honour them,
    and layouts with shares go into no other engine's files."""

    target_balancedness: float = 0.98
    """For the algorithm `incremental`: the balancedness at which moving stops. The last two
    hundredths would cost most of the moves. 1: move whatever gains more than noise."""

    plan_below: float = 1.0
    """Balancedness of the latest window from which on nothing moves. Below `target_balancedness`
    it is a hysteresis: a pool then drifts from one to the other before it moves again. 1: none."""

    risk_z: float = 0.0
    """Standard deviations of each expert's load over windows that plans add to its mean. 0: plan
    for the mean; 1 gives room to experts whose load comes and goes."""

    bandwidth_bytes_per_s: float = 1e9
    """Bytes that one rank pulls in a second beside serving: 8 Gbit/s, a share of a network card."""

    pull_slowdown: float = 0.1
    """Part of a pool's throughput that is lost while ranks pull experts."""

    switch_stall_s: float = 0.02
    """Seconds for which steps stand still at each switch to a generation."""

    payback_s: float = 600.0
    """Seconds in which a plan must earn back what it costs: loads change in minutes, and what is
    not earned by then never is."""

    plan_timeout_s: float = 60.0
    """Seconds a plan may take before it is given up; its window is long over by then."""

    rollback_tolerance: float = 0.05
    """Balancedness by which a rollout may miss its promise, and by which the layout before may have
    been better, until it is rolled back. More than windows differ by chance."""

    rollback_windows: int = 2
    """Windows with enough assignments that a rollout is judged by, so that one odd one is
    outweighed."""

    rollback_cooldown_s: float = 600.0
    """Seconds after a rollback in which no other plan is tried, unless traffic shifts."""

    slow_worker_factor: float = 2.0
    """A worker is slow that computes at least this many times longer for a step than the median
    rank, what its load explains taken off. Below 1.5 ordinary noise looks slow."""

    slow_worker_windows: int = 3
    """Windows in a row in which a worker must be slow before anything is done about it."""

    slow_worker_action: SlowWorkerAction = SlowWorkerAction.REPORT
    """What is done about a slow worker: `report`, or `exclude` if the others have slots enough."""

    slow_worker_probation_s: float = 300.0
    """Seconds after which an excluded worker that is still connected is taken in again."""

    store_down: StoreDown = StoreDown.PAUSE
    """What goes on while the store takes no writes: `pause`, or `memory`. Nothing is switched
    without it in either case."""

    stage_timeout_s: float = 30.0
    """Seconds until a generation that is not staged by all ranks is aborted. Pulling
    `max_wave_bytes` takes a few seconds on a slow network."""

    switch_timeout_s: float = 30.0
    """Seconds until a staged generation that nobody switched to is aborted. Ranks switch at the
    next step, so this is a bound for a pool that hangs, not an expectation."""

    silent_after_s: float = 5.0
    """Seconds without a word after which a worker counts as lost: five missed heartbeats."""

    reform_timeout_s: float = 5.0
    """Seconds for which ranks are waited for that do not say whether their group is over, when
    others say so; then ranks are dealt without them."""

    meet_timeout_s: float = 60.0
    """Seconds in which the ranks of a new epoch must have loaded their experts and met."""

    start_timeout_s: float = 60.0
    """Seconds for which a pool waits for all its workers when it starts; then those who came begin,
    if their slots suffice."""

    join_settle_s: float = 0.5
    """Seconds without another newcomer before the ranks stop to take newcomers in, so that several
    who come together cost one pause."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidPolicyError(f"{name} must be from {low:g} to {high:g}, not {value}")
        if not isinstance(self.pause, bool):
            raise InvalidPolicyError(f"pause must be true or false, not {self.pause!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, choices(value))
            except ValueError:
                raise InvalidPolicyError(
                    f"{name} must be one of {', '.join(choices)}, not {value!r}"
                ) from None
        if self.fast_half_life_s >= self.slow_half_life_s:
            raise InvalidPolicyError(
                f"fast_half_life_s must be below slow_half_life_s ({self.slow_half_life_s:g}), "
                f"not {self.fast_half_life_s:g}"
            )
        if self.silent_after_s <= self.heartbeat_interval_s:
            raise InvalidPolicyError(
                f"silent_after_s must be above heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), not {self.silent_after_s:g}"
            )

    def wave_bytes(self, expert_bytes: int) -> int:
        """Bytes that one rank stages at most for one generation, by both budgets."""
        return min(self.max_wave_bytes, self.max_wave_moves * expert_bytes)


_HOUR_S = 3600.0
RANGES: dict[str, tuple[float, float]] = {
    "interval_s": (0.05, 24 * _HOUR_S),
    "report_interval_s": (0.01, _HOUR_S),
    "heartbeat_interval_s": (0.01, _HOUR_S),
    "slow_half_life_s": (0.01, 24 * _HOUR_S),
    "fast_half_life_s": (0.001, _HOUR_S),
    "shift_threshold": (0.0, 1.0),
    "min_assignments": (0.0, 1e15),
    "min_gain": (0.0, 1.0),
    "cooldown_s": (0.0, 24 * _HOUR_S),
    "max_wave_bytes": (1, 2**50),
    "max_wave_moves": (1, 10**9),
    "locality": (0.0, 1.0),
    "target_balancedness": (0.01, 1.0),
    "plan_below": (0.01, 1.0),
    "risk_z": (0.0, 10.0),
    "bandwidth_bytes_per_s": (1.0, 1e15),
    "pull_slowdown": (0.0, 1.0),
    "switch_stall_s": (0.0, _HOUR_S),
    "payback_s": (0.0, 24 * _HOUR_S),
    "plan_timeout_s": (0.05, _HOUR_S),
    "rollback_tolerance": (0.0, 1.0),
    "rollback_windows": (1, 100),
    "rollback_cooldown_s": (0.0, 24 * _HOUR_S),
    "slow_worker_factor": (1.0, 1000.0),
    "slow_worker_windows": (1, 100),
    "slow_worker_probation_s": (0.0, 24 * _HOUR_S),
    "stage_timeout_s": (0.01, _HOUR_S),
    "switch_timeout_s": (0.01, _HOUR_S),
    "silent_after_s": (0.02, _HOUR_S),
    "reform_timeout_s": (0.01, _HOUR_S),
    "meet_timeout_s": (0.1, _HOUR_S),
    "start_timeout_s": (0.0, _HOUR_S),
    "join_settle_s": (0.0, _HOUR_S),
}
"""Least and greatest value of every number."""

_CHOICES: dict[str, type[StrEnum]] = {
    "algorithm": Algorithm,
    "weighted": Weighting,
    "slow_worker_action": SlowWorkerAction,
    "store_down": StoreDown,
}
assert RANGES.keys() | _CHOICES.keys() | {"pause"} == {field.name for field in fields(Policy)}
