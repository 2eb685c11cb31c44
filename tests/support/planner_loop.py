"""Traffic in windows, and what a planning loop makes of it, net of its moves.

Profiles are those of `planner_loads` (`EQUIPOISE_LOADS` names others); windows are multinomial
samples of them. A round is replayed by the balancer's own code (`replay`); its peers plan from
scratch with a period, as vLLM and SGLang do.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.cli.offline.replay_run import replay
from equipoise.formats.recording import Recording
from equipoise.planning.balance import balancedness, layout_loads, rank_loads
from equipoise.planning.costs import MeasuredCosts
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.placing.stay import align
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Policy
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb
from tests.support.planner_loads import as_recorded, loads_to_measure

WINDOW_S = 10.0
NUM_LAYERS = 10
EXPERT_BYTES = 44_040_192
"""Of DeepSeek-V3 in FP8."""
PERIODS = {"vLLM": (15, 5), "SGLang": (5, 5), "every window": (1, 1)}
"""Windows between plans, and the latest windows that a plan is for: vLLM plans every 3,000 steps
on 1,000, SGLang every 1,000 on 1,000; a step takes 50 ms."""


@dataclass(frozen=True)
class Outcome:
    """A loop's mean balancedness, the share of time that its moves cost, its switches and moves."""

    balancedness: float
    lost: float
    switches: int
    moves: int
    last_switch: int
    """The last window after which it switched; -1 if it never did."""

    @property
    def net(self):
        return self.balancedness - self.lost


def profiles():
    """Shares of experts by kind of traffic, [layers, experts] each: two of each of two services."""
    loads = as_recorded(loads_to_measure())
    names = sorted(loads)
    decodes = [name for name in names if name.startswith("decode")]
    prefills = [name for name in names if name.startswith("prefill")]
    if len(decodes) >= 2 and len(prefills) >= 2:
        names = [decodes[0], prefills[0], decodes[1], prefills[-1]]
    chosen = []
    for place in range(4):
        load = loads[names[place % len(names)]]
        layers = np.linspace(0, len(load) - 1, NUM_LAYERS).astype(int)
        # Other layers stand in for a fourth load if only three were recorded.
        shift = place // len(names)
        rows = load[(layers + shift) % len(load)]
        chosen.append(rows / rows.sum(axis=1, keepdims=True))
    return chosen


def _blend(first, second, part):
    return first * (1 - part) + second * part


def _stationary(kinds, rng):
    return [kinds[0]] * 60


