"""`ExpertParallel`: carries rows to the ranks that hold their experts, and back.

The one place that turns logical experts into physical slots, and the one that counts rows per slot.
No row is ever dropped, however skewed the routing.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise_kernels.expert_load import count_rows
from equipoise_kernels.permute import permute_rows, slot_order, unpermute_rows
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.config import ModelConfig
from equipoise_model.experts import ExpertSlots
from equipoise_model.placement import Placement
from equipoise_model.router import Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLoad:
    """Rows that one rank's slots received in one generation: int64 [layers, slots of the rank]."""

    generation: int
    rows_LS: npt.NDArray[np.int64]


class ExpertParallel:
    """One rank's part in dispatching a model's rows; used from the engine's thread only."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows_LS = _no_rows(placement)
        self._previous: SlotLoad | None = None
        self._num_tokens_seen = 0

    @classmethod
    def local(cls, config: ModelConfig, placement: Placement | None = None) -> Self:
        """One rank that holds every expert: slot e holds expert e, unless a placement is given."""
        return cls(
            placement
            or Placement.identity(
                num_layers=config.num_moe_layers, num_experts=config.n_routed_experts
            )
        )

    @property
    def placement(self) -> Placement:
        """The running generation's."""
        return self._placement

    def begin_step(self, *, num_tokens: int) -> "ExpertStep":
        """Start a forward step of `num_tokens` rows of this rank; 0 is fine."""
        first = self._num_tokens_seen
        self._num_tokens_seen += num_tokens
        return ExpertStep(
            placement=self._placement,
            token_ids_T=torch.arange(first, first + num_tokens),
            rows_LS=self._rows_LS,
        )

    def switch(self, placement: Placement) -> None:
        """Use another placement from the next step on; its experts are in their slots already."""
        assert placement.generation > self._placement.generation
        assert placement.slots_per_rank == self._placement.slots_per_rank
        self._previous = self._load()
        self._placement = placement
        self._rows_LS = _no_rows(placement)

    def loads(self) -> tuple[SlotLoad, ...]:
        """Copies of what was counted in this generation, and finally in the one before if any.

        Counts only grow within a generation. To be called between steps.
        """
        return (self._load(),) if self._previous is None else (self._load(), self._previous)

    def _load(self) -> SlotLoad:
        return SlotLoad(
            generation=self._placement.generation, rows_LS=self._rows_LS.numpy(force=True).copy()
        )


class ExpertStep:
    """One forward step; its MoE layers call `run` once each, in order."""

    def __init__(self, *, placement: Placement, token_ids_T: Tensor, rows_LS: Tensor) -> None:
        self._placement = placement
        self._token_ids_T = token_ids_T
        self._rows_LS = rows_LS
        self._layer = 0

    def run(self, x_TD: Tensor, routing: Routing, experts: ExpertSlots) -> Tensor:
        """The routed experts' weighted sum for rows [T, D], in the rows' dtype."""
        layer = self._layer
        self._layer += 1
        slots_TK = self._choose_slots(routing.expert_ids_TK, layer=layer)
        slots_N, top_k = slots_TK.flatten(), slots_TK.shape[1]
        order_N = slot_order(slots_N)
        rows_S = count_rows(slots_N, num_slots=experts.num_slots)
        self._rows_LS[layer] += rows_S
        y_ND = experts(permute_rows(x_TD, order_N, top_k=top_k), rows_S.tolist())
        return _combine(unpermute_rows(y_ND, order_N), routing.weights_TK).to(x_TD.dtype)

    def _choose_slots(self, expert_ids_TK: Tensor, *, layer: int) -> Tensor:
        replicas_TK = choose_replicas(
            expert_ids_TK,
            self._token_ids_T,
            self._placement.replica_count[layer],
            layer=layer,
        )
        return self._placement.slots_of_expert[layer][expert_ids_TK, replicas_TK]


def _combine(y_ND: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum over a row's choices in float32, choice 0 first.

    The fixed order makes the sum independent of the layout, to the last bit.
    """
    y_TKD = y_ND.float().unflatten(0, weights_TK.shape)
    weighted_TKD = y_TKD * weights_TK.unsqueeze(-1)
    total_TD, *others = weighted_TKD.unbind(1)
    for choice_TD in others:
        total_TD = total_TD + choice_TD
    return total_TD


def _no_rows(placement: Placement) -> Tensor:
    return torch.zeros(placement.num_layers, placement.slots_per_rank, dtype=torch.int64)
