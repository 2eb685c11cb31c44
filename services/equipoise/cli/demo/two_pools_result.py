"""`TwoPoolsResult`: the figures of a demo of two pools, and the tables that end it. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from equipoise.planning.arrays import Load
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.layout import Layout

_NUM_BUSIEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyExpert:
    """One of the busiest experts of a pool's first MoE layer."""

    expert: int
    """Number of the expert."""
    share: float
    """Its share of the layer's load in this pool."""
    ranks: tuple[int, ...]
    """The ranks of this pool that hold it."""
    other_share: float
    """Its share in the other pool."""
    other_ranks: tuple[int, ...]
    """The ranks of the other pool that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolRecord:
    """What the balancer knows of a pool when the traffic ends."""

    pool: str
    """Name of the pool."""
    phase: str
    """What it serves."""
    rollouts: int
    """Rollouts completed."""
    load: Load
    """Average load, [layers, experts] in assignments per second."""
    layout: Layout
    """Committed layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """How a pool's layout suits its own load, compared with the other pool's layout."""

    pool: str
    """Name of the pool."""
    phase: str
    """What it serves."""
    generation: int
    """Generation of its layout."""
    rollouts: int
    """Rollouts completed."""
    balancedness: float
    """Balancedness of its load under its own layout."""
    balancedness_of_other: float
    """Balancedness of its load under the other pool's layout."""
    busiest: tuple[BusyExpert, ...]
    """Its busiest experts, busiest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPoolsResult:
    """The figures of a run."""

    pools: tuple[PoolFigures, ...]
    """The prefill pool, then the decode pool."""
    requests: int
    """Requests sent."""
    failures: tuple[str, ...]
    """Reason of each failed request."""
    tokens_compared: int
    """Tokens compared with the reference."""
    tokens_identical: int
    """Tokens equal to the reference."""
    handovers: int
    """Requests handed over from the prefill pool to a decode rank."""
    peak_memory_bytes: int
    """Peak resident memory of all processes."""
    wall_s: float
    """Duration of the demo."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the run failed, one sentence each; empty on success."""
        return tuple(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.failures:
            yield f"{len(self.failures)} requests failed; the first: {self.failures[0]}"
        if self.tokens_identical != self.tokens_compared:
            yield (
                f"{self.tokens_compared - self.tokens_identical} of {self.tokens_compared} tokens "
                "differ from the same requests in one process"
            )
        if not self.tokens_compared:
            yield "no token was compared: the traffic was too short"
        if not self.handovers:
            yield "no request was handed over from the prefill pool to the decode pool"
        for one in self.pools:
            if not one.rollouts:
                yield f"pool {one.pool} rolled out no layout of its own"
            elif one.balancedness <= one.balancedness_of_other:
                yield (
                    f"pool {one.pool} would be balanced as well by the other pool's layout: "
                    f"{one.balancedness:.3f} with its own, {one.balancedness_of_other:.3f} with "
                    "the other"
                )

    def to_json(self) -> dict[str, Any]:
        """The document for --json."""
        document = {**asdict(self), "faults": self.faults}
        plain: dict[str, Any] = json.loads(json.dumps(document))
        return plain


def figures_of(own: PoolRecord, other: PoolRecord) -> PoolFigures:
    """Compare a pool's layout with the other pool's, on its own load."""
    share, other_share = (_share(one.load[0]) for one in (own, other))
    return PoolFigures(
        pool=own.pool,
        phase=own.phase,
        generation=own.layout.generation,
        rollouts=own.rollouts,
        balancedness=balancedness(layout_loads(own.layout, own.load)),
        balancedness_of_other=balancedness(layout_loads(other.layout, own.load)),
        busiest=tuple(
            BusyExpert(
                expert=int(expert),
                share=float(share[expert]),
                ranks=_ranks_of(int(expert), own.layout),
                other_share=float(other_share[expert]),
                other_ranks=_ranks_of(int(expert), other.layout),
            )
            for expert in np.argsort(-share, kind="stable")[:_NUM_BUSIEST]
        ),
    )


def summary(result: TwoPoolsResult) -> RenderableType:
    """Tables of the pools' layouts and of their busiest experts, then the other figures."""
    layouts = _table("pool", "phase", "generation", "its layout", "the other pool's layout")
    experts = _table("pool", "busiest of the first layer", "load, ranks", "in the other pool")
    for one in result.pools:
        layouts.add_row(
            one.pool,
            one.phase,
            str(one.generation),
            f"{one.balancedness:.2f}",
            f"{one.balancedness_of_other:.2f}",
        )
        for busy in one.busiest:
            experts.add_row(
                one.pool,
                f"expert {busy.expert}",
                _placed(busy.share, busy.ranks),
                _placed(busy.other_share, busy.other_ranks),
            )
    return Group(
        Text("Balancedness of each pool's load"),
        layouts,
        Text("The layouts differ because the pools use different experts"),
        experts,
        Text(
            f"{result.handovers:,} of {result.requests:,} requests handed over, "
            f"{len(result.failures)} failed; {result.tokens_identical:,} of "
            f"{result.tokens_compared:,} tokens equal to the reference; "
            f"{result.peak_memory_bytes / 2**30:.2f} GiB at most; {result.wall_s:.0f} s"
        ),
    )


def _ranks_of(expert: int, layout: Layout) -> tuple[int, ...]:
    """The ranks that hold an expert of the first layer."""
    (slots,) = np.nonzero(layout.expert_of_slot[0] == expert)
    ranks = np.searchsorted(layout.first_slot, slots, side="right") - 1
    return tuple(int(rank) for rank in np.unique(ranks))


def _placed(share: float, ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{share:.0%} on {word} {', '.join(map(str, ranks))}"


def _share(load: Load) -> Load:
    share: Load = load / load.sum() if load.any() else load
    return share


def _table(*names: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name)
    return table
