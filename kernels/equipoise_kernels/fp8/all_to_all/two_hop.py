"""The exchange in two hops by torch.distributed: a token crosses to each node only once.

Rows go to the rank with the same index in each node that needs them, their relay, which forwards
one row per slot within the node. Outputs return the same way, and the rank that sent the rows sums
them: rows come in the order, and sums have the bits, of one hop. Optionally, relays sum outputs
first, in float32 and in the order of a token's choices. Then only as many sums as rows cross, but
bits depend on which choices share a node.

Headers go from end to end before any row, so that a missing rank is not mistaken for its relay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.fp8.all_to_all.buffer import MAX_OPEN, ReceivedRows, SentRows
from equipoise_kernels.fp8.all_to_all.group import GroupCollectives
from equipoise_kernels.fp8.all_to_all.order import Incoming, Outgoing, RowLayout, weighted_sum
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.nodes import Nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Own:
    """This rank's T tokens."""

    slots_TK: Tensor
    needed_NT: Tensor
    """Which nodes need which tokens, bool [nodes, T]."""
    tokens_C: Tensor
    """Tokens that cross, by relay."""
    cross_R: list[int]
    """How many go to each relay."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Relayed:
    """B rows that this rank forwards within its node, by the rank they come from, then token."""

    pairs_P: Tensor
    """Their assignments on the node as they are forwarded: by slot's rank, origin, slot, token."""
    return_P: Tensor
    """The order in which outputs return: by origin, slot, token."""
    came_R: list[int]
    """Rows from each rank."""
    forwarded_R: list[int]
    """Assignments forwarded to each rank."""
    returned_R: list[int]
    """Assignments of each rank's rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TwoHopState:
    own: _Own
    relayed: _Relayed
    places_A: Tensor
    """Index of each row for this rank's slots."""
    received_R: list[int]
    """How many of them came from each relay."""


