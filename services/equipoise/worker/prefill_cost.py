"""`PrefillCostFit`: what prefilling costs on this rank, fitted to the steps that prefill prompts.

Model of such a step: compute time = fixed + tokens + mean tokens of all ranks (whose experts run
everywhere) + pairs of a token and an earlier position, each times a constant. What balancers need
of it is one number: how many pairs take as long as one token, the context at which half of a
token's time is attention.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from equipoise.worker.sequence import PrefillWork, StepPlan

Array = npt.NDArray[np.float64]

MIN_STEPS = 32
"""Steps before anything is fitted."""

MAX_STEPS = 512
"""The latest steps that are fitted, because hardware and models change."""

MAX_ERROR = 0.25
"""Largest relative standard error of a constant that counts as known."""

MAX_PARITY_TOKENS = 2**40
"""Largest result; with more, attention costs next to nothing."""

_OUTLIER = 4.0  # median deviations


class PrefillCostFit:
    """Collects steps and fits them; deterministic. Not safe for use by two threads at once."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, float, float]] = deque(maxlen=MAX_STEPS)
        self._fitted: int | None = None

    def add(self, plan: StepPlan, *, mean_tokens: float, busy_s: float) -> None:
        """Take a step, if it prefilled prompts.

        Args:
            plan: what this rank ran.
            mean_tokens: the tokens of all ranks, divided by their number.
            busy_s: this rank's compute time, seconds.
        """
        if any(len(chunk.known) > 1 for chunk in plan.chunks):
            pairs = sum(
                PrefillWork.of(len(one.tokens), start=one.start).pairs for one in plan.chunks
            )
            self._steps.append((1.0, plan.num_tokens, mean_tokens, pairs, busy_s))
            self._fitted = None

    @property
    def num_steps(self) -> int:
        """Steps that are kept."""
        return len(self._steps)

    @property
    def parity_tokens(self) -> int:
        """Pairs that take as long as one token does without attention.

        0 if the steps do not show it: too few, too much alike, or too noisy.
        """
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> int:
        if len(self._steps) < MIN_STEPS:
            return 0
        rows = np.array(self._steps, dtype=np.float64)
        # Deviations are relative, so every step's time is made 1; columns are made of like size, so
        # that one measure of singularity serves all.
        design = rows[:, :-1] / np.maximum(rows[:, -1:], 1e-9)
        scale = np.maximum(design.mean(axis=0), 1e-9)
        design = design / scale
        constants = _least_squares(design)
        # Once more without steps that stalled.
        away = np.abs(1 - design @ constants)
        design = design[away <= _OUTLIER * float(np.median(away)) + 1e-12]
        constants = _least_squares(design)
        residuals = 1 - design @ constants
        degrees = max(1, len(design) - design.shape[1])
        variance = float(residuals @ residuals) / degrees
        gram = design.T @ design
        inverse = np.linalg.pinv(gram, rcond=1e-10)
        found = []
        for wanted in (np.array([0, 1, 1, 0]) / scale, np.array([0, 0, 0, 1]) / scale):
            # What the steps do not tell apart has no error, only no place in the rows.
            unseen = np.linalg.norm(inverse @ gram @ wanted - wanted)
            if unseen > 1e-4 * np.linalg.norm(wanted):
                return 0
            value = float(wanted @ constants)
            if value <= 0 or np.sqrt(variance * (wanted @ inverse @ wanted)) > MAX_ERROR * value:
                return 0
            found.append(value)
        token_s, pair_s = found
        return min(MAX_PARITY_TOKENS, max(1, round(token_s / pair_s)))


def _least_squares(design: Array) -> Array:
    return np.asarray(np.linalg.lstsq(design, np.ones(len(design)), rcond=1e-10)[0], np.float64)
