"""Moves of a plan on the demo's pool: the published algorithm compared with our planners.

`-s` prints the figures of README's comparison.
"""

import json
from pathlib import Path

import numpy as np

import equipoise_model
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from tests.support.eplb import eplb

TRACE = Path(equipoise_model.__file__).parent / "checkpoints" / "tiny" / "loads.json"
MODEL = ModelShape(num_layers=4, num_experts=32, num_groups=8, expert_bytes=1)
POOL = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=11)
START = contiguous_layout(num_layers=4, num_experts=32, num_ranks=4, slots_per_rank=11)
NUM_TRIALS = 4


def published(load, _held):
    return eplb(load, num_slots=44, num_groups=8, num_nodes=2, num_ranks=4, hierarchical=True)


def planned(algorithm, **options):
    def made(load, held):
        current = START.with_placement(held, generation=2)
        return plan(
            load, model=MODEL, topology=POOL, current=current, algorithm=algorithm, **options
        ).expert_of_slot

    return made


PLANNERS = {
    "published EPLB, hierarchical": published,
    "ours, global": planned(Algorithm.GLOBAL),
    "ours, incremental to 0.98": planned(Algorithm.INCREMENTAL, target_balancedness=0.98),
}


def test_incremental_plans_change_few_slots_where_the_published_algorithm_changes_nearly_all():
    domains = json.loads(TRACE.read_text())["domains"]
    figures = {name: _figures(make, domains) for name, make in PLANNERS.items()}
    for name, of_planner in figures.items():
        words = ", ".join(
            f"{domain} {slots:.0f} slots, {fetched:.0f} fetched, max/mean {busiest:.2f}"
            for domain, (slots, fetched, busiest) in of_planner.items()
        )
        print(f"\n{name}: {words}")
    assert min(slots for slots, _, _ in figures["published EPLB, hierarchical"].values()) > 150
    assert max(slots for slots, _, _ in figures["ours, incremental to 0.98"].values()) < 30


def _figures(make, domains):
    """Mean slots changed, experts new to their rank, and 1 / balancedness, by domain."""
    found = {domain: [] for domain in ("code", "arithmetic", "english")}
    for trial in range(NUM_TRIALS):
        held = START.expert_of_slot
        for domain, rows in found.items():
            load = np.array(domains[domain][trial], dtype=np.float64)
            table = make(load, held)
            by_rank = (placed.reshape(-1, 11).tolist() for placed in (table, held))
            new_to_rank = sum(len({*new} - {*old}) for new, old in zip(*by_rank, strict=True))
            reached = balancedness(rank_loads(table, load=load, num_ranks=4))
            rows.append((np.count_nonzero(table != held), new_to_rank, 1 / reached))
            held = table
    return {domain: np.mean(rows, axis=0) for domain, rows in found.items()}
