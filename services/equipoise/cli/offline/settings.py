"""Settings of the commands that work with files: plan, replay, whatif and convert."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from equipoise.cli.offline.money import CostSettings
from equipoise.cli.options import REPEATED
from equipoise.formats.format import Format
from equipoise.planning.policy import Algorithm
from equipoise.planning.units import (
    EXPERTS_PER_TOKEN,
    NUM_GROUPS,
    RANKS_PER_NODE,
    UNITS,
    Unit,
    UnitName,
)
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import DAY_S, Range, check_ranges

_IMAGES = {".png", ".svg"}
_RANKS_TO_TRY = ("8", "16", "32", "64")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Recorded loads, and the model they were recorded from.

    Raises:
        InvalidSettingsError: a value is out of range, no file is named, or options contradict each
            other.
    """

    loads: tuple[str, ...]
    """Recorded loads, comma-separated: files of SGLang's recorder (.pt, .json), a folder of
    TensorRT-LLM statistics, DeepSeek EPLB loads (.npz), or Equipoise's loads.json."""

    loads_format: Format | None = None
    """Format of the loads. Default: detected from their content."""

    windows: tuple[str, ...] = ()
    """Names of the windows to use. "code" selects "code/0", "code/1" and so on. Default: all."""

    model_config: Path | None = None
    """The model's config.json, which provides the expert groups, the first MoE layer and the size
    of an expert."""

    groups: Annotated[int | None, Range(1)] = None
    """Number of expert groups of the router, 8 for DeepSeek-V3. Default: the config's, or 1."""

    shared_expert: bool = False
    """Plan the shared expert as one more routed expert, numbered last, that every token activates.
    It is assumed to be as large as a routed expert."""

    experts_per_token: Annotated[int | None, Range(1)] = None
    """Number of routed experts per token, 8 for DeepSeek-V3. Needed with --shared-expert, and by
    whatif --tokens-per-rank, unless the loads or the config contain it."""

    first_moe_layer: Annotated[int | None, Range(0)] = None
    """Index of the model's first MoE layer, 3 for DeepSeek-V3. Needed to read or write formats that
    number dense layers too."""

    expert_bytes: Annotated[int | None, Range(1)] = None
    """Bytes of one expert in one layer. Default: the config's, or DeepSeek-V3's in FP8."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.loads:
            raise InvalidSettingsError("--loads: name at least one file")
        if self.shared_expert and (self.groups or 1) > 1:
            raise InvalidSettingsError(
                "--shared-expert cannot be combined with --groups: the shared expert has no group"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """A pool's ranks, slots and current layout.

    Raises:
        InvalidSettingsError: a value is out of range.
    """

    current: Path | None = None
    """File of the current layout, from which moves are counted. Default: experts in order, the
    layout that a new pool starts with."""

    current_format: Format | None = None
    """Format of the current layout. Default: detected from its content."""

    nodes: Annotated[int, Range(1)] = 1
    """Number of nodes, with the same number of ranks each."""

    ranks: Annotated[int | None, Range(1)] = None
    """Number of expert-parallel ranks, one per GPU. Required without --unit."""

    slots: Annotated[int | None, Range(1)] = None
    """Physical slots per layer over all ranks, on each rank at most one per expert. Default: the
    fewest that hold all experts."""

    places: tuple[str, ...] = ()
    """Experts that each rank has room for over all layers (workers' --places), or a list if ranks
    have unequal memory: 116x16,100x16 is 16 ranks with 116 and 16 with 100. Layers then share them:
    each gets as many slots as shorten the step most, on each rank at most --slots / --ranks.
    `replay` does so unless a policy has slots=perLayer."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _source_of(unit: Unit, source: RecordingSettings) -> RecordingSettings:
    """The loads as a unit plans them: the model is DeepSeek-V3 unless the options say more."""
    if unit.routes_shared_expert:
        top_k = source.experts_per_token or EXPERTS_PER_TOKEN
        return replace(source, shared_expert=True, experts_per_token=top_k)
    if source.groups is None and source.model_config is None and not source.shared_expert:
        return replace(source, groups=NUM_GROUPS)
    return source


def _pool_of(name: UnitName, pool: PoolSettings) -> PoolSettings:
    """The pool of a unit.

    Raises:
        InvalidSettingsError: other options describe the pool too.
    """
    if pool.ranks is not None or pool.nodes != 1 or pool.slots is not None:
        raise InvalidSettingsError(
            f"--unit {name} has its own --ranks, --nodes and --slots: leave them out"
        )
    unit = UNITS[name]
    return replace(pool, ranks=unit.num_ranks, nodes=unit.num_nodes, slots=unit.num_slots)


def _own_policy(name: UnitName) -> str:
    """The policy of a unit, as --policy takes it."""
    unit = UNITS[name]
    return f"{name}=algorithm={unit.algorithm},interval={unit.interval_s:g}"


def _check_ranks_given(unit: UnitName | None, pool: PoolSettings) -> None:
    if unit is None and pool.ranks is None:
        raise InvalidSettingsError(
            "--ranks is missing: give the number of expert-parallel ranks, or name a --unit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """`equipoise plan`.

    Raises:
        InvalidSettingsError: a value is out of range, or options contradict each other.
    """

    source: RecordingSettings
    """The loads."""

    pool: PoolSettings
    """The ranks."""

    unit: UnitName | None = None
    """Deployment unit of DeepSeek-V3 to plan for, instead of --ranks, --nodes and --slots. It
    also sets --algorithm, or for an incremental plan --locality 0 if the unit is hierarchical, and
    --shared-expert where the unit routes the shared expert."""

    algorithm: Algorithm = Algorithm.AUTO
    """Planning algorithm. auto is incremental from a current layout, which is as balanced by fewer
    moves; else it plans hierarchically and globally and keeps the more balanced plan."""

    locality: Annotated[float | None, Range(0, 1)] = None
    """How freely slots may host experts of other nodes. 0 is hierarchical: each expert group stays
    on one node. 1 is global. Between them, most load stays on its group's node. With --current, the
    plan is incremental, and layers that exceed it are brought back."""

    max_moves: Annotated[int | None, Range(0)] = None
    """Maximum number of slots that may change. The plan picks the moves that gain most. Moves that
    restore lost experts, or with --locality return groups to their nodes, are made in any case, and
    count."""

    target_balancedness: Annotated[float | None, Range(0, 1, is_open=True)] = None
    """Stop at this balancedness, with the fewest moves."""

    weighted: bool = False
    """Let an expert's replicas serve unequal shares of its load. Only Equipoise's own format and
    workers support shares."""

    shared_ranks: Annotated[int | None, Range(1)] = None
    """Number of ranks, the last ones, that hold only the shared expert. Needs --shared-expert and
    one slot per rank. Default: the plan chooses the shared expert's replicas."""

    slots_of_rank: tuple[str, ...] = ()
    """Slots of each rank, instead of --slots, if ranks have unequal memory: 9x16,10x16 is 16 ranks
    with 9 slots and 16 with 10. No engine's format supports such a layout, so it is not written."""

    exclude_ranks: tuple[str, ...] = ()
    """Ranks to plan without because they are lost or leaving, such as 3,7 or 8-15."""

    out: Path | None = None
    """File to write the layout to."""

    format: Format = Format.EQUIPOISE
    """Format of the file."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_ranks_given(self.unit, self.pool)
        if self.unit is not None:
            object.__setattr__(self, "pool", _pool_of(self.unit, self.pool))
            object.__setattr__(self, "source", _source_of(UNITS[self.unit], self.source))
        if self.algorithm is Algorithm.AUTO:
            self._choose_algorithm()
        is_limited = self._is_limited
        self._check_ranks(is_limited=is_limited)
        if self.max_moves is not None and self.target_balancedness is not None:
            raise InvalidSettingsError("--max-moves and --target-balancedness cannot be combined")
        with_locality = {Algorithm.AUTO, Algorithm.LOCAL, Algorithm.INCREMENTAL}
        if self.locality is not None and self.algorithm not in with_locality:
            raise InvalidSettingsError(
                "--locality works with --algorithm local and incremental only"
            )
        if self.weighted and self.out is not None and self.format is not Format.EQUIPOISE:
            raise InvalidSettingsError(
                f"--weighted works with --format {Format.EQUIPOISE} only: {self.format} cannot "
                "represent shares"
            )
        if self.pool.places:
            self._check_places()
        if is_limited and self.algorithm not in {Algorithm.AUTO, Algorithm.INCREMENTAL}:
            raise InvalidSettingsError(
                f"--algorithm {self.algorithm} plans from scratch: --max-moves and "
                "--target-balancedness work with incremental plans only"
            )

    def _choose_algorithm(self) -> None:
        """Replace `auto` where the other options or the unit determine the algorithm."""
        unit = None if self.unit is None else UNITS[self.unit]
        has_current = self.pool.current is not None and self.shared_ranks is None
        if has_current or self._is_limited:
            object.__setattr__(self, "algorithm", Algorithm.INCREMENTAL)
            is_hierarchical = unit is not None and unit.algorithm is Algorithm.HIERARCHICAL
            if is_hierarchical and self.locality is None:
                object.__setattr__(self, "locality", 0.0)
        elif self.locality is not None:
            object.__setattr__(self, "algorithm", Algorithm.LOCAL)
        elif unit is not None:
            object.__setattr__(self, "algorithm", unit.algorithm)

    def _check_places(self) -> None:
        """Check that no option contradicts shared places."""
        if self.out is not None and self.format is not Format.EQUIPOISE:
            raise InvalidSettingsError(
                f"--places works with --format {Format.EQUIPOISE} only: {self.format} cannot "
                "represent layers with different numbers of slots"
            )
        if self.slots_of_rank or self.shared_ranks is not None:
            raise InvalidSettingsError(
                "--places cannot be combined with --slots-of-rank or --shared-ranks"
            )

    @property
    def _is_limited(self) -> bool:
        """Whether the plan may stop before it is as balanced as possible."""
        return self.max_moves is not None or self.target_balancedness is not None

    def _check_ranks(self, *, is_limited: bool) -> None:
        """Check the options about single ranks and their slots."""
        conflicting = (self.pool.slots, self.pool.current, self.out)
        if self.slots_of_rank and any(one is not None for one in conflicting):
            raise InvalidSettingsError(
                "--slots-of-rank cannot be combined with --slots, --current or --out"
            )
        if self.shared_ranks is not None:
            if not self.source.shared_expert:
                raise InvalidSettingsError("--shared-ranks needs --shared-expert")
            if is_limited or self.locality is not None or self.weighted:
                raise InvalidSettingsError(
                    "--shared-ranks cannot be combined with --max-moves, --target-balancedness, "
                    "--locality or --weighted"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """`equipoise replay`.

    Raises:
        InvalidSettingsError: a value is out of range, or the plot is not an image.
    """

    source: RecordingSettings
    """The loads: the windows of all files, in order."""

    pool: PoolSettings
    """The ranks."""

    unit: UnitName | None = None
    """Deployment unit of DeepSeek-V3 to plan for, instead of --ranks, --nodes and --slots.
    Without --policy, the unit's own algorithm and interval are replayed."""

    policy: tuple[str, ...] = field(default=(), metadata={REPEATED: True})
    """Policy to compare, repeatable: NAME=interval=20,min_gain=0.05 (options of the balancer; the
    rest keep their defaults), a BalancePolicy .yaml, a .toml or .json file of options, or
    `default`. Default: `default`, and with --places also perLayer=slots=perLayer."""

    window_s: Annotated[float, Range(0.001, DAY_S)] = 10.0
    """Length of each window in seconds, which recordings do not contain."""

    cost: CostSettings = field(default_factory=CostSettings)
    """What imbalance costs."""

    reasons: bool = False
    """Print the reason of every verdict."""

    plot: Path | None = None
    """Image of balance and moves to write, .svg or .png."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_ranks_given(self.unit, self.pool)
        if self.unit is not None:
            object.__setattr__(self, "pool", _pool_of(self.unit, self.pool))
            object.__setattr__(self, "source", _source_of(UNITS[self.unit], self.source))
            object.__setattr__(self, "policy", self.policy or (_own_policy(self.unit),))
        if self.pool.places:
            object.__setattr__(
                self, "policy", self.policy or ("default", "perLayer=slots=perLayer")
            )
        if self.plot is not None and self.plot.suffix not in _IMAGES:
            raise InvalidSettingsError(f"--plot must end in .svg or .png, not {str(self.plot)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """`equipoise whatif`.

    Raises:
        InvalidSettingsError: a value is out of range, or options contradict each other.
    """

    source: RecordingSettings
    """The loads."""

    unit: UnitName | None = None
    """Deployment unit of DeepSeek-V3 to plan for, with up to as many redundant slots as it
    has, instead of --ranks, --ranks-per-node and --max-redundant."""

    ranks: tuple[str, ...] = _RANKS_TO_TRY
    """Numbers of expert-parallel ranks (GPUs) to try."""

    ranks_per_node: Annotated[int, Range(1)] = RANKS_PER_NODE
    """GPUs per node. A number of ranks that it does not divide counts as one node."""

    max_redundant: Annotated[int | None, Range(0)] = None
    """Maximum number of redundant slots per layer to try. Default: a quarter of the experts."""

    pooled: bool = False
    """Let layers share the places of a rank (workers with --places), so that any number of
    redundant slots can be tried, not only one more for each rank and layer."""

    algorithm: Algorithm = Algorithm.AUTO
    """Planning algorithm."""

    policy: str | None = None
    """Policy to replay, in the form that `equipoise replay` takes. Default: the unit's own
    algorithm and interval, or `default`."""

    window_s: Annotated[float, Range(0.001, DAY_S)] = 10.0
    """Length of each window in seconds, which recordings do not contain."""

    tolerance: Annotated[float, Range(0, 1)] = 0.01
    """Balancedness to trade for less memory: pools this close to the best count as equal."""

    memory_gib: Annotated[float | None, Range(0, is_open=True)] = None
    """GiB available for experts on a GPU. Default: unlimited."""

    token_bytes: Annotated[int | None, Range(1)] = None
    """Bytes that a token takes in a GPU's cache, over all layers, to show how much context
    redundant slots displace. Default: the config's in bfloat16, or DeepSeek-V3's."""

    tokens_per_rank: tuple[str, ...] = ()
    """Tokens of a rank in a step. For each number, draw steps from the loads and show what workers
    gain by --replica-choice balanced, which chooses replicas by what all ranks route in a step."""

    assignment_us: Annotated[float | None, Range(0, 1e9, is_open=True)] = None
    """Microseconds per assignment on the busiest rank, as `equipoise status` shows, to convert the
    assignments that balanced steps save."""

    exchange_us: Annotated[float | None, Range(0, 1e9, is_open=True)] = None
    """Microseconds that the choice takes in a layer: an exchange of one number per expert between
    the ranks, and the division. Balanced steps pay if they save more."""

    cost: CostSettings = field(default_factory=CostSettings)
    """What imbalance costs."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.tokens_per_rank and (self.assignment_us or self.exchange_us):
            raise InvalidSettingsError(
                "--assignment-us and --exchange-us are about steps: add --tokens-per-rank"
            )
        if self.unit is not None:
            unit = UNITS[self.unit]
            is_default = self.ranks == _RANKS_TO_TRY and self.ranks_per_node == RANKS_PER_NODE
            if not is_default or self.max_redundant is not None:
                raise InvalidSettingsError(
                    f"--unit {self.unit} has its own --ranks, --ranks-per-node and "
                    "--max-redundant: leave them out"
                )
            object.__setattr__(self, "policy", self.policy or _own_policy(self.unit))
            object.__setattr__(self, "source", _source_of(unit, self.source))
            object.__setattr__(self, "ranks", (str(unit.num_ranks),))
            object.__setattr__(self, "ranks_per_node", RANKS_PER_NODE)
            object.__setattr__(self, "max_redundant", unit.num_redundant)
            if self.algorithm is Algorithm.AUTO:
                object.__setattr__(self, "algorithm", unit.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """`equipoise convert`.

    Raises:
        InvalidSettingsError: a value is out of range.
    """

    file: Path
    """File of loads or of a layout to read."""

    file_format: Format | None = None
    """Format of the file. Default: detected from its content."""

    out: Path
    """File to write. SGLang loads need .pt or .json, TensorRT-LLM loads a new folder."""

    format: Format = Format.EQUIPOISE
    """Format to write."""

    first_moe_layer: Annotated[int | None, Range(0)] = None
    """Index of the model's first MoE layer, 3 for DeepSeek-V3. Needed if only one of the formats
    numbers dense layers."""

    experts: Annotated[int | None, Range(1)] = None
    """Number of logical experts per layer to expect."""

    ranks: Annotated[int | None, Range(1)] = None
    """Number of ranks of a layout, if the file does not contain it."""

    top_k: Annotated[int | None, Range(1)] = None
    """Number of experts per token, for TensorRT-LLM, if the recording does not contain it."""

    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
