"""Is a history of concurrent operations linearizable? After Wing and Gong (1993) and Lowe (2017).

An operation that has returned takes effect at one moment between its call and its return. One whose
outcome is unknown, for example after a timeout, takes effect at any moment after its call, or
never. The search tries all orders that this allows, and remembers which sets of operations led to
which state, as porcupine does.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = object()
"""The result of an operation whose outcome is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a history."""

    what: tuple[Any, ...]
    """Its name and arguments."""

    called_s: float
    """When it was called."""

    returned_s: float = math.inf
    """When it returned; never, if its outcome is unknown."""

    result: Any = UNKNOWN
    """What it returned."""


MAX_SEEN = 300_000
"""Sets of operations, with their states, that a search remembers: half a minute."""


class UndecidedError(Exception):
    """The search ended without an answer: too many operations are concurrent or unknown."""


Step = Callable[[Any, tuple[Any, ...]], tuple[Any, Any]]
"""From a state and an operation to the next state and the result."""


def is_linearizable(history: Sequence[Operation], step: Step, initial: Hashable) -> bool:
    """Whether some order of `history` explains all its results; states must be hashable.

    Raises:
        UndecidedError: too many orders are possible.
    """
    operations = sorted(history, key=lambda one: one.called_s)
    must = sum(1 << n for n, one in enumerate(operations) if one.result is not UNKNOWN)
    seen = {(0, initial)}
    open_ends = [(0, initial)]
    while open_ends:
        done, state = open_ends.pop()
        if done & must == must:
            return True
        for number in _next(operations, done):
            after, result = step(state, operations[number].what)
            end = (done | 1 << number, after)
            if operations[number].result is UNKNOWN:
                if after == state:
                    continue  # As if it never took effect.
            elif operations[number].result != result:
                continue
            if end in seen:
                continue
            if len(seen) >= MAX_SEEN:
                raise UndecidedError(f"{len(seen)} sets of {len(operations)} operations")
            seen.add(end)
            open_ends.append(end)
    return False


def _next(operations: Sequence[Operation], done: int) -> list[int]:
    """Operations that may take effect next: none that is left returned before they were called."""
    left = [n for n in range(len(operations)) if not done >> n & 1]
    first_s = min(operations[n].returned_s for n in left)
    return [n for n in left if operations[n].called_s <= first_s]
