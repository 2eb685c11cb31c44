"""What uneven shares are worth where slots are few, and how far plans are from the exact optimum.

On loads recorded from the repository's own model; `EQUIPOISE_BENCH_LOADS` names other files, with
commas, in any format of `equipoise plan`, which are then placed on 144 ranks of 2 slots.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from equipoise.formats.files import read_recording
from equipoise.planning.balance import balancedness, rank_loads
from equipoise.planning.bound import upper_bounds
from equipoise.planning.eplb import eplb
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.warm_up import warm_up

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1200)]
OWN_LOADS = Path(__file__).parents[2] / "model/equipoise_model/checkpoints/tiny/loads.json"
SHUFFLE_SEED = 20


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    warm_up()


@pytest.fixture(autouse=True)
def _printing(capsys):
    with capsys.disabled():
        yield


def profiles():
    """Name, load [layers, experts] and number of ranks with two slots."""
    files = os.environ.get("EQUIPOISE_BENCH_LOADS")
    if files:
        for path in map(Path, files.split(",")):
            load = read_recording(path).total()
            yield path.stem, load, 144
            rng = np.random.default_rng(SHUFFLE_SEED)
            yield f"{path.stem}, shuffled", rng.permuted(load, axis=1), 144
        return
    recording = read_recording(OWN_LOADS)
    for name, window in zip(recording.names, recording.windows, strict=True):
        yield name, window.astype(np.float64), 24


def pool(load, num_ranks, slots_per_rank=2):
    num_layers, num_experts = load.shape
    model = ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)
    nodes = tuple(f"node-{rank // 8}" for rank in range(num_ranks))
    return {"model": model, "topology": Topology(node_of_rank=nodes, slots_per_rank=slots_per_rank)}


def test_two_slots_a_rank_with_even_and_uneven_shares():
    print("\nbalancedness with two slots a rank" + " " * 8 + "EPLB    even  uneven   bound      ms")
    rows = []
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
        rows.append((published, even, uneven, bound, took_ms))
        print(f"  {name:36} " + "  ".join(f"{one:.4f}" for one in rows[-1][:4]), f"{took_ms:7.1f}")
        assert even >= published - 1e-9
        assert uneven >= even - 1e-9
    means = np.mean(rows, axis=0)
    print(f"  {'mean':36} " + "  ".join(f"{one:.4f}" for one in means[:4]), f"{means[4]:7.1f}")
    assert means[2] > means[0] + 0.015


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(4, 6), (5, 8)])
def test_against_the_exact_optimum_of_small_pools(num_ranks, num_experts):
    gaps = []
    for seed in range(6):
        load = np.random.default_rng(seed).lognormal(0.0, 0.8, (1, num_experts))
        asked = {"algorithm": Algorithm.GLOBAL, **pool(load, num_ranks)}
        best = load.sum() / num_ranks / exact_busiest(load[0], num_ranks)
        even = plan(load, **asked).balancedness
        uneven = plan(load, weighted=Weighting.ON, **asked).balancedness
        assert uneven <= best + 1e-3
        gaps.append((best - even, best - uneven, best))
    even, uneven, best = np.mean(gaps, axis=0)
    print(
        f"\n{num_experts} experts on {num_ranks} ranks x 2 slots, exact optimum {best:.4f} in the "
        f"mean: even splits are {even:.4f} below it, uneven ones {uneven:.4f} "
        f"(at most {max(gap[1] for gap in gaps):.4f})"
    )
    assert uneven < even


def exact_busiest(load, num_ranks, *, slots_per_rank=2):
    """Least load of the busiest rank over all placements and all splits, by a mixed program."""
    num_experts = len(load)
    size = num_experts * num_ranks
    holds, part, highest = np.arange(size), np.arange(size, 2 * size), 2 * size
    rows, low, high = [], [], []

    def say(places, factors, least, most):
        row = np.zeros(2 * size + 1)
        row[places] = factors
        rows.append(row)
        low.append(least)
        high.append(most)

    for expert in range(num_experts):
        own = np.arange(num_ranks) + expert * num_ranks
        say(part[own], 1.0, 1.0, 1.0)
        for place in own:
            say([holds[place], part[place]], [1.0, -1.0], 0.0, np.inf)
    for rank in range(num_ranks):
        here = np.arange(num_experts) * num_ranks + rank
        say(holds[here], 1.0, 0.0, slots_per_rank)
        say([*part[here], highest], [*load, -1.0], -np.inf, 0.0)
    is_whole = np.r_[np.ones(size), np.zeros(size + 1)]
    solved = milp(
        np.r_[np.zeros(2 * size), 1.0],
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=is_whole,
        bounds=Bounds(0.0, np.r_[np.ones(2 * size), np.inf]),
        options={"time_limit": 60.0, "mip_rel_gap": 1e-4},
    )
    assert solved.status == 0, solved.message
    return solved.fun
