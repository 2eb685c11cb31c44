"""`EpBuffer`: sends rows to the ranks that hold their experts, and the experts' outputs back.

Contract: every rank of the group calls the same operations in the same order, even without tokens.
`dispatch` sends one row per (token, slot) pair to the rank of the slot. Received rows are grouped
by slot, within a slot by sending rank, and within a rank by token. `combine` sends outputs back and
sums a token's in float32, choice 0 first, times its weights. Both give the same bits with the
backends `reference` and `triton`; a library sums in its own order.

Every exchange carries the generation of the layout, and a mismatch between ranks is an error. Every
wait is bounded, and the error names the missing rank. A broken contract on one rank is an error on
all ranks.

Checks arguments and the order of calls; backends do the exchange. Names follow DeepEP (its
`ElasticBuffer`: dispatch with expansion, combine, handle; and the low-latency pair), with physical
slots for experts: slot = rank * slots_per_rank + place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from equipoise_kernels.errors import AllToAllError, KernelInputError
from equipoise_kernels.formats import require
from equipoise_kernels.fp8.all_to_all.flags import GENERATION_MASK
from equipoise_kernels.fp8.all_to_all.order import Incoming, RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Rows
from equipoise_kernels.fp8.all_to_all.shape import EpShape

MAX_OPEN = 2
"""Most exchanges that may be under way in a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRows:
    """What one rank sends in an exchange; of two hops, in the one between nodes."""

    rows: Sequence[int]
    """Rows to each rank."""
    outputs: Sequence[int]
    """Outputs, or sums of them, back to each rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedRows:
    """The result of a backend's dispatch."""

    words_NW: Tensor
    """Rows as int32 words."""
    rows_S: Tensor
    """Real rows of each of this rank's slots, int32."""
    ends_S: Tensor
    """Where each slot's rows end, int32; DeepGEMM's prefix-sum layout."""
    state: Any
    """What the backend needs to send outputs back."""
    sent: SentRows | None = None
    """What this rank sends; None if the host does not know."""

    @classmethod
    def placed(
        cls, words_AW: Tensor, incoming: Incoming, *, places_A: Tensor, state: Any, sent: SentRows
    ) -> Self:
        """Put rows in their places."""
        words_NW = words_AW.new_empty(int(incoming.num_rows), words_AW.shape[1])
        words_NW[places_A] = words_AW
        return cls(
            words_NW=words_NW,
            rows_S=incoming.rows_S.to(words_AW.device),
            ends_S=incoming.ends_S.to(words_AW.device),
            state=state,
            sent=sent,
        )


