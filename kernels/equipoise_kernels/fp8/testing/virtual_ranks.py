"""All ranks of a group in one process, on one device and stream: all send, then all receive."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer
from equipoise_kernels.fp8.all_to_all.order import RowLayout, weighted_sum
from equipoise_kernels.fp8.all_to_all.peer import PeerBackend
from equipoise_kernels.fp8.all_to_all.peer_operation import AllToAllConfig
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import virtual_windows

_TIMEOUT_S = 30.0


class VirtualRanks:
    """Ranks with their own rows, routes and weights; every expert returns its rows unchanged.

    Rows have a payload without scales. Every rank brings `num_tokens` tokens.
    """

    def __init__(
        self,
        shape: EpShape,
        *,
        num_tokens: int,
        generator: torch.Generator,
        config: AllToAllConfig | None = None,
        layout: RowLayout | None = None,
    ) -> None:
        device = generator.device
        shapes = [replace(shape, rank=rank) for rank in range(shape.num_ranks)]
        windows = virtual_windows(shape, device=device)
        self._layout = layout or RowLayout(is_fixed=True)
        self.buffers = [
            EpBuffer(
                one, PeerBackend(one, window, timeout_s=_TIMEOUT_S, config=config), device=device
            )
            for one, window in zip(shapes, windows, strict=True)
        ]

        def random(columns: int) -> Tensor:
            return torch.rand(num_tokens, columns, generator=generator, device=device)

        self.rows = [random(shape.dim).to(shape.payload.answer_dtype) for _ in shapes]
        self.slots = [random(shape.num_slots).topk(shape.top_k).indices for _ in shapes]
        self.weights = [random(shape.top_k) for _ in shapes]
        self.sums: list[Tensor] = []

    def exchange(self) -> None:
        """Dispatch and combine on all ranks, into `sums`."""
        arriving = [
            buffer.begin_dispatch(x, slots, layout=self._layout)
            for buffer, x, slots in zip(self.buffers, self.rows, self.slots, strict=True)
        ]
        here = [receive() for receive in arriving]
        returning = []
        for buffer, came, weights in zip(self.buffers, here, self.weights, strict=True):
            assert isinstance(came.rows, Tensor)
            returning.append(buffer.begin_combine(came.rows, came.handle, weights_TK=weights))
        self.sums = [receive() for receive in returning]

    def expected(self) -> list[Tensor]:
        """What `sums` must be, to the last bit."""
        return [
            weighted_sum(x.unsqueeze(1).expand(-1, weights.shape[1], -1), weights)
            for x, weights in zip(self.rows, self.weights, strict=True)
        ]
