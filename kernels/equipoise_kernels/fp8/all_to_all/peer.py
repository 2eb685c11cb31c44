"""The exchange by Triton over peer pointers: ranks of one node write into each other's windows.

Launches kernels and bounds waits. The host checks the flags after every wait, except during CUDA
graph capture: call `check` after replays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.all_to_all.buffer import MAX_OPEN, ReceivedRows
from equipoise_kernels.fp8.all_to_all.flags import (
    NO_FAULT,
    SEQUENCE_MASK,
    raise_faults,
    sequence_of,
)
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.peer_kernels import (
    order_pairs_kernel,
    receive_rows_kernel,
    send_rows_kernel,
    sum_answers_kernel,
    wait_flags_kernel,
)
from equipoise_kernels.fp8.all_to_all.peer_operation import (
    ALL_TO_ALL,
    ORDER_PAIRS,
    ORDER_WARPS,
    VECTOR_WORDS,
    AllToAllConfig,
)
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import PeerWindow, WindowMap
from equipoise_kernels.fp8.jit import is_interpreting, next_power_of_two

# Polling a flag takes a GPU about a microsecond, and the interpreter a hundred times that.
_POLLS_PER_S = 1_000_000.0
_POLLS_PER_LAUNCH = 20_000
# Of an exchange that no rank ever makes while others are measured.
_FAR_AHEAD = 1 << 30
_MOST_POLLS = 2**31 - 1
_PAUSE_S = 0.0005
# In the interpreter, polling takes the processor from the rank that is waited for.
_INTERPRETER_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PeerState:
    num_tokens: int
    flag: Tensor
    places_N: Tensor
    """Index of each pair's answer, int32."""
    incoming_3RS: Tensor
    """The table of incoming rows, see `peer_kernels`."""