def _shifts(kinds, rng):
    return [kinds[index // 10 % 4] for index in range(80)]


def _diurnal(kinds, rng):
    return [
        _blend(kinds[0], kinds[1], (1 - np.cos(index * np.pi / 30)) / 2) for index in range(120)
    ]


def _mixture(kinds, rng):
    weights, walk = np.zeros(4), []
    for _ in range(120):
        weights += rng.normal(scale=0.25, size=4)
        weights *= 0.98
        parts = np.exp(weights) / np.exp(weights).sum()
        walk.append(sum(part * kind for part, kind in zip(parts, kinds, strict=True)))
    return walk


def _bursts(kinds, rng):
    return [kinds[1] if index % 20 >= 17 else kinds[0] for index in range(80)]


def _alternating(kinds, rng):
    return [kinds[index % 2] for index in range(60)]


TRAFFICS = {
    "stationary": _stationary,
    "shifts": _shifts,
    "diurnal": _diurnal,
    "mixture": _mixture,
    "bursts": _bursts,
    "alternating": _alternating,
}


@dataclass(frozen=True)
class Round:
    """One traffic on one pool."""

    shares: list
    """The true shares of each window, [layers, experts]."""
    recording: Recording
    topology: Topology
    model: ModelShape
    start: object


def round_of(traffic, kinds, *, assignments, num_ranks):
    """Windows of a traffic at `assignments` per layer and window; 288 slots over the ranks."""
    rng = np.random.default_rng(17)
    shares = TRAFFICS[traffic](kinds, rng)
    windows = [
        [rng.multinomial(assignments, row / row.sum()) for row in window] for window in shares
    ]
    slots_per_rank = 288 // num_ranks
    num_experts = kinds[0].shape[1]
    model = ModelShape(
        num_layers=NUM_LAYERS, num_experts=num_experts, num_groups=8, expert_bytes=EXPERT_BYTES
    )
    topology = Topology(
        node_of_rank=tuple(f"node-{rank // 8:02}" for rank in range(num_ranks)),
        slots_per_rank=slots_per_rank,
    )
    start = contiguous_layout(
        num_layers=NUM_LAYERS,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
    )
    names = tuple(f"{traffic}/{index}" for index in range(len(windows)))
    recording = Recording(windows=np.array(windows, dtype=float), names=names)
    return Round(shares, recording, topology, model, start)


def by_equipoise(one, policy=None):
    """The balancer's loop."""
    run = replay(
        one.recording,
        name="loop",
        policy=Policy() if policy is None else policy,
        model=one.model,
        topology=one.topology,
        start=one.start,
        window_s=WINDOW_S,
    )
    total_s = WINDOW_S * len(run.windows)
    switches = [index for index, window in enumerate(run.windows) if window.accepted]
    return Outcome(
        balancedness=run.balancedness_mean,
        lost=sum(window.lost_s for window in run.windows) / total_s,
        switches=len(switches),
        moves=run.moves,
        last_switch=switches[-1] if switches else -1,
    )


def by_period(one, *, period, latest):
    """The published planner every `period` windows on the `latest` ones."""

    def planned(index, layout):
        if (index + 1) % period:
            return layout
        windows = one.recording.windows[max(0, index + 1 - latest) : index + 1]
        return _published(one, windows.sum(axis=0), layout)

    return _played(one, planned)


def never(one):
    """One plan after the first window, and nothing after that."""
    return _played(
        one,
        lambda index, layout: (
            _published(one, one.recording.windows[0], layout) if index == 0 else layout
        ),
    )


def oracle(one):
    """The balancedness of a plan for the true shares of each window, at no cost."""
    known = {}
    for shares in one.shares:
        if id(shares) not in known:
            made = plan(shares, model=one.model, topology=one.topology, algorithm=Algorithm.GLOBAL)
            known[id(shares)] = made.expert_of_slot
    reached = [
        balancedness(layout_loads(one.start.with_placement(known[id(s)], generation=2), window))
        for s, window in zip(one.shares, one.recording.windows, strict=True)
    ]
    return float(np.mean(reached))


def _published(one, load, layout):
    table = eplb(
        load,
        num_slots=one.topology.num_slots,
        num_groups=1,
        num_nodes=1,
        num_ranks=one.topology.num_ranks,
        hierarchical=False,
    )
    first_slot = np.array(one.topology.first_slot, dtype=np.int64)
    return align(table, layout, first_slot=first_slot)


def _played(one, planned):
    table = np.array(one.start.expert_of_slot)
    reached, lost, moves, switches = [], 0.0, 0, []
    for index, window in enumerate(one.recording.windows):
        # Twins are allowed to the published planner, so no `Layout`.
        reached.append(
            balancedness(rank_loads(table, load=window, num_ranks=one.topology.num_ranks))
        )
        after = planned(index, table)
        moved = after != table
        if moved.any():
            most = int(np.add.reduceat(moved.sum(axis=0), one.topology.first_slot[:-1]).max())
            lost += MeasuredCosts().lost_s(
                most * EXPERT_BYTES, expert_bytes=EXPERT_BYTES, is_reshared=False, policy=Policy()
            )
            switches.append(index)
            moves += int(moved.sum())
        table = after
    total_s = WINDOW_S * len(reached)
    return Outcome(
        float(np.mean(reached)),
        lost / total_s,
        len(switches),
        moves,
        switches[-1] if switches else -1,
    )
