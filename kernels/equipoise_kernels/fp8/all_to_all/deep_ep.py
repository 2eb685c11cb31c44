"""The exchange by DeepEP's low-latency kernels, if installed; works between nodes too.

Translates to `deep_ep.Buffer`, whose pair of calls gave `EpBuffer`'s low-latency pair its names:
one row per (token, slot), and the receiver of the sum applies weights. DeepEP sums and orders the
rows of a slot in its own way, its flags carry no generation, and its waits have their own timeout:
only the ranks' step header keeps generations together. One exchange must end before the next
begins: of its two buffers, a call that sends clears the flags of the other, although rows for it
may have arrived and wait to be received.

Calls match the signatures and assertions of DeepEP 2.1.0 (commit dd758ca), whose `Buffer` is the
older of its two interfaces. It is compiled for the widths 2048, 2560, 3072, 4096, 5120, 6144, 7168
and 8192, and for at most 11 choices.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer, ReceivedRows
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape

# DeepEP is compiled for a few widths; this is DeepSeek-V3's.
_TESTED_DIM = 7168
ROW_MULTIPLE = 4
"""Rows that TMA moves at a time; `max_tokens` must be a multiple of it."""

# Work requests that an NVSHMEM queue holds, unless the environment overrides it.
_QUEUE_DEPTH = "1024"


class DeepEpBackend:
    """See `buffer.Backend`; rows in BF16 and the low-latency layout only.

    Raises:
        KernelInputError: DeepEP does not support the buffer's payload or size.
    """

    max_open = 1
    waited_s = 0.0  # The device waits, and nothing says how long.

    def __init__(self, shape: EpShape, *, group: dist.ProcessGroup) -> None:
        _check(shape)
        kind = importlib.import_module("deep_ep").Buffer
        num_bytes = kind.get_low_latency_rdma_size_hint(
            shape.max_tokens, shape.dim, shape.num_ranks, shape.num_slots
        )
        self._shape = shape
        self._library: Any = kind(
            group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.slots_per_rank,
        )

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`; the generation is not sent."""
        del generation
        shape = self._shape
        if layout.rows_per_slot != shape.num_ranks * shape.max_tokens:
            raise KernelInputError(
                "deep_ep only has the low-latency layout: call low_latency_dispatch"
            )
        x_TD = words_TW.view(torch.bfloat16)
        rows_SMD, counts_S, handle, _, receive = self._library.low_latency_dispatch(
            x_TD.contiguous(),
            slots_TK.contiguous(),
            shape.max_tokens,
            shape.num_slots,
            use_fp8=False,
            return_recv_hook=True,
        )

        def finish() -> ReceivedRows:
            receive()
            first_S = torch.arange(shape.slots_per_rank, device=counts_S.device)
            ends_S = first_S * rows_SMD.shape[1] + counts_S
            return ReceivedRows(
                words_NW=rows_SMD.flatten(0, 1).view(torch.int32),
                rows_S=counts_S,
                ends_S=ends_S.to(torch.int32),
                state=(slots_TK.contiguous(), handle, rows_SMD.shape),
            )

        return finish

    def check(self) -> None:
        """See `buffer.Backend`: DeepEP ends the process itself if a rank is missing."""

    def begin_combine(
        self, y_ND: Tensor, state: Any, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`; DeepEP rounds sums to BF16."""
        slots_TK, handle, shape = state
        if weights_TK is None:
            weights_TK = torch.ones(slots_TK.shape, device=slots_TK.device)
        summed, _, receive = self._library.low_latency_combine(
            y_ND.view(shape), slots_TK, weights_TK.contiguous(), handle, return_recv_hook=True
        )

        def finish() -> Tensor:
            receive()
            total_TD: Tensor = summed.float()
            return total_TD

        return finish


def doubled(x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Double rows [T, D] in slots 0 to 3, on all ranks of the default group."""
    group = dist.group.WORLD
    assert group is not None
    shape = EpShape(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        slots_per_rank=4,
        top_k=slots_TK.shape[1],
        dim=_TESTED_DIM,
        max_tokens=-(-x_TD.shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE,
        payload=Payload.BF16,
    )
    buffer = EpBuffer(shape, DeepEpBackend(shape, group=group), device=x_TD.device)
    wide_TD = x_TD.repeat(1, _TESTED_DIM // x_TD.shape[1])
    here = buffer.low_latency_dispatch(wide_TD, slots_TK)
    assert isinstance(here.rows, Tensor)
    summed_TD = buffer.combine(2 * here.rows, here.handle, weights_TK=weights_TK)
    return summed_TD[:, : x_TD.shape[1]]


def _check(shape: EpShape) -> None:
    """Raise what DeepEP would only assert, at its first call and without a remedy."""
    if shape.payload is not Payload.BF16:
        raise KernelInputError(f"deep_ep carries bf16 here, not {shape.payload.value}")
    if shape.num_ranks * shape.max_tokens % ROW_MULTIPLE != 0:
        raise KernelInputError(
            f"deep_ep needs room for a multiple of {ROW_MULTIPLE} rows a slot, not "
            f"{shape.num_ranks} ranks x {shape.max_tokens}: round max_tokens up"
        )
    depth = int(os.environ.get("NVSHMEM_QP_DEPTH", _QUEUE_DEPTH))
    if 2 * (shape.max_tokens + 1) > depth:
        raise KernelInputError(
            f"{shape.max_tokens} tokens need queues of {2 * (shape.max_tokens + 1)} requests, "
            f"deep_ep makes them for {depth}: set NVSHMEM_QP_DEPTH"
        )
