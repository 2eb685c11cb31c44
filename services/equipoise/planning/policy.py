"""`Policy`: the values by which loads become layouts. Decides nothing.

Each value is declared once, here. Its range and its key in a policy file are part of its
annotation; the string below it explains it, on the command line, in the docs and to editors.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, get_type_hints

from equipoise.planning.errors import InvalidPolicyError
from equipoise.settings.fields import DAY_S, HOUR_S, Range, check_ranges

MIB = 1024 * 1024


class SlowWorkerAction(StrEnum):
    """What to do about a worker that is slow by itself."""

    REPORT = "report"
    """Show it in status, metrics and the log."""

    EXCLUDE = "exclude"
    """Re-form the pool without it, and readmit it after a probation period."""


class StoreDown(StrEnum):
    """What to do while the store accepts no writes. Layouts are never switched without it."""

    PAUSE = "pause"
    """Plan nothing."""

    MEMORY = "memory"
    """Plan and judge, and keep verdicts in memory to be written later. Rollouts wait."""


class Algorithm(StrEnum):
    """How to place replicas."""

    AUTO = "auto"
    """Plan hierarchically and globally, and keep the more balanced plan."""

    HIERARCHICAL = "hierarchical"
    """Keep each expert group within a node, so that group-limited routing rarely leaves it."""

    GLOBAL = "global"
    """Place any expert on any rank."""

    LOCAL = "local"
    """Between hierarchical and global: most load stays on its group's home node."""

    INCREMENTAL = "incremental"
    """Start from the current placement and make the most useful moves."""


class Weighting(StrEnum):
    """Whether an expert's replicas may take unequal shares of its load."""

    OFF = "off"
    """Split evenly. A layer that has shares keeps them until it is better off without."""

    AUTO = "auto"
    """Use shares where they relieve a layer's busiest rank by more than loads fluctuate."""

    ON = "on"
    """Use shares wherever they relieve the busiest rank at all."""


class SlotUse(StrEnum):
    """How ranks whose layers share one pool of places divide it over layers."""

    PER_LAYER = "perLayer"
    """Equally many slots on each rank in every layer."""

    POOLED = "pooled"
    """As many in each layer and on each rank as shorten the step most."""


