"""Traffic in windows, and what a planning loop makes of it, net of its moves.

Profiles are those of `planner_loads` (`EQUIPOISE_LOADS` names others). Loops see windows, which are
multinomial samples; balancedness is that of the true shares. A round is replayed by the balancer's
own code (`Decider`); its peers plan from scratch with a period, as vLLM and SGLang do.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.cli.offline.replay_run import Decider
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
EXPERT_BYTES = round(2.9 * 44_040_192)
"""Those of DeepSeek-V3 in FP8, as if each layer were 2.9: every second one of its 58 layers."""
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


def _irregular(kinds, rng):
    """Stays of random lengths, 10 windows on average."""
    shares, kind = [], 0
    while len(shares) < 100:
        shares += [kinds[kind]] * int(1 + rng.geometric(1 / 9))
        kind = int(rng.choice([other for other in range(4) if other != kind]))
    return shares[:100]


def _drift(kinds, rng):
    """From one kind to another once, for good."""
    return [_blend(kinds[0], kinds[3], index / 100) for index in range(100)]


def _three(kinds, rng):
    return [kinds[index % 3] for index in range(60)]


TRAFFICS = {
    "stationary": _stationary,
    "shifts": _shifts,
    "diurnal": _diurnal,
    "mixture": _mixture,
    "bursts": _bursts,
    "alternating": _alternating,
    "irregular": _irregular,
    "drift": _drift,
    "three in turn": _three,
}


@dataclass(frozen=True)
class Round:
    """One traffic on one pool."""

    shares: list
    """The true shares of each window, [layers, experts]."""
    windows: np.ndarray
    """Their assignments as counted, [windows, layers, experts]."""
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
    return Round(shares, np.array(windows, dtype=float), topology, model, start)


def by_equipoise(one, policy=None):
    """The balancer's loop."""
    decider = Decider(
        Policy() if policy is None else policy, model=one.model, topology=one.topology
    )
    layout, reached, lost_s, moves, switches = one.start, [], 0.0, 0, []
    for index, (shares, window) in enumerate(zip(one.shares, one.windows, strict=True)):
        reached.append(balancedness(layout_loads(layout, shares)))
        proposal = decider.close(window, layout, now=(index + 1) * WINDOW_S)
        if proposal.verdict.accepted:
            layout = layout.with_placement(
                proposal.plan.expert_of_slot, generation=layout.generation + 1
            )
            lost_s += proposal.verdict.lost_s
            moves += proposal.verdict.moves
            switches.append(index)
    return _outcome(reached, lost_s, moves, switches)


def by_period(one, *, period, latest):
    """The published planner every `period` windows on the `latest` ones."""

    def planned(index, layout):
        if (index + 1) % period:
            return layout
        windows = one.windows[max(0, index + 1 - latest) : index + 1]
        return _published(one, windows.sum(axis=0), layout)

    return _played(one, planned)


def never(one):
    """One plan after the first window, and nothing after that."""
    return _played(
        one,
        lambda index, layout: _published(one, one.windows[0], layout) if index == 0 else layout,
    )


def oracle(one):
    """The balancedness of a plan for the true shares of each window, at no cost."""
    known = {}
    for shares in one.shares:
        if id(shares) not in known:
            made = plan(shares, model=one.model, topology=one.topology, algorithm=Algorithm.GLOBAL)
            known[id(shares)] = made.expert_of_slot
    layouts = {key: one.start.with_placement(table, generation=2) for key, table in known.items()}
    return float(
        np.mean([balancedness(layout_loads(layouts[id(shares)], shares)) for shares in one.shares])
    )


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
    reached, lost_s, moves, switches = [], 0.0, 0, []
    for index, shares in enumerate(one.shares):
        # Twins are allowed to the published planner, so no `Layout`.
        reached.append(
            balancedness(rank_loads(table, load=shares, num_ranks=one.topology.num_ranks))
        )
        after = planned(index, table)
        moved = after != table
        if moved.any():
            most = int(np.add.reduceat(moved.sum(axis=0), one.topology.first_slot[:-1]).max())
            lost_s += MeasuredCosts().lost_s(
                most * EXPERT_BYTES,
                wave_bytes=Policy().wave_bytes(EXPERT_BYTES),
                is_reshared=False,
                policy=Policy(),
            )
            switches.append(index)
            moves += int(moved.sum())
        table = after
    return _outcome(reached, lost_s, moves, switches)


def _outcome(reached, lost_s, moves, switches):
    return Outcome(
        balancedness=float(np.mean(reached)),
        lost=lost_s / (WINDOW_S * len(reached)),
        switches=len(switches),
        moves=moves,
        last_switch=switches[-1] if switches else -1,
    )
