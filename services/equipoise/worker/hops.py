"""`HopChoice`: whether a rank wants its rows to travel to other nodes in two hops. Pure."""

from enum import StrEnum

from equipoise.planning.node_traffic import NodeCounts

WINDOW_ROWS = 4096
"""Rows (a token in one MoE layer) between two decisions."""

MOST_OF_DIRECT = 2 / 3
"""Two hops send each row once more within a node, so they must send clearly less between nodes."""


class Hops(StrEnum):
    """How rows travel to other nodes."""

    AUTO = "auto"
    """In two hops if that sends less than two thirds of the rows between nodes."""

    ONE = "one"
    """To each rank that needs them."""

    TWO = "two"
    """Once to each node that needs them."""


class HopChoice:
    """One rank's choice, which follows what its rows did in the latest window of an epoch."""

    def __init__(self, hops: Hops) -> None:
        self._hops = hops
        self._wants_two = hops is Hops.TWO
        self._rows = self._remote_nodes = self._direct_rows = 0

    def wants_two(self, counts: NodeCounts | None) -> bool:
        """Return whether it wants two hops, given its counts so far; None on a single node."""
        if counts is None:
            return False
        num_rows = sum(counts.rows_by_nodes)
        if self._hops is Hops.AUTO and num_rows - self._rows >= WINDOW_ROWS:
            by_two = counts.remote_nodes - self._remote_nodes
            by_one = counts.direct_rows - self._direct_rows
            self._wants_two = by_two < MOST_OF_DIRECT * by_one
            self._rows = num_rows
            self._remote_nodes, self._direct_rows = counts.remote_nodes, counts.direct_rows
        return self._wants_two