class PeerBackend:
    """See `buffer.Backend`. All launches use one stream; waits are bounded by `timeout_s`."""

    max_open = MAX_OPEN

    def __init__(
        self,
        shape: EpShape,
        window: PeerWindow,
        *,
        timeout_s: float,
        config: AllToAllConfig | None = None,
    ) -> None:
        self._shape = shape
        self._map = WindowMap.of_shape(shape)
        self._window = window
        self._config = config or ALL_TO_ALL.config(rows=shape.max_tokens)
        self._sequence = self._numbers(1, dtype=torch.int64).zero_()
        self._done_R = self._numbers(shape.num_ranks).zero_()
        self.waited_s = 0.0
        # Of captured graphs, until `check` reads them: flags of faulty ranks, this rank's flag, and
        # how often its waits have polled in vain.
        self._faults = self._numbers(shape.num_ranks + 2, dtype=torch.int64)
        self._forget_faults()
        # On the device, because a captured wait must know the outcome of those before it.
        self._polls_once = self._numbers(1).fill_(1)
        self._polls_launch = self._numbers(1).fill_(_POLLS_PER_LAUNCH)
        self._polls_captured = self._numbers(1)
        self._polls_per_s = _POLLS_PER_S
        self.wait_at_most(timeout_s)

    def wait_at_most(self, timeout_s: float) -> None:
        """Bound the waits of all exchanges that begin from now on, and that are captured."""
        self._timeout_s = timeout_s
        self._polls_captured.fill_(min(int(timeout_s * self._polls_per_s), _MOST_POLLS))

    def measure_polls(self) -> None:
        """Measure how fast the device polls: captured exchanges count their waits in polls."""
        flag = (self._sequence + _FAR_AHEAD) & SEQUENCE_MASK
        seen, nothing = self._seen(), self._table()
        _settle(seen.device)
        began = time.monotonic()
        self._look(self._polls_launch, flag, nothing, nothing, seen, layout=None)
        _settle(seen.device)
        self._polls_per_s = _POLLS_PER_LAUNCH / (time.monotonic() - began)
        self.wait_at_most(self._timeout_s)

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`."""
        shape, num_pairs = self._shape, slots_TK.numel()
        flag = self._numbers(1, dtype=torch.int64)
        tokens_N, places_N = self._numbers(num_pairs), self._numbers(num_pairs)
        outgoing_3RS, num_unknown = self._table(), self._numbers(1)
        order_pairs_kernel[(shape.num_slots + 1,)](
            slots_TK.contiguous(),
            self._sequence,
            generation,
            tokens_N,
            places_N,
            outgoing_3RS,
            num_unknown,
            flag,
            num_pairs,
            NUM_SLOTS=shape.slots_per_rank,
            CAPACITY=shape.pair_rows,
            TOP_K=shape.top_k,
            PAIRS=ORDER_PAIRS,
            num_warps=ORDER_WARPS,
        )
        self._send(words_TW, outgoing_3RS, flag, tokens_N=tokens_N, num_unknown=num_unknown)

        def finish() -> ReceivedRows:
            incoming_3RS = self._table()
            rows_2S = self._numbers(2, shape.slots_per_rank)
            num_rows = self._wait(flag, incoming_3RS, rows_2S, layout=layout)
            state = _PeerState(
                num_tokens=words_TW.shape[0],
                flag=flag,
                places_N=places_N,
                incoming_3RS=incoming_3RS,
            )
            return ReceivedRows(
                words_NW=self._receive(incoming_3RS, flag, num_rows=num_rows),
                rows_S=rows_2S[0],
                ends_S=rows_2S[1],
                state=state,
            )

        return finish

    def begin_combine(
        self, y_ND: Tensor, state: _PeerState, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`."""
        self._send(y_ND.view(torch.int32), state.incoming_3RS, state.flag)

        def finish() -> Tensor:
            self._wait(state.flag, state.incoming_3RS, state.incoming_3RS, layout=None)
            return self._sum(state, weights_TK)

        return finish

    def check(self) -> None:
        """Raise the faults of captured graphs' exchanges since the last check.

        Raises:
            AllToAllError: an exchange failed; the sums since then are invalid.
        """
        *faults, own, num_polls = self._faults.tolist()
        seen = [own if flag == NO_FAULT else flag for flag in faults]
        self._forget_faults()
        self.waited_s += num_polls / self._polls_per_s
        raise_faults(seen, own=own, timeout_s=self._timeout_s, what="rows or outputs")

    def _forget_faults(self) -> None:
        self._faults.fill_(NO_FAULT)
        self._faults[-1] = 0

    def _numbers(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """New integers, not initialised."""
        return torch.empty(shape, dtype=dtype, device=self._window.addresses.device)

    def _table(self) -> Tensor:
        return self._numbers(3, self._shape.num_ranks, self._shape.slots_per_rank)

    def _send(
        self,
        words_NW: Tensor,
        table_3RS: Tensor,
        flag: Tensor,
        *,
        tokens_N: Tensor | None = None,
        num_unknown: Tensor | None = None,
    ) -> None:
        """Send tokens' rows to slots, or without `tokens_N` outputs back."""
        shape, config, where = self._shape, self._config, self._map
        is_dispatch = tokens_N is not None
        vector = math.gcd(words_NW.stride(0), VECTOR_WORDS)
        send_rows_kernel[shape.num_ranks, shape.slots_per_rank, config.parts](
            self._window.addresses,
            words_NW,
            table_3RS if tokens_N is None else tokens_N,
            table_3RS,
            table_3RS if num_unknown is None else num_unknown,
            flag,
            self._done_R,
            words_NW.stride(0) // vector,
            shape.rank,
            where.rows if is_dispatch else where.answers,
            where.counts,
            where.flags if is_dispatch else where.answer_flags,
            NUM_RANKS=shape.num_ranks,
            NUM_SLOTS=shape.slots_per_rank,
            PADDED=next_power_of_two(shape.num_slots),
            CAPACITY=shape.pair_rows,
            MAX_TOKENS=shape.max_tokens,
            WORDS=shape.row_words if is_dispatch else shape.answer_words,
            VECTOR=vector,
            IS_DISPATCH=is_dispatch,
            **configurations.options(config),
        )

    def _wait(
        self, flag: Tensor, table_3RS: Tensor, rows_2S: Tensor, *, layout: RowLayout | None
    ) -> int:
        """Wait for all ranks' flags; with a layout, place incoming rows and return how many.

        Raises:
            AllToAllError: a flag is missing or reports a fault, unless the wait is captured.
        """
        shape, seen = self._shape, self._seen()
        most = 0 if layout is None else layout.most_rows(shape)
        is_fixed = layout is None or layout.is_fixed or layout.rows_per_slot is not None
        if _is_capturing():
            assert is_fixed, "a captured exchange needs a layout that is fixed"
            self._look(self._polls_captured, flag, table_3RS, rows_2S, seen, layout=layout)
            return most
        _settle(seen.device)
        began = time.monotonic()
        until = began + self._timeout_s
        polls, pause_s = self._polls_launch, _PAUSE_S
        if is_interpreting():
            polls, pause_s = self._polls_once, _INTERPRETER_PAUSE_S
        while True:
            self._look(polls, flag, table_3RS, rows_2S, seen, layout=layout)
            *flags, own, num_rows = seen.tolist()
            # A flag of this exchange that is not fine will not become fine.
            is_late = any(sequence_of(one) != sequence_of(own) for one in flags)
            if not is_late or time.monotonic() >= until:
                break
            time.sleep(pause_s)
        self.waited_s += time.monotonic() - began
        what = "outputs" if layout is None else "rows"
        raise_faults(flags, own=own, timeout_s=self._timeout_s, what=what)
        return most if is_fixed else min(most, num_rows)

    def _seen(self) -> Tensor:
        return self._numbers(self._shape.num_ranks + 2, dtype=torch.int64)

    def _look(
        self,
        polls: Tensor,
        flag: Tensor,
        table_3RS: Tensor,
        rows_2S: Tensor,
        seen: Tensor,
        *,
        layout: RowLayout | None,
    ) -> None:
        """Poll for the flags of all ranks, at most so many times."""
        shape, where = self._shape, self._map
        wait_flags_kernel[(1,)](
            self._window.addresses,
            flag,
            polls,
            self._faults,
            seen,
            table_3RS,
            rows_2S,
            shape.rank,
            int(_is_capturing()),
            1 if layout is None else layout.alignment,
            0 if layout is None else layout.rows_per_slot or 0,
            where.answer_flags if layout is None else where.flags,
            where.counts,
            NUM_RANKS=shape.num_ranks,
            NUM_SLOTS=shape.slots_per_rank,
            PADDED_RANKS=next_power_of_two(shape.num_ranks),
            PADDED_SLOTS=next_power_of_two(shape.slots_per_rank),
            IS_DISPATCH=layout is not None,
            num_warps=1,
        )

    def _receive(self, incoming_3RS: Tensor, flag: Tensor, *, num_rows: int) -> Tensor:
        shape = self._shape
        out_NW = self._numbers(num_rows, shape.row_words)
        receive_rows_kernel[shape.num_ranks, shape.slots_per_rank, self._config.parts](
            self._window.addresses,
            out_NW,
            incoming_3RS,
            flag,
            shape.rank,
            num_rows,
            self._map.rows,
            NUM_RANKS=shape.num_ranks,
            NUM_SLOTS=shape.slots_per_rank,
            CAPACITY=shape.pair_rows,
            WORDS=shape.row_words,
            **configurations.options(self._config),
        )
        return out_NW

    def _sum(self, state: _PeerState, weights_TK: Tensor | None) -> Tensor:
        shape, config = self._shape, self._config
        out_TD = torch.empty(state.num_tokens, shape.dim, device=state.flag.device)
        if state.num_tokens == 0:
            return out_TD
        sum_answers_kernel[state.num_tokens, -(-shape.dim // config.block)](
            self._window.addresses,
            state.places_N,
            out_TD if weights_TK is None else weights_TK.contiguous(),
            state.flag,
            out_TD,
            shape.rank,
            self._map.answers,
            NUM_RANKS=shape.num_ranks,
            CAPACITY=shape.pair_rows,
            DIM=shape.dim,
            TOP_K=shape.top_k,
            IS_BF16=shape.payload.answer_dtype is torch.bfloat16,
            IS_WEIGHTED=weights_TK is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
            enable_fp_fusion=False,  # it would change bits
        )
        return out_TD


def _settle(device: torch.device) -> None:
    """Wait for what this rank has launched: no wait for others, or a slow device would not show."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
