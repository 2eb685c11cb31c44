"""What a layout of its own is worth to each phase, on recorded loads of prefill and decode.

`EQUIPOISE_LOADS` names a folder with recordings prefill_NAME and decode_NAME of the same service.
"""

import os

import pytest

from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.planner import plan
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.units import NUM_GROUPS, RANKS_PER_NODE, UNITS, UnitName
from tests.support.planner_loads import as_recorded, loads_to_measure

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        "EQUIPOISE_LOADS" not in os.environ,
        reason="EQUIPOISE_LOADS names no folder with recordings of both phases",
    ),
]

UNIT_OF_PHASE = {"prefill": UnitName.PREFILL_EP32, "decode": UnitName.DECODE_EP144}


def services(loads):
    """The loads of services of which both phases were recorded: prefill, then decode."""
    names = [name.removeprefix("prefill_") for name in loads if name.startswith("prefill_")]
    return {
        name: {phase: loads[f"{phase}_{name}"] for phase in UNIT_OF_PHASE}
        for name in names
        if f"decode_{name}" in loads
    }


def table_for(load, unit):
    node_of_rank = tuple(f"node-{rank // RANKS_PER_NODE:02}" for rank in range(unit.num_ranks))
    num_layers, num_experts = load.shape
    model = ModelShape(
        num_layers=num_layers, num_experts=num_experts, num_groups=NUM_GROUPS, expert_bytes=1
    )
    topology = Topology(node_of_rank=node_of_rank, slots_per_rank=unit.slots_per_rank)
    return plan(load, model=model, topology=topology, algorithm=unit.algorithm).expert_of_slot


def test_each_phase_is_balanced_best_by_its_own_layout():
    found = services(as_recorded(loads_to_measure()))
    assert found, "recordings prefill_NAME and decode_NAME"
    print("\n| pool | service | own layout | of both phases together | of the other phase |")
    for name, loads in found.items():
        total = sum(load / load.sum() for load in loads.values())
        for phase, other in (("prefill", "decode"), ("decode", "prefill")):
            unit = UNITS[UNIT_OF_PHASE[phase]]
            own, both, others = (
                balancedness(
                    rank_loads(table_for(of, unit), load=loads[phase], num_ranks=unit.num_ranks)
                )
                for of in (loads[phase], total, loads[other])
            )
            print(f"| {UNIT_OF_PHASE[phase]} | {name} | {own:.2f} | {both:.2f} | {others:.2f} |")
            assert own > both > others
