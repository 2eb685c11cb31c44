"""How long a plan takes for a 671-billion-parameter model: 58 layers of 256 experts."""

import statistics
import time

import numpy as np
import pytest

from equipoise.planning.eplb import eplb
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology

pytestmark = pytest.mark.benchmark
REPEATS = 15


@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "hierarchical"),
    [(4, 8, True), (4, 8, False), (18, 8, False)],
    ids=["32 ranks hierarchical", "32 ranks global", "144 ranks global"],
)
def test_eplb_plans_58_layers_on_288_slots(num_nodes, ranks_per_node, hierarchical, capsys):
    load = np.random.default_rng(0).lognormal(size=(58, 256))

    def once():
        return eplb(
            load,
            num_slots=288,
            num_groups=8,
            num_nodes=num_nodes,
            num_ranks=num_nodes * ranks_per_node,
            hierarchical=hierarchical,
        )

    with capsys.disabled():
        _print_timings(f"eplb, {num_nodes} x {ranks_per_node} ranks, {hierarchical=}", once)


def test_plan_with_repair_and_staying_in_place(capsys):
    load = np.random.default_rng(0).lognormal(size=(58, 256))
    model = ModelShape(num_layers=58, num_experts=256, num_groups=8, expert_bytes=1)
    topology = Topology(
        node_of_rank=tuple(f"node-{rank // 8}" for rank in range(32)), slots_per_rank=9
    )

    def once():
        return plan(load, model=model, topology=topology, current=None, algorithm=Algorithm.AUTO)

    with capsys.disabled():
        _print_timings("plan, auto, 4 x 8 ranks", once)


def _print_timings(what, once):
    times_ms = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        result = once()
        times_ms.append((time.perf_counter() - begin) * 1e3)
        assert result is not None
    print(
        f"\n{what}: min {min(times_ms):.1f} ms, median {statistics.median(times_ms):.1f} ms, "
        f"max {max(times_ms):.1f} ms over {REPEATS} runs"
    )
