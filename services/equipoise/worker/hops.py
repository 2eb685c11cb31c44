"""`HopChoice`: whether a rank wants its rows to travel to other nodes in two hops. Pure."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The command line's help reads these settings, and needs no numpy.
    from equipoise.planning.node_traffic import NodeCounts

WINDOW_ROWS = 4096
"""Rows (a token in one MoE layer) between two decisions."""

MOST_OF_DIRECT = 2 / 3
"""Share of what one hop sends between nodes, outputs included, below which two hops pay: they send
all of it once more within nodes. That is what they need where links within a node are three times
as fast as those between nodes (tests/model/test_paced_links.py)."""


class Hops(StrEnum):
    """How rows travel to other nodes."""

    AUTO = "auto"
    """In two hops if that sends less than two thirds of the rows and outputs between nodes."""

    ONE = "one"
    """To each rank that needs them."""

    TWO = "two"
    """Once to each node that needs them."""


class HopChoice:
    """One rank's choice, which follows what its rows did in the latest window of an epoch.

    With `sums_on_nodes`, as many outputs return as rows cross. Otherwise each way returns the same
    outputs, one for each assignment, so two hops save little.
    """

    def __init__(self, hops: Hops, *, sums_on_nodes: bool = False) -> None:
        self._hops, self._sums_on_nodes = hops, sums_on_nodes
        self._wants_two = hops is Hops.TWO
        self._rows = self._remote_nodes = self._direct_rows = self._outputs = 0

    def wants_two(self, counts: "NodeCounts | None") -> bool:
        """Return whether it wants two hops, given its counts so far; None on a single node."""
        if counts is None:
            return False
        num_rows = sum(counts.rows_by_nodes)
        if self._hops is Hops.AUTO and num_rows - self._rows >= WINDOW_ROWS:
            by_two = counts.remote_nodes - self._remote_nodes
            by_one = counts.direct_rows - self._direct_rows
            # Of sums, the outputs of one hop are not known, but they are no fewer than its rows.
            outputs = 0 if self._sums_on_nodes else counts.sent_outputs - self._outputs
            self._wants_two = by_two + outputs < MOST_OF_DIRECT * (by_one + outputs)
            self._rows, self._outputs = num_rows, counts.sent_outputs
            self._remote_nodes, self._direct_rows = counts.remote_nodes, counts.direct_rows
        return self._wants_two
