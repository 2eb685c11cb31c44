"""A pool follows traffic that it has not seen before at once, however few samples its windows have.

Windows are like those of `equipoise demo`: four ranks, six windows of each kind of text.
"""

import json

import numpy as np
import pytest

from equipoise.cli.offline.replay_run import replay
from equipoise.formats.recording import Recording
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.policy import Policy
from equipoise.planning.topology import ModelShape, Topology
from tests.support.planner_loads import RECORDED

MODEL = ModelShape(num_layers=4, num_experts=32, num_groups=8, expert_bytes=36_864)
TOPOLOGY = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=11)
POLICY = Policy(interval_s=2.5, fast_half_life_s=1.25, min_gain=0.04)
DOMAINS = ("code", "arithmetic", "english")
WINDOWS_PER_DOMAIN = 6
OLD_PART = 0.4
"""Of the first window after a shift: requests in flight are of the kind before."""
RECOVERED = 1 / 1.2


def shares_of_domains():
    domains = json.loads(RECORDED.read_text())["domains"]
    loads = {name: np.array(domains[name], float).sum(axis=0) for name in DOMAINS}
    return [load / load.sum(axis=1, keepdims=True) for load in loads.values()]


def recorded(rng, *, assignments, concentration):
    """Windows of each domain; text varies like so many samples, or not at all."""
    windows, before = [], None
    for shares in shares_of_domains():
        for index in range(WINDOWS_PER_DOMAIN):
            expected = shares
            if index == 0 and before is not None:
                expected = OLD_PART * before + (1 - OLD_PART) * shares
            if concentration is not None:
                expected = [rng.dirichlet(concentration * row + 1e-9) for row in expected]
            windows.append([rng.multinomial(assignments, row) for row in expected])
        before = shares
    names = tuple(str(index) for index in range(len(windows)))
    return Recording(windows=np.array(windows, float), names=names)


@pytest.mark.parametrize("concentration", [None, 1_500])
@pytest.mark.parametrize("assignments", [2_000, 5_000, 100_000])
def test_new_traffic_is_followed_within_three_windows(assignments, concentration):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        run = replay(
            recorded(rng, assignments=assignments, concentration=concentration),
            name="demo",
            policy=POLICY,
            model=MODEL,
            topology=TOPOLOGY,
            start=contiguous_layout(num_layers=4, num_experts=32, num_ranks=4, slots_per_rank=11),
            window_s=POLICY.interval_s,
        )
        for first in (WINDOWS_PER_DOMAIN, 2 * WINDOWS_PER_DOMAIN):
            after = run.windows[first : first + WINDOWS_PER_DOMAIN]
            assert any(window.accepted for window in after[:2]), [one.reason for one in after]
            assert max(window.balancedness for window in after[1:3]) > RECOVERED
