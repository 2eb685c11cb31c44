"""What uneven shares gain in whole plans with two slots per rank, in the resolution of layouts.

On windows recorded from the repository's own model at 24 ranks, and on loads of 256 experts (see
`planner_loads`) at 144.
"""

import time

import numpy as np
import pytest

from equipoise.formats.files import read_recording
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.placing.bound import upper_bounds
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.warm_up import warm_up
from tests.support.eplb import eplb
from tests.support.planner_loads import RECORDED, loads_to_measure

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    warm_up()


@pytest.fixture(autouse=True)
def _printing(capsys):
    with capsys.disabled():
        yield


def profiles():
    """Name, load [layers, experts] and number of ranks with two slots."""
    recording = read_recording(RECORDED)
    for name, window in zip(recording.names, recording.windows, strict=True):
        yield name, window.astype(np.float64), 24
    for name, load in loads_to_measure().items():
        yield name, load, 144


def pool(load, num_ranks, slots_per_rank=2):
    num_layers, num_experts = load.shape
    model = ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)
    nodes = tuple(f"node-{rank // 8}" for rank in range(num_ranks))
    return {"model": model, "topology": Topology(node_of_rank=nodes, slots_per_rank=slots_per_rank)}


def test_two_slots_a_rank_with_even_and_uneven_shares():
    print("\nbalancedness with two slots a rank" + " " * 8 + "EPLB    even  uneven   bound      ms")
    rows = {24: [], 144: []}
    for name, load, num_ranks in profiles():
        num_slots = 2 * num_ranks
        table = eplb(
            load,
            num_slots=num_slots,
            num_groups=1,
            num_nodes=1,
            num_ranks=num_ranks,
            hierarchical=False,
        )
        published = balancedness(rank_loads(table, load=load, num_ranks=num_ranks))
        asked = {"algorithm": Algorithm.GLOBAL, **pool(load, num_ranks)}
        even = plan(load, **asked).balancedness
        begin = time.perf_counter()
        uneven = plan(load, weighted=Weighting.AUTO, **asked).balancedness
        took_ms = (time.perf_counter() - begin) * 1e3
        bound = upper_bounds(load, num_slots=num_slots, num_ranks=num_ranks).mean()
        row = (published, even, uneven, bound, took_ms)
        rows[num_ranks].append(row)
        show(name, row)
        assert even >= published - 1e-9
        assert uneven >= even - 1e-9
    for num_ranks, of_ranks in rows.items():
        show(f"mean at {num_ranks} ranks", np.mean(of_ranks, axis=0))
    gain = np.mean([uneven - even for _, even, uneven, _, _ in rows[24]])
    assert gain > 0.05


def show(name, row):
    print(f"  {name:36} " + "  ".join(f"{one:.4f}" for one in row[:4]) + f" {row[4]:7.1f}")