@dataclass(frozen=True, slots=True)
class Key:
    """A value's place in a policy file."""

    path: str
    """Key, preceded by its section and a dot if it is in one."""

    unit: str = ""
    """Unit of a plain number. Durations and bytes have theirs in the value's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often to plan for a pool, what a plan must gain, and the timeout of every wait.

    Raises:
        InvalidPolicyError: a value is out of range, or contradicts another one.
    """

    pause: Annotated[bool, Key("pause")] = False
    """Stop all moves, for maintenance. Loads are still measured, and decisions still recorded."""

    interval_s: Annotated[float, Range(0.05, DAY_S), Key("interval")] = 10.0
    """Time between decisions. Shorter follows traffic sooner; longer gives each window more
    assignments to judge by. A window also waits for a rank's first report until it is overdue."""

    report_interval_s: Annotated[float, Range(0.01, HOUR_S), Key("reportInterval")] = 1.0
    """Time between a worker's load reports; workers learn a new value with their next epoch. With
    ten reports per window, one late report hardly matters; after three missing ones the window is
    not planned on."""

    heartbeat_interval_s: Annotated[float, Range(0.01, HOUR_S), Key("heartbeatInterval")] = 1.0
    """Time between a worker's heartbeats; workers learn a new value with their next epoch."""

    slow_half_life_s: Annotated[float, Range(0.01, DAY_S), Key("averages.slowHalfLife")] = 60.0
    """Half-life of the load average that plans use. Longer for steady, noisy loads; shorter for
    loads that change within minutes. In time, not steps, so that it does not depend on traffic."""

    fast_half_life_s: Annotated[float, Range(0.001, HOUR_S), Key("averages.fastHalfLife")] = 5.0
    """Half-life of the load average that detects shifts of traffic; below the slow half-life."""

    shift_factor: Annotated[float, Range(1, 1000), Key("averages.shiftFactor", "times")] = 2.0
    """Distance between the fast and the slow average that counts as a shift, in multiples of what
    chance explains or, if that is more, of what is usual in the latest windows. The distance is the
    share of the load that has moved to other experts. A shift restarts the averages and ends
    cooldowns. A window that is as far from all known kinds of traffic is a new kind. Raise it if
    shifts are detected falsely."""

    algorithm: Annotated[Algorithm, Key("planning.algorithm")] = Algorithm.INCREMENTAL
    """How to place replicas. `incremental` makes the most useful moves from the current placement;
    `hierarchical` keeps expert groups on one node; `global` places any expert anywhere; `local`
    mixes the two by the locality; `auto` keeps the better of hierarchical and global. All but
    `incremental` place experts anew in layers that gain by it."""

    locality: Annotated[float, Range(0, 1), Key("planning.locality", "0 to 1")] = 1.0
    """For `incremental` and `local`: how much load may be served off the node of its expert group.
    At 1 any; at 0 none; at 0.25 a fifth at most with 4 nodes, and recorded loads of a 256-expert
    model reach a balancedness of 0.97. Lower it for group-limited routing over slow links between
    nodes. `local` needs a value below 1. Groups that do not divide evenly over nodes have none."""

    plan_below: Annotated[float, Range(0.01, 1), Key("planning.planBelow", "balancedness")] = 1.0
    """Plan only if the latest window's balancedness is below this. Lower it to leave layouts alone
    that serve well enough; 1 always plans."""

    weighted: Annotated[Weighting, Key("planning.weighted")] = Weighting.OFF
    """Whether an expert's replicas may take unequal shares of its load: `on`, `off`, or `auto`,
    only where that gains more than noise. Useful with few redundant slots, and needs no copying.
    Only workers that support shares apply them, and layouts with shares cannot be exported to other
    engines."""

    slots: Annotated[SlotUse, Key("planning.slots")] = SlotUse.POOLED
    """How to divide ranks' places over layers, for workers with `--places`: `pooled` gives layers
    and ranks as many slots as shorten the step most; `perLayer` gives each rank equally many in
    every layer, and is what pools use whose ranks have unequal slots."""

    risk_z: Annotated[float, Range(0, 10), Key("planning.riskZ", "standard deviations")] = 0.0
    """Standard deviations over windows to add to each expert's mean load when planning. 1 or 2
    leaves room for experts with bursty load, at some cost in mean balance."""

    min_assignments: Annotated[
        float, Range(0, 1e15), Key("judging.minAssignments", "assignments")
    ] = 2000.0
    """Assignments per layer that a window needs before anything is decided on it. Fewer than a
    few dozen per expert are mostly noise. 0 also plans as if loads were exact."""

    min_gain: Annotated[float, Range(0, 1), Key("judging.minGain", "balancedness")] = 0.003
    """Balancedness (mean / max rank load) that a plan must gain on the traffic to expect, besides
    paying for its moves; twice as much once no new kind of traffic has come for three windows.
    Raise it to move less often. A gain of 0.003 is the least that shows above noise."""

    min_throughput_gain: Annotated[
        float, Range(0, 1), Key("judging.minThroughputGain", "share of throughput")
    ] = 0.0
    """Gain in throughput that a plan must have on the traffic to expect, by measured step times:
    0.02 is 2 %. Until enough is measured, an upper bound of the gain is compared. It applies in
    addition to the minimum gain in balancedness (set that to 0 to decide by throughput alone), also
    to requested plans unless they are forced."""

    cooldown_s: Annotated[float, Range(0, DAY_S), Key("judging.cooldown")] = 0.0
    """Time after a switch in which nothing is planned, unless traffic shifts."""

    payback_s: Annotated[float, Range(0, DAY_S), Key("judging.payback")] = 600.0
    """The longest that layouts are taken to last. Each move must earn back its cost in the time
    that layouts last, as learned from the pool's own history, and a plan in half of it. Lower it to
    move less; 0 moves nothing that costs anything."""

    bandwidth_bytes_per_s: Annotated[float, Range(1, 1e15), Key("judging.bandwidth")] = 1e9
    """Bytes per second that one rank can pull while it serves. Set it to a share of your network's;
    the default is 8 Gbit/s."""

    pull_slowdown: Annotated[float, Range(0, 1), Key("judging.pullSlowdown", "share")] = 0.1
    """Share of a pool's throughput that is lost while ranks pull experts, as measured."""

    switch_stall_s: Annotated[float, Range(0, HOUR_S), Key("judging.switchStall")] = 0.02
    """Time that steps stall at each switch, as shown by `equipoise status`."""

    max_wave_bytes: Annotated[int, Range(1, 2**50), Key("waves.maxBytes")] = 256 * MIB
    """Maximum bytes that one rank stages per generation: staging memory that workers must spare. A
    single layer may exceed it."""

    max_wave_moves: Annotated[int, Range(1, 10**9), Key("waves.maxMoves", "experts")] = 10_000
    """Maximum experts that one rank stages per generation. Lower it for shorter switches. A single
    layer may exceed it."""

    rollback_tolerance: Annotated[float, Range(0, 1), Key("rollback.tolerance", "balancedness")] = (
        0.05
    )
    """Balancedness by which a rollout may miss its expected gain, and by which the previous layout
    may be better on the same windows, before it is rolled back. Raise it if windows differ by
    more; 1 never rolls back."""

    rollback_windows: Annotated[int, Range(1, 100), Key("rollback.windows", "windows")] = 2
    """Windows with enough assignments to judge a rollout by. Raise it for noisy traffic."""

    rollback_cooldown_s: Annotated[float, Range(0, DAY_S), Key("rollback.cooldown")] = 600.0
    """Time after a rollback in which nothing is planned, unless traffic shifts or the layout
    changes, for example because ranks join or leave."""

    slow_worker_factor: Annotated[float, Range(1, 1000), Key("slowWorker.factor", "times")] = 2.0
    """A worker is slow if its compute time per step, corrected for its load, is at least this many
    times the median rank's. Lower it to detect smaller differences; below 1.5, noise looks slow."""

    slow_worker_windows: Annotated[int, Range(1, 100), Key("slowWorker.windows", "windows")] = 3
    """Consecutive windows in which a worker must be slow."""

    slow_worker_action: Annotated[SlowWorkerAction, Key("slowWorker.action")] = (
        SlowWorkerAction.REPORT
    )
    """What to do about a slow worker: `report` it, or `exclude` it if the other ranks have enough
    slots for all experts."""

    slow_worker_probation_s: Annotated[float, Range(0, DAY_S), Key("slowWorker.probation")] = 300.0
    """Time after which an excluded worker that is still connected is readmitted."""

    store_down: Annotated[StoreDown, Key("storeDown")] = StoreDown.PAUSE
    """What to do while the store accepts no writes: `pause` plans nothing; `memory` plans and
    judges, and buffers verdicts until then. Neither switches layouts."""

    plan_timeout_s: Annotated[float, Range(0.05, HOUR_S), Key("timeouts.plan")] = 60.0
    """Time after which a plan is abandoned; the next window tries again."""

    stage_timeout_s: Annotated[float, Range(0.01, HOUR_S), Key("timeouts.stage")] = 30.0
    """Time after which a generation that not all ranks have staged is aborted. Raise it for slow
    networks: a wave of the maximum size takes a few seconds on 8 Gbit/s."""

    switch_timeout_s: Annotated[float, Range(0.01, HOUR_S), Key("timeouts.switch")] = 30.0
    """Time after which a staged generation is aborted if no rank has switched to it. Once a rank
    has, the others get as long to confirm it. Ranks switch at their next step, so only a hung pool
    reaches it."""

    report_timeout_s: Annotated[float, Range(0.02, HOUR_S), Key("timeouts.report")] = 5.0
    """Time without a message after which a worker counts as lost; above the heartbeat interval.
    The default is five missed heartbeats."""

    reform_timeout_s: Annotated[float, Range(0.01, HOUR_S), Key("timeouts.reform")] = 5.0
    """Time to wait, once some ranks have lost their group, for the others to report the same. After
    that the pool re-forms without those that did not."""

    meet_timeout_s: Annotated[float, Range(0.1, HOUR_S), Key("timeouts.meet")] = 60.0
    """Time that a rank of a new epoch, once it has its experts, waits for all others to connect.
    Raise it if some ranks load their experts much later than others."""

    join_timeout_s: Annotated[float, Range(1, HOUR_S), Key("timeouts.join")] = 600.0
    """Time from the start of an epoch within which each of its ranks must serve, including the time
    to load experts and to meet; at least that of `timeouts.meet`. After that the pool re-forms:
    without ranks that are late, or with all again if all are needed. Raise it if loading a worker's
    experts takes longer."""

    start_timeout_s: Annotated[float, Range(0, HOUR_S), Key("timeouts.start")] = 60.0
    """Time that a starting pool waits for all its workers. After that it starts with those that
    are connected, if they have enough slots."""

    join_settle_s: Annotated[float, Range(0, HOUR_S), Key("timeouts.joinSettle")] = 0.5
    """Time without another new worker before new workers are admitted, so that several that join
    together cause one interruption."""

    def __post_init__(self) -> None:
        check_ranges(self, InvalidPolicyError)
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
        if self.algorithm is Algorithm.LOCAL and self.locality == 1.0:
            raise InvalidPolicyError(
                "locality must be below 1 for the algorithm local, for example 0.25: at 1 experts "
                "may go anywhere, as the algorithm global places them"
            )
        if self.fast_half_life_s >= self.slow_half_life_s:
            raise InvalidPolicyError(
                f"fast_half_life_s must be below slow_half_life_s ({self.slow_half_life_s:g}), "
                f"not {self.fast_half_life_s:g}"
            )
        if self.report_timeout_s <= self.heartbeat_interval_s:
            raise InvalidPolicyError(
                f"report_timeout_s must be above heartbeat_interval_s "
                f"({self.heartbeat_interval_s:g}), not {self.report_timeout_s:g}"
            )
        if self.join_timeout_s < self.meet_timeout_s:
            raise InvalidPolicyError(
                f"join_timeout_s must be at least meet_timeout_s ({self.meet_timeout_s:g}), "
                f"not {self.join_timeout_s:g}"
            )

    def wave_bytes(self, expert_bytes: int) -> int:
        """Most bytes that one rank stages per generation, by both limits."""
        return min(self.max_wave_bytes, self.max_wave_moves * expert_bytes)


_CHOICES = {
    name: kind for name, kind in get_type_hints(Policy).items() if issubclass(kind, StrEnum)
}
