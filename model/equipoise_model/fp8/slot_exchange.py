"""`SlotExchange`: sends rows to the ranks of their slots and back, for the FP8 model.

Owns how a step's rows pass through one of the kernels' `EpBuffer`s: in which format, in how many
parts, and that a failure becomes an `ExchangeError` which names the ranks. A buffer belongs to one
group of ranks, so every new group opens a new one. Knows nothing of layouts: slots are numbers.

Every rank makes the same calls in the same order, even without rows. A part has at most as many
rows as the buffer has room for; all ranks know the number of parts from the step's header.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import AllToAllError, PeerMissingError
from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.all_to_all.opening import OpenedBuffer, open_buffer
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.gemm.schedule import GROUP_ALIGNMENT
from equipoise_model.exchange import ExchangeError
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.ranges import named

PART_TOKENS = 256
"""Rows per rank and part, unless decode steps are larger; memory grows with it."""

# Codes must start at multiples of this many bytes.
_ROW_BYTES = 16


def exchange_tokens(max_step_tokens: int, *, max_graph_rows: int) -> int:
    """Rows per rank that an exchange has room for, and so the rows of a part."""
    return max(max_graph_rows, min(max_step_tokens, PART_TOKENS))


class SlotExchange:
    """One rank's end, used from the engine's thread; all ranks call `open` together.

    `max_captured_rows` is the largest step that all ranks can capture. `waited_s` is the total time
    in exchanges; with a GPU, only the time that the host waited.
    """

    def __init__(
        self, opened: OpenedBuffer, *, max_captured_rows: int, timeout_s: float, generation: int
    ) -> None:
        self._opened: OpenedBuffer | None = opened
        self.max_captured_rows = max_captured_rows
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        self.switch(generation)

    @classmethod
    def open(
        cls,
        shape: EpShape,
        *,
        max_captured_rows: int,
        generation: int,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
    ) -> Self:
        """Open a buffer with all ranks of a group, within the group's own timeout.

        Its room is the largest that any rank asks for; steps are captured up to the smallest limit.

        Raises:
            RuntimeError: another rank is gone, or no backend works for all ranks.
        """
        wishes = torch.tensor([shape.max_tokens, -max_captured_rows])
        dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=group)
        max_tokens, captured = int(wishes[0]), -int(wishes[1])
        roomy = replace(shape, max_tokens=max_tokens, payload=Payload.FP8)
        return cls(
            open_buffer(roomy, group=group, device=device, timeout_s=timeout_s),
            max_captured_rows=min(captured, max_tokens),
            timeout_s=timeout_s,
            generation=generation,
        )

    @property
    def backend(self) -> str:
        """The backend that carries rows, as EQUIPOISE_KERNELS names it."""
        return self._live.backend

    @property
    def passed_over(self) -> str:
        """Preferred backends that do not work here, with their reasons; may be empty."""
        return "; ".join(f"{name}: {why}" for name, why in self._live.passed_over.items())

    @property
    def capture_obstacle(self) -> str | None:
        """Why a step with this exchange cannot be captured in a CUDA graph, or None."""
        return self._live.capture_obstacle

    def switch(self, generation: int) -> None:
        """Announce another generation of the layout from the next step on."""
        self._live.buffer.switch(generation)

    def run(
        self,
        x_TD: Tensor,
        rows: QuantizedRows,
        *,
        slots_TK: Tensor,
        weights_TK: Tensor,
        experts: Fp8ExpertSlots,
        most_tokens: int,
        load_S: Tensor,
        is_fixed: bool,
    ) -> Tensor:
        """Return each row's weighted sum over its slots on any rank, [T, D] in the rows' dtype.

        `rows` is `x_TD` quantised; the backend's format decides which of the two is sent. No rank
        brings more than `most_tokens` rows. Assignments received for this rank's slots are counted
        in `load_S`. With `is_fixed`, shapes and kernels depend on `most_tokens` alone, as in a
        captured step.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        opened = self._live
        shape, buffer, sums = opened.shape, opened.buffer, []
        room = shape.max_tokens
        for first in range(0, max(most_tokens, 1), room):
            part = slice(first, first + room)
            most = min(room, most_tokens - first)
            # Of one slot if routing were even; kernels then do not depend on what arrives.
            expected = -(-most * shape.num_ranks * shape.top_k // shape.num_slots)
            if opened.is_low_latency:
                with self._reporting():
                    came = buffer.low_latency_dispatch(x_TD[part], slots_TK[part])
                assert isinstance(came.rows, Tensor)
                with named("experts"):
                    y_ND = experts.run_padded(came.rows, came.rows_of_slot, expected_rows=expected)
            else:
                sent = QuantizedRows(codes=rows.codes[part], scales=rows.scales[part])
                layout = RowLayout(alignment=GROUP_ALIGNMENT, most_tokens=most, is_fixed=is_fixed)
                with self._reporting():
                    came = buffer.dispatch(sent, slots_TK[part], layout=layout)
                assert isinstance(came.rows, QuantizedRows)
                with named("experts"):
                    y_ND = experts.run_packed(
                        _aligned(came.rows), came.slot_ends, expected_rows=expected
                    )
            load_S += came.rows_of_slot
            with self._reporting():
                sums.append(buffer.combine(y_ND, came.handle, weights_TK=weights_TK[part]))
        summed_TD = sums[0] if len(sums) == 1 else torch.cat(sums)
        return summed_TD.to(x_TD.dtype)

    def check(self) -> None:
        """Check the exchanges of a replayed graph; waits for the device.

        Raises:
            ExchangeError: one of them failed.
        """
        with self._reporting():
            self._live.buffer.check()

    def close(self) -> None:
        """Release the memory; the exchange can no longer be used."""
        self._opened = None

    @property
    def _live(self) -> OpenedBuffer:
        assert self._opened is not None, "it is closed"
        return self._opened

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Raise the buffer's errors as `ExchangeError`, and add the time to `waited_s`."""
        began = time.perf_counter()
        try:
            with named("exchange"):
                yield
        except AllToAllError as error:
            late = isinstance(error, PeerMissingError)
            # A broken connection shows at once; only an exchange that waited in full timed out.
            if late and time.perf_counter() - began >= self._timeout_s:
                raise ExchangeError(f"an exchange of rows timed out: {error}") from error
            raise ExchangeError(f"an exchange of rows failed: {error}") from error
        finally:
            self.waited_s += time.perf_counter() - began


def _aligned(rows: QuantizedRows) -> QuantizedRows:
    """Align rows as matrix products require; copies them only if scales are between rows."""
    if rows.codes.stride(0) % _ROW_BYTES == 0:
        return rows
    # A contiguous tensor of a single row may keep its old stride.
    codes = rows.codes.clone(memory_format=torch.contiguous_format)
    return QuantizedRows(codes=codes, scales=rows.scales)
