"""`NodeCounters`: how rows spread over nodes, from ranks' cumulative counts to windows.

A row is a token in one MoE layer. It travels to the ranks of the slots that it chose: directly, or
in two hops, over one rank of each node.
"""

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from equipoise.planning.arrays import Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """How the rows of one rank have spread over nodes in an epoch; counts only grow."""

    rows_by_nodes: tuple[int, ...]
    """Rows by the number of nodes that hold the slots they chose; element n is for n nodes."""
    remote_nodes: int
    """Nodes other than the rank's with slots that rows chose: what two hops send between nodes."""
    direct_rows: int
    """What one hop sends between nodes for the same rows."""
    sent_rows: int
    """Rows that the rank sent to other nodes."""
    sent_outputs: int
    """Outputs that the rank sent to other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraffic:
    """How the rows of all ranks spread over nodes in one window."""

    rows_by_nodes: tuple[int, ...]
    """Rows by the number of nodes that hold the slots they chose; element n is for n nodes."""
    remote_nodes: float
    """Nodes that a row reaches beside the one that it comes from, on average."""
    direct_rows: float
    """Copies of a row that one hop sends to other nodes, on average."""
    sent_rows: float
    """Copies of a row that were sent to other nodes, on average."""
    sent_outputs: float
    """Outputs that were sent to other nodes per row, on average."""
    rows_per_step: float
    """Rows of a rank per step."""

    @property
    def nodes(self) -> float:
        """Nodes that hold the slots of a row, on average."""
        total = sum(n * rows for n, rows in enumerate(self.rows_by_nodes))
        return total / sum(self.rows_by_nodes)

    @property
    def most_nodes(self) -> int:
        """The most nodes that hold the slots of any row."""
        return max(n for n, rows in enumerate(self.rows_by_nodes) if rows)

    @property
    def is_two_hop(self) -> bool:
        """Whether rows travelled in two hops, mostly."""
        return self.sent_rows < (self.remote_nodes + self.direct_rows) / 2


class NodeCounters:
    """Cumulative counts of the ranks of an epoch, and of the open window.

    With `is_heard_from_start`, the counts began while this object existed. Otherwise the first
    report of a rank is its baseline.
    """

    def __init__(self, *, num_ranks: int, is_heard_from_start: bool) -> None:
        self._latest: list[NodeCounts | None] = [None] * num_ranks
        first = NodeCounts(
            rows_by_nodes=(), remote_nodes=0, direct_rows=0, sent_rows=0, sent_outputs=0
        )
        self._at_open = [first if is_heard_from_start else None] * num_ranks

    def accept(self, rank: int, counts: NodeCounts | None) -> None:
        """Take the latest report of a rank."""
        self._latest[rank] = counts
        if self._at_open[rank] is None:
            self._at_open[rank] = counts

    def in_window(self, steps: Indices) -> NodeTraffic | None:
        """Return the traffic of the open window, in which ranks made these steps, [ranks].

        None if a rank did not count, counts contradict each other, or no rows ran.
        """
        grown = [_grown(*pair) for pair in zip(self._at_open, self._latest, strict=True)]
        known = [counts for counts in grown if counts is not None]
        if len(known) < len(grown) or (steps <= 0).any():
            return None
        # As float64: the sum over ranks may exceed int64.
        rows = np.array([sum(counts.rows_by_nodes) for counts in known], dtype=np.float64)
        if not rows.any():
            return None
        by_nodes = zip_longest(*(counts.rows_by_nodes for counts in known), fillvalue=0)

        def per_row(name: str) -> float:
            return float(sum(getattr(counts, name) for counts in known) / rows.sum())

        return NodeTraffic(
            rows_by_nodes=tuple(map(sum, by_nodes)),
            remote_nodes=per_row("remote_nodes"),
            direct_rows=per_row("direct_rows"),
            sent_rows=per_row("sent_rows"),
            sent_outputs=per_row("sent_outputs"),
            rows_per_step=float((rows / steps).mean()),
        )

    def open_next(self) -> None:
        """Start the next window."""
        self._at_open = list(self._latest)


def _grown(before: NodeCounts | None, after: NodeCounts | None) -> NodeCounts | None:
    """What was counted in between; None if that is unknown, or cannot be true."""
    if before is None or after is None:
        return None
    pairs = zip_longest(after.rows_by_nodes, before.rows_by_nodes, fillvalue=0)
    grown = NodeCounts(
        rows_by_nodes=tuple(now - then for now, then in pairs),
        remote_nodes=after.remote_nodes - before.remote_nodes,
        direct_rows=after.direct_rows - before.direct_rows,
        sent_rows=after.sent_rows - before.sent_rows,
        sent_outputs=after.sent_outputs - before.sent_outputs,
    )
    reached = sum(n * rows for n, rows in enumerate(grown.rows_by_nodes))
    is_possible = (
        min((0, *grown.rows_by_nodes)) == 0
        and min(grown.sent_rows, grown.sent_outputs) >= 0
        and 0 <= grown.remote_nodes <= min(reached, grown.direct_rows)
    )
    return grown if is_possible else None
