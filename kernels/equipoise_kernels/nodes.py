"""`Nodes`: the node of each rank of a group, and which rank of a node forwards another rank's rows.

Ranks of one node have fast links to each other. A row that goes to another node in two hops travels
between nodes once, to the rank with the same index there, which forwards it (DeepSeek-V3, arXiv
2412.19437, section 3.2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a group's ranks, numbered from 0 in order of their first rank."""

    of_rank: tuple[int, ...]
    """Node of each rank."""

    def __post_init__(self) -> None:
        assert tuple(dict.fromkeys(self.of_rank)) == tuple(range(self.count))

    @classmethod
    def named(cls, names: Sequence[str]) -> Self:
        """Return the nodes with these names, by rank."""
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return cls(of_rank=tuple(number[name] for name in names))

    @classmethod
    def one(cls, num_ranks: int) -> Self:
        """Return a single node of this many ranks."""
        return cls(of_rank=(0,) * num_ranks)

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> tuple[int, ...]:
        """Ranks of a node, ascending."""
        return tuple(rank for rank, one in enumerate(self.of_rank) if one == node)

    def relays(self, rank: int) -> tuple[int, ...]:
        """For each node, the rank there that forwards rows of `rank`; on its own node, itself.

        It has the same index among the ranks of its node, modulo their number if nodes are uneven.
        """
        index = self.ranks(self.of_rank[rank]).index(rank)
        nodes = (self.ranks(node) for node in range(self.count))
        return tuple(ranks[index % len(ranks)] for ranks in nodes)

    def origins(self, relay: int) -> tuple[int, ...]:
        """Ranks whose rows to its node a rank forwards, ascending, itself among them."""
        node = self.of_rank[relay]
        return tuple(r for r in range(len(self.of_rank)) if self.relays(r)[node] == relay)
