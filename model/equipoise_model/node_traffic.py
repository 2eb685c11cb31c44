"""`NodeTraffic`: counts how a rank's rows spread over nodes, on the device.

A row is a token in one MoE layer. What is counted decides between one and two hops, and tells
operators how much a layout loads the network between nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from equipoise_kernels.nodes import Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpread:
    """How one rank's rows have spread over nodes; counts only grow."""

    rows_by_nodes: tuple[int, ...]
    """Rows by the number of nodes that hold the slots they chose; element n is for n nodes."""
    remote_nodes: int
    """Nodes other than this rank's with slots that rows chose: what two hops send between nodes."""
    direct_rows: int
    """What one hop sends between nodes for the same rows."""
    sent_rows: int
    """Rows that this rank sent to other nodes."""
    sent_outputs: int
    """Outputs that this rank sent to other nodes."""


class NodeTraffic:
    """The counters of one rank of `nodes`. Counting never waits for the device."""

    def __init__(self, nodes: Nodes, *, rank: int, device: torch.device) -> None:
        self.nodes = nodes
        self._rank = rank
        self._node_of_rank_R = torch.tensor(nodes.of_rank, device=device)
        self._numbers_M = torch.arange(nodes.count + 1, device=device)
        self._numbers_M[0] = -1  # Padding rows reach no node, and are not counted.
        self._rows_M = torch.zeros_like(self._numbers_M)
        self._totals = torch.zeros(4, dtype=torch.int64, device=device)

    def empty(self) -> Self:
        """Return other counters, of zero."""
        return type(self)(self.nodes, rank=self._rank, device=self._totals.device)

    def add(self, other: Self) -> None:
        """Add what other counters have counted."""
        self._rows_M += other._rows_M
        self._totals += other._totals

    def clear(self) -> None:
        """Set all counters to zero."""
        self._rows_M.zero_()
        self._totals.zero_()

    def nodes_of(self, ranks_TK: Tensor) -> Tensor:
        """Return the nodes of ranks; the number of nodes for a rank below 0, which is none."""
        nodes_TK = self._node_of_rank_R[ranks_TK.clamp(min=0)]
        return nodes_TK.masked_fill(ranks_TK < 0, self.nodes.count)

    def choose(self, ranks_TK: Tensor) -> Tensor:
        """Count the nodes of rows with slots on these ranks.

        Returns which nodes need which rows, bool [nodes, T].
        """
        shape, device = (self.nodes.count + 1, len(ranks_TK)), ranks_TK.device
        needed_NT = torch.zeros(shape, dtype=torch.bool, device=device)
        needed_NT = needed_NT.scatter_(0, self.nodes_of(ranks_TK).T, value=True)[:-1]
        count_T = needed_NT.sum(0)
        self._rows_M += (count_T.unsqueeze(1) == self._numbers_M).sum(0)
        own_T = needed_NT[self.nodes.of_rank[self._rank]]
        self._totals[0] += count_T.sum() - own_T.sum()
        return needed_NT

    def remote_pairs(self, ranks_TK: Tensor) -> Tensor:
        """Count choices of ranks on other nodes, int64 []."""
        return ((ranks_TK >= 0) & (self.nodes_of(ranks_TK) != self.nodes.of_rank[self._rank])).sum()

    def between(self, numbers: Sequence[int]) -> int:
        """Add up the numbers of other nodes' ranks, given one for each rank."""
        of_rank, own = self.nodes.of_rank, self.nodes.of_rank[self._rank]
        return sum(n for node, n in zip(of_rank, numbers, strict=True) if node != own)

    def note(self, *, direct: Tensor | int, rows: Tensor | int, outputs: Tensor | int) -> None:
        """Count rows and outputs sent to other nodes, and rows that one hop would have sent."""
        self._totals[1] += direct
        self._totals[2] += rows
        self._totals[3] += outputs

    def spread(self) -> NodeSpread:
        """Return the counts; waits for the device."""
        remote_nodes, direct_rows, sent_rows, sent_outputs = self._totals.tolist()
        return NodeSpread(
            rows_by_nodes=tuple(self._rows_M.tolist()),
            remote_nodes=remote_nodes,
            direct_rows=direct_rows,
            sent_rows=sent_rows,
            sent_outputs=sent_outputs,
        )
