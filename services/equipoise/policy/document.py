"""`BalancePolicy`: the form of a policy file. Which value is which of `Policy` stands beside it.

The strings below the fields are what `docs/policy.md` and editors show.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from equipoise.planning.policy import Algorithm, SlowWorkerAction, StoreDown, Weighting
from equipoise.policy.setting import (
    DEFAULTS,
    Setting,
    choice,
    count,
    number,
    quantity,
    seconds,
    switch,
)

API_VERSION = "equipoise.dev/v1alpha1"
KIND = "BalancePolicy"

PoolName = Annotated[str, Field(min_length=1, max_length=253)]


class Section(BaseModel):
    """Some fields of a policy; unknown ones are faults, and what is not named has its default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, use_attribute_docstrings=True
    )

    def given(self) -> dict[str, Any]:
        """Values of `Policy` by name that somebody wrote, without defaults."""
        found: dict[str, Any] = {}
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, Section):
                found |= value.given()
            else:
                found[setting_of(type(self), name).name] = value
        return found


class Averages(Section):
    """What the pool remembers of its loads, and when it believes that they changed."""

    slow_half_life: Annotated[float, seconds("slow_half_life_s")] = DEFAULTS.slow_half_life_s
    """Age at which load weighs half in the average that plans rest on. Longer where load is
    steady and noisy, shorter where it changes within minutes."""

    fast_half_life: Annotated[float, seconds("fast_half_life_s")] = DEFAULTS.fast_half_life_s
    """The same for the average that notices a shift; below `slowHalfLife`."""

    shift_threshold: Annotated[float, number("shift_threshold", "share")] = DEFAULTS.shift_threshold
    """Share of the load that must go to other experts, beyond chance, to count as a shift:
    then averages start anew and no cooldown holds. Higher if shifts are seen where there
    are none."""


class Planning(Section):
    """How a layout is made."""

    algorithm: Annotated[Algorithm, choice("algorithm", Algorithm)] = DEFAULTS.algorithm
    """`incremental` moves what gains most from where it is; `hierarchical` keeps expert groups on
    one node, `global` spreads any expert anywhere, `local` stands between them by `locality`,
    `auto` keeps the better of hierarchical and global. Change it for group-limited routing between
    slow-linked nodes."""

    locality: Annotated[float, number("locality", "0 to 1")] = DEFAULTS.locality
    """For `local`: 0 is hierarchical, 1 global. Higher where balance matters more than traffic
    between nodes."""

    target_balancedness: Annotated[float, number("target_balancedness", "balancedness")] = (
        DEFAULTS.target_balancedness
    )
    """For `incremental`: the balancedness at which moving stops. Lower to move less."""

    plan_below: Annotated[float, number("plan_below", "balancedness")] = DEFAULTS.plan_below
    """Nothing moves while the latest window is at least so balanced. Below `targetBalancedness` it
    is a hysteresis."""

    weighted: Annotated[Weighting, choice("weighted", Weighting)] = DEFAULTS.weighted
    """Whether replicas of an expert may take uneven shares of its load: `on`, `off`, or `auto`,
    where that is more balanced. Not for engines that split evenly."""

    risk_z: Annotated[float, number("risk_z", "standard deviations")] = DEFAULTS.risk_z
    """Standard deviations of each expert's load that plans add to its mean. 1 or 2 where a few
    experts come and go and the worst moments count; it costs some balance in the mean."""


class Judging(Section):
    """What a plan must be worth, and what it is taken to cost."""

    min_assignments: Annotated[float, number("min_assignments", "assignments")] = (
        DEFAULTS.min_assignments
    )
    """Expert assignments per layer that a window needs before anything is decided on it. Some
    dozens per expert, or noise is followed."""

    min_gain: Annotated[float, number("min_gain", "balancedness")] = DEFAULTS.min_gain
    """Balancedness that a plan must gain on the latest window. Higher to move less often."""

    cooldown: Annotated[float, seconds("cooldown_s")] = DEFAULTS.cooldown_s
    """Time after a switch in which nothing is planned, unless traffic shifted."""

    payback: Annotated[float, seconds("payback_s")] = DEFAULTS.payback_s
    """Time in which a plan must earn back what it costs. Shorter where loads change quickly."""

    bandwidth: Annotated[float, quantity("bandwidth_bytes_per_s")] = DEFAULTS.bandwidth_bytes_per_s
    """Bytes that one rank can pull in a second beside serving: that of your network."""

    pull_slowdown: Annotated[float, number("pull_slowdown", "share")] = DEFAULTS.pull_slowdown
    """Share of the throughput that is lost while ranks pull experts, as you measured it."""

    switch_stall: Annotated[float, seconds("switch_stall_s")] = DEFAULTS.switch_stall_s
    """How long steps stand still at a switch, as status shows it."""


class Waves(Section):
    """How much of a plan comes at once."""

    max_bytes: Annotated[int, quantity("max_wave_bytes")] = DEFAULTS.max_wave_bytes
    """Bytes that one rank stages at most for one generation: memory that workers must spare. A
    layer that needs more is staged all the same."""

    max_moves: Annotated[int, count("max_wave_moves", "experts")] = DEFAULTS.max_wave_moves
    """Experts that one rank stages at most for one generation. Lower for shorter switches."""


