"""`exchanged`: moves experts between ranks that have no place left, one for one.

Whatever the target, a rank that holds too many experts of one layer holds too few of another, or
has places to fill. So ranks form cycles, on which each gives one expert and gets one of another
layer: nobody needs more places, and each rank stages one. Experts go where the numbers of their
layer are too low, if possible where they belong. Once all numbers are right, a layer needs no place
more for its target, however its experts are mixed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from equipoise.planning.arrays import EMPTY, Bools, ExpertTable, Indices


class Sent(NamedTuple):
    """An expert goes to an empty slot of another rank."""

    layer: int
    slot: int
    """The slot that it leaves empty."""
    to: int
    """The slot that it fills."""


def exchanged(
    experts: ExpertTable,
    target: ExpertTable,
    *,
    rank_of_slot: Indices,
    layers: Sequence[int],
    most_moves: int,
) -> list[Sent]:
    """Exchange experts for one another as long as no rank gets more than `most_moves`, or one.

    Args:
        experts: int32 [layers, slots] or EMPTY. Experts that are not in their slots of the target
            have no other replica.
        target: the table to reach; no rank has fewer places than it needs for either table.
        rank_of_slot: the rank that owns each slot, [slots].
        layers: the layers that change, the most urgent first.
        most_moves: the most experts that a rank gets.

    Returns:
        In order: a slot may be left before it is filled again. Empty only if each rank holds as
        many experts of each layer as the target needs at the least.
    """
    exchange = _Exchange(experts, target, rank_of_slot, layers)
    sent: list[Sent] = []
    num_received = np.zeros(int(rank_of_slot[-1]) + 1, dtype=np.int64)
    while cycle := exchange.cycle(is_open=num_received < max(1, most_moves)):
        for hop in cycle:
            sent += exchange.make(hop)
            num_received[hop.receiver] += hop.layer != FREE
    return sent


FREE = -1
"""In place of a layer: free places, of which ranks may have too many or too few as well."""


class _Hop(NamedTuple):
    """One step of a cycle: a rank gives an expert, or a free place, to the next."""

    layer: int
    """FREE for a free place."""
    giver: int
    receiver: int
    slot: int
    """The expert's slot; any for a free place."""


class _Exchange:
    """The table after the exchanges so far, and what each rank has too many or too few of."""

    def __init__(
        self,
        experts: ExpertTable,
        target: ExpertTable,
        rank_of_slot: Indices,
        layers: Sequence[int],
    ) -> None:
        self._experts, self._rank_of_slot, self._layers = experts.copy(), rank_of_slot, layers
        is_there, is_filled = experts == target, experts != EMPTY
        self._is_leaving = ~is_there & is_filled
        # One slot of the target for each expert; its other replicas come last, when there is room.
        self._home = np.full((len(experts), int(target.max()) + 1), EMPTY, dtype=np.int64)
        rows, slots = np.nonzero(~is_there & (target != EMPTY))
        self._home[rows, target[rows, slots]] = slots
        rows, slots = np.nonzero(self._is_leaving)
        is_goal = is_there & is_filled
        is_goal[rows, self._home[rows, experts[rows, slots]]] = True
        first_slot = np.flatnonzero(np.diff(rank_of_slot, prepend=-1))
        beyond = is_filled.astype(np.int64) - is_goal
        excess = np.add.reduceat(beyond, first_slot, axis=1)
        # [layers + 1, ranks], 0 if a rank has as many as it should; the last row is FREE.
        self._excess = np.concatenate((excess, -excess.sum(axis=0, keepdims=True)))

    def cycle(self, *, is_open: Bools) -> list[_Hop]:
        """Find a cycle of ranks that may get one more expert each; empty if there is none."""
        is_short: Bools = (self._excess < 0) & is_open
        starts = np.flatnonzero(is_short.any(axis=0))
        if not len(starts):
            return []
        rank, path = int(starts[0]), dict[int, _Hop]()
        while rank not in path:
            hop = self._hop(rank, is_short)
            if hop is None:
                return []
            path[rank] = hop
            rank = hop.receiver
        return list(path.values())[list(path).index(rank) :]

    def _hop(self, giver: int, is_short: Bools) -> _Hop | None:
        """Choose what a rank gives, and to which: if possible an expert that belongs there."""
        other: _Hop | None = None
        for layer in (FREE, *self._layers):
            receivers = np.flatnonzero(is_short[layer])
            if self._excess[layer, giver] <= 0 or not len(receivers):
                continue
            if layer == FREE:
                return _Hop(layer, giver, int(receivers[0]), 0)
            slots = np.flatnonzero(self._is_leaving[layer] & (self._rank_of_slot == giver))
            homes = self._rank_of_slot[self._home[layer, self._experts[layer, slots]]]
            at_home = np.flatnonzero(is_short[layer, homes])
            if len(at_home):
                return _Hop(layer, giver, int(homes[at_home[0]]), int(slots[at_home[0]]))
            other = other or _Hop(layer, giver, int(receivers[0]), int(slots[0]))
        return other

    def make(self, hop: _Hop) -> list[Sent]:
        """Make a step of a cycle; a free place is given without sending anything."""
        self._excess[hop.layer, hop.giver] -= 1
        self._excess[hop.layer, hop.receiver] += 1
        if hop.layer == FREE:
            return []
        experts = self._experts[hop.layer]
        expert, experts[hop.slot] = int(experts[hop.slot]), EMPTY
        self._is_leaving[hop.layer, hop.slot] = False
        own = np.flatnonzero((self._rank_of_slot == hop.receiver) & (experts == EMPTY))
        home = int(self._home[hop.layer, expert])
        to = home if home in own else int(own[0])
        experts[to] = expert
        return [Sent(hop.layer, hop.slot, to)]
