"""Explicit-state model checking: visit every reachable state of a small model, breadth first.

The states of a model hold the project's own frozen values, and its transitions call the project's
own tables, so a model cannot drift from the code. After Holzmann's Spin and Hawblitzel's
stateright: no partial-order reduction, the models are small.
"""

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_STATES = int(os.environ.get("EQUIPOISE_MODEL_STATES", "40000"))
"""States that a test visits of a larger model; a run by hand raises it."""

MAX_DEPTH = int(os.environ.get("EQUIPOISE_MODEL_DEPTH", "2"))
"""Length of the sequences of faults around an epoch that a test tries; a run by hand raises it."""

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was visited."""

    states: int
    """Distinct states."""

    transitions: int
    """Transitions between them."""

    depth: int
    """Longest of the shortest paths to a state."""

    complete: bool
    """Whether every reachable state was visited."""


class ViolationError(AssertionError):
    """A reachable state breaks an invariant; the message has the shortest way there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Generic[S]):
    """A transition system and what must hold in it."""

    initial: S

    transitions: Callable[[S], Iterable[tuple[str, S]]]
    """All that may happen next: a label and the state after it."""

    violation: Callable[[S], str]
    """The name of a broken invariant, with its detail; empty if all hold."""

    converges: Callable[[S], str]
    """What is still wrong in a state after faults end; empty if the model recovers from it."""

    canonical: Callable[[S], S] = lambda state: state
    """One state for all those that differ only in names; of these, the first one is visited."""


def explore(model: Model[S], *, max_states: int, converge_every: int = 1) -> Exploration:
    """Visit states breadth first, up to `max_states`.

    Invariants are checked in every state, convergence in each `converge_every`-th.

    Raises:
        ViolationError: an invariant is broken, or a state does not recover.
    """
    parents: dict[S, tuple[S, str] | None] = {model.canonical(model.initial): None}
    queue: deque[tuple[S, int]] = deque([(model.initial, 0)])
    num_transitions = depth = num_visited = 0
    while queue:
        state, depth = queue.popleft()
        num_visited += 1
        broken = model.violation(state)
        if not broken and num_visited % converge_every == 0:
            broken = model.converges(state)
        canonical = model.canonical(state)
        if broken:
            raise ViolationError("\n".join([broken, *_story(parents, canonical)]))
        for label, following in model.transitions(state):
            num_transitions += 1
            key = model.canonical(following)
            if key not in parents and len(parents) < max_states:
                parents[key] = (canonical, label)
                queue.append((following, depth + 1))
    return Exploration(
        states=len(parents),
        transitions=num_transitions,
        depth=depth,
        complete=len(parents) < max_states,
    )


def _story(parents: dict[S, tuple[S, str] | None], state: S) -> Iterator[str]:
    labels = []
    at = parents[state]
    while at is not None:
        labels.append(at[1])
        at = parents[at[0]]
    for number, label in enumerate(reversed(labels), start=1):
        yield f"  {number}. {label}"
