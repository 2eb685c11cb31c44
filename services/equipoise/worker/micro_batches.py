"""Where a rank cuts its part of a step into two micro-batches. Pure."""

import numpy as np

from equipoise.worker.sequence import StepPlan


def num_second(plan: StepPlan, *, least_tokens: int, parity_tokens: int) -> int:
    """Return how many of a plan's tokens, the last ones, belong in the second micro-batch.

    The two take about the same time, attention included; a cut may be inside a sequence. Plans of
    fewer than `least_tokens` (0: all plans) are not cut. `parity_tokens` earlier positions cost a
    token as much as everything else.
    """
    if plan.num_tokens < max(2, least_tokens) or not least_tokens:
        return 0
    positions = [np.arange(len(one.tokens)) + one.start for one in plan.chunks]
    costs_until = np.cumsum(1.0 + np.concatenate(positions) / parity_tokens)
    # Of the cuts with a token on both sides, the one with the smallest larger half.
    halves = np.maximum(costs_until, costs_until[-1] - costs_until)[:-1]
    return plan.num_tokens - 1 - int(halves.argmin())