class TwoHopBackend:
    """See `buffer.Backend`, for ranks of several nodes.

    A dispatch begins with a wait for headers, and a combine with one for outputs within the node.
    """

    max_open = MAX_OPEN

    def __init__(
        self,
        shape: EpShape,
        *,
        nodes: Nodes,
        group: dist.ProcessGroup,
        timeout_s: float,
        sums_on_nodes: bool = False,
    ) -> None:
        assert len(nodes.of_rank) == shape.num_ranks
        self._shape = shape
        self._nodes = nodes
        self._node = nodes.of_rank[shape.rank]
        self._sums_on_nodes = sums_on_nodes
        self._group = GroupCollectives(shape, group=group, timeout_s=timeout_s)
        # Ranks whose rows come by each relay of this node.
        self._origins = {relay: nodes.origins(relay) for relay in nodes.ranks(self._node)}

    @property
    def waited_s(self) -> float:
        """See `buffer.Backend`."""
        return self._group.waited_s

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`."""
        shape, num_words = self._shape, words_TW.shape[1]
        outgoing, own = Outgoing.of_slots(slots_TK, shape), self._own(slots_TK)
        cross_R = torch.tensor(own.cross_R)
        headers_RH = self._group.begin_headers(
            torch.cat([outgoing.counts_RS.cpu(), cross_R.unsqueeze(1)], dim=1),
            generation=generation,
            status=outgoing.status,
        )()
        arrived_RS, came_R = headers_RH[:, :-1], headers_RH[:, -1].tolist()
        message_TW = torch.cat([words_TW, slots_TK.to(torch.int32)], dim=1)
        receive = self._group.begin_rows(message_TW[own.tokens_C], send=own.cross_R, receive=came_R)

        def finish() -> ReceivedRows:
            message_BW = receive()
            relayed = self._relayed(message_BW[:, num_words:].to(torch.int64), came_R)
            received_R = [0] * shape.num_ranks
            for relay, origins in self._origins.items():
                received_R[relay] = int(arrived_RS[list(origins)].sum())
            words_AW = self._group.begin_rows(
                message_BW[relayed.pairs_P // shape.top_k, :num_words],
                send=relayed.forwarded_R,
                receive=received_R,
            )()
            incoming = Incoming.of_counts(arrived_RS, layout)
            senders = [origin for origins in self._origins.values() for origin in origins]
            places_A = incoming.places(senders).to(words_AW.device)
            state = _TwoHopState(own=own, relayed=relayed, places_A=places_A, received_R=received_R)
            outputs = came_R if self._sums_on_nodes else relayed.returned_R
            sent = SentRows(rows=own.cross_R, outputs=outputs)
            return ReceivedRows.placed(
                words_AW, incoming, places_A=places_A, state=state, sent=sent
            )

        return finish

    def begin_combine(
        self, y_ND: Tensor, state: _TwoHopState, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`."""
        own, relayed = state.own, state.relayed
        weights = self._begin_weights(state, weights_TK) if self._sums_on_nodes else None
        answers_PW = self._group.begin_rows(
            y_ND[state.places_A].view(torch.int32),
            send=state.received_R,
            receive=relayed.forwarded_R,
        )()
        if weights is not None:
            return self._begin_sums(answers_PW.view(y_ND.dtype), weights(), state)
        order_N, by_relay_R = self._returning(own.slots_TK)
        receive = self._group.begin_rows(
            answers_PW[relayed.return_P], send=relayed.returned_R, receive=by_relay_R
        )

        def finish() -> Tensor:
            back_NW = receive()
            words_NW = back_NW.new_zeros(own.slots_TK.numel(), back_NW.shape[1])
            words_NW[order_N] = back_NW
            answers_ND = words_NW.view(y_ND.dtype)
            return weighted_sum(answers_ND.view(-1, self._shape.top_k, self._shape.dim), weights_TK)

        return finish

    def check(self) -> None:
        """See `buffer.Backend`: nothing is captured, so every fault was raised at once."""

    def _begin_weights(
        self, state: _TwoHopState, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """Send the weights of this rank's tokens to their relays, and receive relayed ones."""
        own = state.own
        if weights_TK is None:
            weights_TK = torch.ones(own.slots_TK.shape, device=own.slots_TK.device)
        words_CK = weights_TK[own.tokens_C].view(torch.int32)
        receive = self._group.begin_rows(words_CK, send=own.cross_R, receive=state.relayed.came_R)
        return lambda: receive().view(torch.float32)

    def _begin_sums(
        self, answers_PD: Tensor, weights_BK: Tensor, state: _TwoHopState
    ) -> Callable[[], Tensor]:
        """Sum outputs of relayed rows, send the sums back, and add up those of own tokens."""
        own, relayed, dim = state.own, state.relayed, self._shape.dim
        y_ND = answers_PD.new_zeros(weights_BK.numel(), dim)
        y_ND[relayed.pairs_P] = answers_PD
        sums_BD = weighted_sum(y_ND.view(*weights_BK.shape, dim), weights_BK)
        receive = self._group.begin_rows(
            sums_BD.view(torch.int32), send=relayed.came_R, receive=own.cross_R
        )

        def finish() -> Tensor:
            sums_CD = receive().view(torch.float32)
            total_TD = sums_CD.new_zeros(own.needed_NT.shape[1], dim)
            by_rank = sums_CD.split(own.cross_R)
            # Nodes in their order, so that a token's sum does not depend on the rank it is on.
            for node, relay in enumerate(self._nodes.relays(self._shape.rank)):
                total_TD[own.needed_NT[node]] += by_rank[relay]
            return total_TD

        return finish

    def _own(self, slots_TK: Tensor) -> _Own:
        shape, nodes = self._shape, self._nodes
        node_of_slot = torch.tensor(nodes.of_rank).repeat_interleave(shape.slots_per_rank)
        is_slot_TK = (slots_TK >= 0) & (slots_TK < shape.num_slots)
        nodes_TK = node_of_slot.to(slots_TK.device)[slots_TK.clamp(0, shape.num_slots - 1)]
        needed_NT = torch.zeros(
            nodes.count + 1, len(slots_TK), dtype=torch.bool, device=slots_TK.device
        )
        nodes_TK = nodes_TK.masked_fill(~is_slot_TK, nodes.count)
        needed_NT = needed_NT.scatter_(0, nodes_TK.T, value=True)[:-1]
        via_RT = needed_NT.new_zeros(shape.num_ranks, len(slots_TK))
        via_RT[list(nodes.relays(shape.rank))] = needed_NT
        return _Own(
            slots_TK=slots_TK,
            needed_NT=needed_NT,
            tokens_C=via_RT.nonzero()[:, 1],
            cross_R=via_RT.sum(1).tolist(),
        )

    def _relayed(self, slots_BK: Tensor, came_R: list[int]) -> _Relayed:
        shape, device = self._shape, slots_BK.device
        is_own_R = torch.tensor([node == self._node for node in self._nodes.of_rank], device=device)
        slots_N = slots_BK.flatten()
        ranks_N = slots_N.clamp(min=0) // shape.slots_per_rank
        pairs_P = ((slots_N >= 0) & is_own_R[ranks_N]).nonzero().squeeze(1)
        came = torch.tensor(came_R, device=device)
        origins_B = torch.arange(shape.num_ranks, device=device).repeat_interleave(came)
        origins_P, ranks_P = origins_B[pairs_P // shape.top_k], ranks_N[pairs_P]
        # Within a rank, slots are in the order of all slots.
        forward = (ranks_P * shape.num_ranks + origins_P) * shape.num_slots + slots_N[pairs_P]
        order_P = forward.argsort(stable=True)
        home = (origins_P * shape.num_slots + slots_N[pairs_P])[order_P]
        return _Relayed(
            pairs_P=pairs_P[order_P],
            return_P=home.argsort(stable=True),
            came_R=came_R,
            forwarded_R=torch.bincount(ranks_P, minlength=shape.num_ranks).tolist(),
            returned_R=torch.bincount(origins_P, minlength=shape.num_ranks).tolist(),
        )

    def _returning(self, slots_TK: Tensor) -> tuple[Tensor, list[int]]:
        """Own assignments in the order in which outputs come back, and how many by each relay."""
        shape, device = self._shape, slots_TK.device
        relays = self._nodes.relays(shape.rank)
        relay_of_rank = torch.tensor([relays[node] for node in self._nodes.of_rank], device=device)
        slots_N = slots_TK.flatten()
        pairs_M = (slots_N >= 0).nonzero().squeeze(1)
        relays_M = relay_of_rank[slots_N[pairs_M] // shape.slots_per_rank]
        order_M = (relays_M * shape.num_slots + slots_N[pairs_M]).argsort(stable=True)
        counts: list[int] = torch.bincount(relays_M, minlength=shape.num_ranks).tolist()
        return pairs_M[order_M], counts
