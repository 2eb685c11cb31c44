"""`ExpertParallel`: one rank's part in sending rows to experts. Its steps are `ExpertStep`s."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.nodes import Nodes
from equipoise_model.config import ModelConfig
from equipoise_model.exchange import RowExchange
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.node_traffic import NodeSpread, NodeTraffic
from equipoise_model.overlap import Order
from equipoise_model.placement import PlacementTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLoad:
    """The assignments that one rank's slots received in one generation."""

    generation: int
    slot_load_LS: npt.NDArray[np.int64]
    """Assignments, int64 [layers, slots per rank]."""


class ExpertParallel:
    """Dispatches a model's rows on one rank; used from the engine's thread only.

    It counts on the device of its placement's tables, which must be the model's. Construct it with
    `local` or `distributed`.
    """

    def __init__(
        self,
        placement: PlacementTables,
        *,
        ranks: RowExchange,
        exchange: SlotExchange | None = None,
        pace_s_per_row: float = 0.0,
        order: Order = Order.PREFILL,
        traffic: NodeTraffic | None = None,
        sums_on_nodes: bool = False,
    ) -> None:
        assert placement.num_ranks == ranks.count
        assert exchange is None or not ranks.alone
        self._exchange = exchange
        self._traffic = traffic
        self._sums_on_nodes = sums_on_nodes
        self._is_two_hop = self._is_balanced = False
        # Only in this order do exchanges never overlap each other.
        self._order = order if exchange is None or exchange.overlaps else Order.DECODE
        self._pace_s_per_row = pace_s_per_row
        self._placement = placement
        self._ranks = ranks
        self._slot_load_LS = _no_rows(placement)
        self._previous: SlotLoad | None = None
        self._num_tokens_seen = 0
        self._agreed: Sequence[Sequence[int]] | None = None

    @classmethod
    def local(
        cls,
        config: ModelConfig,
        placement: PlacementTables | None = None,
        *,
        device: torch.device | None = None,
        pace_s_per_row: float = 0.0,
    ) -> Self:
        """One rank that holds every expert; slot e holds expert e, unless a placement is given.

        Without one, its layers include those of the multi-token-prediction modules.

        Its tables move to `device`, if given. `pace_s_per_row` is as in `distributed`.
        """
        placement = placement or PlacementTables.identity(
            num_layers=config.num_expert_layers, num_experts=config.num_placed_experts
        )
        placement = placement if device is None else placement.to(device)
        ranks = RowExchange(group=None, rank=0, count=1)
        return cls(placement, ranks=ranks, pace_s_per_row=pace_s_per_row)

    @classmethod
    def distributed(
        cls,
        placement: PlacementTables,
        *,
        group: dist.ProcessGroup,
        exchange: SlotExchange | None = None,
        pace_s_per_row: float = 0.0,
        order: Order = Order.PREFILL,
        nodes: Nodes | None = None,
        sums_on_nodes: bool = False,
    ) -> Self:
        """This process's rank of a group; all ranks start with the same placement.

        `exchange` sends rows between ranks of an FP8 model; it starts with that placement's
        generation. In the plain plane, a layer's experts take at least `pace_s_per_row` seconds for
        each assignment that this rank receives; the rank sleeps for the rest. The micro-batches of
        a step take turns in an `order` that is the same on all ranks, or as in decode if the
        exchange keeps only one open.

        `nodes` are those of the ranks, one by default. With `sums_on_nodes`, outputs are summed on
        their nodes in steps of two hops.
        """
        ranks, traffic = RowExchange.of_group(group), None
        if nodes is not None and nodes.count > 1:
            device = placement.replica_count.device
            traffic = NodeTraffic(nodes, rank=ranks.rank, device=device)
        return cls(
            placement,
            ranks=ranks,
            exchange=exchange,
            pace_s_per_row=pace_s_per_row,
            order=order,
            traffic=traffic,
            sums_on_nodes=sums_on_nodes,
        )

    @property
    def waited_s(self) -> float:
        """Total seconds spent exchanging rows with other ranks."""
        return self._ranks.waited_s + (self._exchange.waited_s if self._exchange else 0.0)

    @property
    def placement(self) -> PlacementTables:
        """The current generation's tables."""
        return self._placement

    @property
    def spread(self) -> NodeSpread | None:
        """How this rank's rows have spread over nodes; None if there is only one."""
        return None if self._traffic is None else self._traffic.spread()

    def agree(
        self,
        tokens_by_batch: Sequence[Sequence[int]],
        *,
        is_two_hop: bool = False,
        is_balanced: bool = False,
    ) -> None:
        """Set how many rows each rank brings to each micro-batch of the next step.

        `is_two_hop` sends rows of this step and those that follow over a rank of each node;
        `is_balanced` balances their replicas in each step. All this follows from the step's
        headers. Without it, a distributed `begin_step` gathers the
        numbers of a single micro-batch, at the cost of one exchange.
        """
        assert all(len(tokens_by_rank) == self._ranks.count for tokens_by_rank in tokens_by_batch)
        self._is_two_hop = is_two_hop and self._traffic is not None
        self._is_balanced = is_balanced and not self._ranks.alone
        self._agreed = tokens_by_batch

    def begin_step(self, *, num_tokens: int) -> ExpertStep:
        """Start a forward step with `num_tokens` rows of this rank, possibly 0.

        Raises:
            ExchangeError: another rank did not answer when the numbers of rows were gathered.
        """
        tokens_by_batch, self._agreed = self._agreed, None
        if tokens_by_batch is None:
            tokens_by_batch = self._ranks.swap_numbers([[num_tokens] * self._ranks.count])
        tokens_by_rank = tuple(map(sum, zip(*tokens_by_batch, strict=True)))
        assert tokens_by_rank[self._ranks.rank] == num_tokens
        # Ranks take turns in one sequence, so that their choices of replicas interleave too.
        first = self._num_tokens_seen
        self._num_tokens_seen += num_tokens
        turns_T = torch.arange(first, first + num_tokens, device=self._slot_load_LS.device)
        token_ids_T = turns_T * self._ranks.count + self._ranks.rank
        return ExpertStep(
            placement=self._placement,
            ranks=self._ranks,
            tokens_by_rank=tokens_by_rank,
            tokens_by_batch=tokens_by_batch,
            order=self._order,
            token_ids_T=token_ids_T,
            slot_load_LS=self._slot_load_LS,
            exchange=self._exchange,
            pace_s_per_row=self._pace_s_per_row,
            traffic=self._traffic,
            is_two_hop=self._is_two_hop,
            sums_on_nodes=self._sums_on_nodes,
            is_balanced=self._is_balanced,
        )

    def close(self) -> None:
        """Release the group and the memory of the exchange; no step may follow."""
        if self._exchange is not None:
            self._exchange.close()
        self._ranks.close()

    def switch(self, placement: PlacementTables) -> None:
        """Use another placement from the next step on; its experts must be in their slots."""
        assert placement.generation > self._placement.generation
        assert placement.slots_of_expert.shape[:2] == self._placement.slots_of_expert.shape[:2]
        assert placement.slots_per_rank == self._placement.slots_per_rank
        assert placement.num_ranks == self._placement.num_ranks
        self._previous = self._load()
        self._placement = placement
        self._slot_load_LS = _no_rows(placement)
        if self._exchange is not None:
            self._exchange.switch(placement.generation)

    def loads(self) -> tuple[SlotLoad, ...]:
        """Return copies of this generation's counters and of the previous one's final counters.

        Counters only grow within a generation. Call between steps.
        """
        return (self._load(),) if self._previous is None else (self._load(), self._previous)

    def _load(self) -> SlotLoad:
        return SlotLoad(
            generation=self._placement.generation,
            slot_load_LS=self._slot_load_LS.numpy(force=True).copy(),
        )


def _no_rows(placement: PlacementTables) -> Tensor:
    shape = (placement.num_layers, placement.slots_per_rank)
    return torch.zeros(shape, dtype=torch.int64, device=placement.replica_count.device)
