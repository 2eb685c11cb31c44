"""A pool's scripted workers whose steps take as long as a model with known constants says."""

import numpy as np

from equipoise.planning.balance import layout_loads

FIXED_S, PER_ASSIGNMENT_S, PER_ROW_S = 6e-3, 4e-6, 2e-6
STEPS_PER_S = 10


class TimedFleet:
    """Times the steps of a harness's workers, with noise; stalls take long now and then."""

    def __init__(self, harness, *, noise=0.01, seed=0):
        self.harness = harness
        self._noise = noise
        self._random = np.random.default_rng(seed)

    def step_s(self, load):
        """A step's duration under the layout in use, for [layers, experts] per second."""
        per_step = layout_loads(self.harness.pool.layouts.current, load / STEPS_PER_S)
        experts_s = PER_ASSIGNMENT_S * per_step.max(axis=1).sum()
        return FIXED_S + experts_s + PER_ROW_S * per_step.mean(axis=1).sum()

    def run(self, load, *, seconds, stall_s=0.0):
        """Serve a load for some windows."""
        for _ in range(seconds):
            own = layout_loads(self.harness.pool.layouts.current, load / STEPS_PER_S).sum(axis=0)
            noises = 1 + self._noise * self._random.standard_normal(len(own) + 1)
            step_us = 1e6 * (self.step_s(load) * noises[-1] + stall_s)
            for worker, assignments, noise in zip(
                self.harness.ranks, own, noises[:-1], strict=True
            ):
                busy_s = FIXED_S / 2 + PER_ASSIGNMENT_S * assignments
                worker.step_us_a_step = round(step_us)
                worker.busy_us_a_step = round(1e6 * busy_s * noise)
            self.harness.run_traffic(load, seconds=1)