class Backend(Protocol):
    """Exchanges rows. A `begin` method sends; the callable it returns receives.

    Over peers' memory, `begin` never waits. Over torch.distributed, it waits for what it must know
    before it can send.
    """

    max_open: int
    """Exchanges that it keeps apart, up to MAX_OPEN."""

    @property
    def waited_s(self) -> float:
        """Total seconds of waits for other ranks, not for what this one computes."""

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """Send rows, int32 [T, W], to their slots, int64 [T, K]; generation is int64 [1]."""

    def begin_combine(
        self, y_ND: Tensor, state: Any, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """Send outputs back; the returned callable gives float32 [T, D]."""

    def check(self) -> None:
        """Raise AllToAllError if an exchange of a captured graph failed since the last check."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpHandle:
    """What `combine` needs from its dispatch; opaque."""

    num_tokens: int
    rows_shape: tuple[int, ...]
    state: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchOutput:
    """Rows for this rank's slots."""

    rows: Rows
    """[N, D], or [slots, rows of a slot, D] from the low-latency call. Rows between slots are
    unspecified: clearing them would take longer than the exchange, and nothing reads them."""
    rows_of_slot: Tensor
    """Real rows of each slot, int32 [slots]."""
    slot_ends: Tensor
    """Where each slot's rows end among all N, int32 [slots]."""
    handle: EpHandle
    """Input of `combine`."""
    sent: SentRows | None
    """What this rank sends; None if the host does not know."""


class EpBuffer:
    """One rank's end of the exchange; used from one thread and one stream.

    At most `max_open` exchanges may be under way: from the begin of a dispatch until its combine is
    received, because peers read this rank's rows until then. Combines must follow the order of
    dispatches. After an error the buffer rejects every call.
    """

    def __init__(self, shape: EpShape, backend: Backend, *, device: torch.device | str) -> None:
        self._shape = shape
        self._backend = backend
        self._device = torch.device(device)
        # On the device, so that captured graphs see a switch.
        self._generation = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._open: list[EpHandle] = []
        self._under_way = 0
        self._failed: AllToAllError | None = None

    @property
    def max_open(self) -> int:
        """Exchanges that may be under way at once."""
        return self._backend.max_open

    @property
    def waited_s(self) -> float:
        """Total seconds of waits for other ranks; those of replayed graphs count when checked."""
        return self._backend.waited_s

    def switch(self, generation: int) -> None:
        """Announce another generation of the layout from the next dispatch on."""
        self._generation.fill_(generation & GENERATION_MASK)

    def dispatch(
        self, x: Rows, slots_TK: Tensor, *, layout: RowLayout | None = None
    ) -> DispatchOutput:
        """Send rows to their slots and receive those for this rank's slots.

        Args:
            x: rows [T, D] in the buffer's payload format; T may be 0.
            slots_TK: physical slots of each row, int64; -1 for none.
            layout: how the receiver orders rows; packed by default.

        Raises:
            KernelInputError: this rank's arguments break the contract.
            AllToAllError: an exchange failed; its `ranks` names the ranks involved.
        """
        return self.begin_dispatch(x, slots_TK, layout=layout)()

    def combine(
        self, y_ND: Tensor, handle: EpHandle, *, weights_TK: Tensor | None = None
    ) -> Tensor:
        """Send outputs back, and sum those for this rank's tokens: float32 [T, D].

        Args:
            y_ND: outputs in the places of the dispatched rows, bfloat16, or float32 with FP32.
            handle: of the dispatch.
            weights_TK: float32 factor of each choice; 1 by default.

        Raises:
            KernelInputError: this rank's arguments break the contract.
            AllToAllError: an exchange failed; its `ranks` names the ranks involved.
        """
        return self.begin_combine(y_ND, handle, weights_TK=weights_TK)()

    def begin_dispatch(
        self, x: Rows, slots_TK: Tensor, *, layout: RowLayout | None = None
    ) -> Callable[[], DispatchOutput]:
        """Send as `dispatch` does; the returned callable receives."""
        shape, layout = self._shape, layout or RowLayout()
        words_TW = shape.payload.to_words(x, dim=shape.dim)
        num_tokens = words_TW.shape[0]
        if num_tokens > shape.max_tokens:
            raise KernelInputError(
                f"x has {num_tokens} rows, the buffer has room for {shape.max_tokens}: "
                "send them in parts, or make a larger buffer"
            )
        require("slots_TK", slots_TK, torch.int64, shape=(num_tokens, shape.top_k))
        self._require_device(words_TW, slots_TK)
        self._require_sound()
        assert self._under_way < self.max_open, "receive an earlier combine first"
        self._under_way += 1
        receive = self._guarded(
            lambda: self._backend.begin_dispatch(
                words_TW, slots_TK, layout=layout, generation=self._generation
            )
        )

        def finish() -> DispatchOutput:
            return self._dispatched(self._guarded(receive), layout=layout, num_tokens=num_tokens)

        return finish

    def begin_combine(
        self, y_ND: Tensor, handle: EpHandle, *, weights_TK: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Send as `combine` does; the returned callable receives and sums."""
        shape = self._shape
        require("y_ND", y_ND, shape.payload.answer_dtype, shape=handle.rows_shape)
        if weights_TK is not None:
            require("weights_TK", weights_TK, torch.float32, shape=(handle.num_tokens, shape.top_k))
            self._require_device(weights_TK)
        self._require_device(y_ND)
        self._require_sound()
        assert self._open, "its dispatch is combined already"
        assert self._open[0] is handle, "combines follow in the order of dispatches"
        del self._open[0]
        flat_ND = y_ND.reshape(-1, shape.dim)
        receive = self._guarded(
            lambda: self._backend.begin_combine(flat_ND, handle.state, weights_TK=weights_TK)
        )

        def finish() -> Tensor:
            summed_TD: Tensor = self._guarded(receive)
            self._under_way -= 1
            return summed_TD

        return finish

    def low_latency_dispatch(self, x: Rows, slots_TK: Tensor) -> DispatchOutput:
        """`dispatch` into [slots, num_ranks * max_tokens, D], each slot's rows first."""
        return self.dispatch(x, slots_TK, layout=self.low_latency_layout)

    @property
    def low_latency_layout(self) -> RowLayout:
        """The layout of `low_latency_dispatch`."""
        return RowLayout(rows_per_slot=self._shape.num_ranks * self._shape.max_tokens)

    def check(self) -> None:
        """Check the exchanges of replayed graphs; waits for the device.

        Raises:
            AllToAllError: one failed, so the sums since then are invalid.
        """
        self._require_sound()
        self._guarded(self._backend.check)

    def _dispatched(
        self, arrived: ReceivedRows, *, layout: RowLayout, num_tokens: int
    ) -> DispatchOutput:
        words, shape = arrived.words_NW, self._shape
        if layout.rows_per_slot is not None:
            words = words.view(shape.slots_per_rank, layout.rows_per_slot, -1)
        handle = EpHandle(
            num_tokens=num_tokens,
            rows_shape=(*words.shape[:-1], shape.dim),
            state=arrived.state,
        )
        self._open.append(handle)
        return DispatchOutput(
            rows=shape.payload.from_words(words, dim=shape.dim),
            rows_of_slot=arrived.rows_S,
            slot_ends=arrived.ends_S,
            handle=handle,
            sent=arrived.sent,
        )

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AllToAllError as error:
            self._failed = error
            raise

    def _require_sound(self) -> None:
        if self._failed is not None:
            raise AllToAllError(
                f"this buffer failed before ({self._failed}): form a new group",
                ranks=self._failed.ranks,
            ) from self._failed

    def _require_device(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != self._device.type:
                raise KernelInputError(
                    f"a tensor is on {tensor.device}, the buffer on {self._device}: move it"
                )