class Rollback(Section):
    """When a rollout that fell short of its promise is taken back."""

    tolerance: Annotated[float, number("rollback_tolerance", "balancedness")] = (
        DEFAULTS.rollback_tolerance
    )
    """Balancedness by which a rollout may miss its promise, and by which the layout before may
    have been better on the same windows. Higher where windows differ much; 1 never goes back."""

    windows: Annotated[int, count("rollback_windows", "windows")] = DEFAULTS.rollback_windows
    """Windows with enough assignments that a rollout is judged by. More for noisy traffic."""

    cooldown: Annotated[float, seconds("rollback_cooldown_s")] = DEFAULTS.rollback_cooldown_s
    """Time after a rollback in which no other plan is tried, unless traffic shifts."""


class SlowWorker(Section):
    """What counts as a worker that is slow by itself, and what is done about it."""

    factor: Annotated[float, number("slow_worker_factor", "times")] = DEFAULTS.slow_worker_factor
    """Times the median rank's computing time for a step, what its load explains taken off. Lower
    to notice less, from 1.5 on where steps are even."""

    windows: Annotated[int, count("slow_worker_windows", "windows")] = DEFAULTS.slow_worker_windows
    """Windows in a row in which a worker must be slow."""

    action: Annotated[SlowWorkerAction, choice("slow_worker_action", SlowWorkerAction)] = (
        DEFAULTS.slow_worker_action
    )
    """`report` tells it; `exclude` goes on without it, if the others have slots for all experts."""

    probation: Annotated[float, seconds("slow_worker_probation_s")] = (
        DEFAULTS.slow_worker_probation_s
    )
    """Time after which an excluded worker that is still connected is taken in again."""


class Timeouts(Section):
    """The bound of every wait; status says which were reached and what came of it."""

    plan: Annotated[float, seconds("plan_timeout_s")] = DEFAULTS.plan_timeout_s
    """A plan that takes longer is given up; the next window tries again."""

    stage: Annotated[float, seconds("stage_timeout_s")] = DEFAULTS.stage_timeout_s
    """A generation that not all ranks staged by then is aborted. Longer for slow networks."""

    switch: Annotated[float, seconds("switch_timeout_s")] = DEFAULTS.switch_timeout_s
    """A staged generation that nobody switched to by then is aborted."""

    report: Annotated[float, seconds("silent_after_s")] = DEFAULTS.silent_after_s
    """A worker that said nothing for so long counts as lost; above `heartbeatInterval`."""

    reform: Annotated[float, seconds("reform_timeout_s")] = DEFAULTS.reform_timeout_s
    """Ranks that do not say whether their group is over are waited for so long."""

    meet: Annotated[float, seconds("meet_timeout_s")] = DEFAULTS.meet_timeout_s
    """The ranks of a new epoch must have loaded their experts and met by then."""

    start: Annotated[float, seconds("start_timeout_s")] = DEFAULTS.start_timeout_s
    """A starting pool waits so long for all its workers, then those who came begin."""

    join_settle: Annotated[float, seconds("join_settle_s")] = DEFAULTS.join_settle_s
    """Time without another newcomer before newcomers are taken in."""


class PoolPolicy(Section):
    """Everything that can be chosen for a pool."""

    pause: Annotated[bool, switch("pause")] = DEFAULTS.pause
    """Nothing is moved while this is true; loads are measured on. For maintenance."""

    interval: Annotated[float, seconds("interval_s")] = DEFAULTS.interval_s
    """Time between decisions. Shorter to follow traffic sooner, longer for windows with more
    assignments."""

    report_interval: Annotated[float, seconds("report_interval_s")] = DEFAULTS.report_interval_s
    """Time between a worker's load reports; told to workers with their next rank."""

    heartbeat_interval: Annotated[float, seconds("heartbeat_interval_s")] = (
        DEFAULTS.heartbeat_interval_s
    )
    """Time between a worker's signs of life; told to workers with their next rank."""

    averages: Averages = Averages()
    planning: Planning = Planning()
    judging: Judging = Judging()
    waves: Waves = Waves()
    rollback: Rollback = Rollback()
    slow_worker: SlowWorker = SlowWorker()
    store_down: Annotated[StoreDown, choice("store_down", StoreDown)] = DEFAULTS.store_down
    """What goes on while the store takes no writes: `pause` plans nothing; `memory` makes and
    judges plans and keeps the verdicts to be written later. Nothing is switched in either case."""

    timeouts: Timeouts = Timeouts()


class BalancePolicy(Section):
    """How loads become layouts: for all pools, and for each what differs."""

    api_version: Literal["equipoise.dev/v1alpha1"]
    """Which form this file has."""

    kind: Literal["BalancePolicy"]
    """What this file is."""

    defaults: PoolPolicy = PoolPolicy()
    """What holds for every pool that says nothing else."""

    pools: dict[PoolName, PoolPolicy] = Field(default_factory=dict)
    """What differs from the defaults, field by field, by the pool's name."""


def setting_of(section: type[Section], name: str) -> Setting:
    """How a field of a section is read and written."""
    found = [one for one in section.model_fields[name].metadata if isinstance(one, Setting)]
    assert len(found) == 1, f"{section.__name__}.{name} is either a section or a setting"
    return found[0]


def settings(section: type[Section] = PoolPolicy, *path: str) -> Iterator[tuple[str, Setting, str]]:
    """Every setting below a section in order: its path with dots, itself, its explanation."""
    for name, info in section.model_fields.items():
        below = (*path, info.alias or name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from settings(info.annotation, *below)
        else:
            yield ".".join(below), setting_of(section, name), info.description or ""
