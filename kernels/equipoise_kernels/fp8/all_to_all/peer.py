"""The exchange by Triton over peer pointers: ranks of one node write into each other's windows.

Launches kernels and bounds waits. The host checks the flags after every wait, except during CUDA
graph capture: call `check` after replays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.all_to_all.buffer import ReceivedRows
from equipoise_kernels.fp8.all_to_all.flags import fine_flags, flag_of, raise_faults
from equipoise_kernels.fp8.all_to_all.order import Incoming, Outgoing, RowLayout
from equipoise_kernels.fp8.all_to_all.peer_kernels import (
    receive_rows_kernel,
    send_rows_kernel,
    sum_answers_kernel,
    wait_flags_kernel,
)
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window import PeerWindow, WindowMap
from equipoise_kernels.fp8.jit import is_interpreting
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

# Polling a flag takes a GPU about a microsecond, and the interpreter a hundred times that.
_POLLS_PER_S = 1_000_000
_POLLS_PER_LAUNCH = 20_000
_MOST_POLLS = 2**31 - 1
_PAUSE_S = 0.0005
# In the interpreter, polling takes the processor from the rank that is waited for.
_INTERPRETER_PAUSE_S = 0.01
# Words that a thread copies at once, at most.
_VECTOR_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllConfig:
    """Work of a program."""

    parts: int
    """Programs that share a slot's rows."""
    block: int
    """Words or columns that a program copies at a time."""
    num_warps: int
    """Warps per program."""


CONFIG_SPACE = tuple(
    AllToAllConfig(parts=parts, block=block, num_warps=num_warps)
    for parts, block, num_warps in product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8))
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PeerState:
    num_tokens: int
    places_N: Tensor
    incoming: Incoming
    flag: Tensor


class PeerBackend:
    """See `buffer.Backend`. All launches use one stream; waits are bounded by `timeout_s`."""

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
        device = window.addresses.device
        self._sequence = torch.zeros(1, dtype=torch.int64, device=device)
        self._done_R = torch.zeros(shape.num_ranks, dtype=torch.int32, device=device)
        # Faults that captured graphs found, until `check` reads them.
        self._bad_R = torch.zeros(shape.num_ranks, dtype=torch.bool, device=device)
        self._bad_seen_R = torch.zeros(shape.num_ranks, dtype=torch.int64, device=device)
        self._bad_own = torch.zeros_like(self._sequence)

        def number(polls: int) -> Tensor:
            return torch.full((1,), polls, dtype=torch.int32, device=device)

        # On the device, because a captured wait must know the outcome of those before it.
        self._polls_once, self._polls_launch = number(1), number(_POLLS_PER_LAUNCH)
        self._polls_captured = number(0)
        self.wait_at_most(timeout_s)

    def wait_at_most(self, timeout_s: float) -> None:
        """Bound the waits of all exchanges that begin from now on, and that are captured."""
        self._timeout_s = timeout_s
        self._polls_captured.fill_(min(int(timeout_s * _POLLS_PER_S), _MOST_POLLS))

    def begin_dispatch(
        self, words_TW: Tensor, slots_TK: Tensor, *, layout: RowLayout, generation: Tensor
    ) -> Callable[[], ReceivedRows]:
        """See `buffer.Backend`."""
        outgoing = Outgoing.of_slots(slots_TK, self._shape)
        self._sequence += 1
        flag = flag_of(sequence=self._sequence, generation=generation, status=outgoing.status)
        self._send(
            words_TW,
            order_N=outgoing.order_N,
            blocks=(outgoing.first_RS, outgoing.counts_RS, outgoing.segment_RS),
            flag=flag,
            top_k=self._shape.top_k,
        )

        def finish() -> ReceivedRows:
            fine_R = self._wait(flag, flags_offset=self._map.flags, what="rows")
            counts_RS = self._window.counts(self._shape).index_select(0, flag & 1)[0]
            incoming = Incoming.of_counts(counts_RS * fine_R.unsqueeze(1), layout)
            state = _PeerState(
                num_tokens=words_TW.shape[0],
                places_N=outgoing.answer_places(self._shape),
                incoming=incoming,
                flag=flag,
            )
            return ReceivedRows(
                words_NW=self._receive(incoming, layout, flag),
                rows_S=incoming.rows_S,
                ends_S=incoming.ends_S,
                state=state,
            )

        return finish

    def begin_combine(
        self, y_ND: Tensor, state: _PeerState, *, weights_TK: Tensor | None
    ) -> Callable[[], Tensor]:
        """See `buffer.Backend`."""
        incoming = state.incoming
        self._send(
            y_ND.view(torch.int32),
            order_N=None,
            blocks=(incoming.starts_RS, incoming.counts_RS, incoming.segment_RS),
            flag=state.flag,
            top_k=0,
        )

        def finish() -> Tensor:
            self._wait(state.flag, flags_offset=self._map.answer_flags, what="outputs")
            return self._sum(state, weights_TK)

        return finish

    def check(self) -> None:
        """Raise the faults of captured graphs' exchanges since the last check.

        Raises:
            AllToAllError: an exchange failed; the sums since then are invalid.
        """
        bad, own = self._bad_R.tolist(), int(self._bad_own)
        flags = zip(bad, self._bad_seen_R.tolist(), strict=True)
        seen = [flag if is_bad else own for is_bad, flag in flags]
        self._bad_R.zero_()
        raise_faults(seen, own=own, timeout_s=self._timeout_s, what="rows or outputs")

    def _send(
        self,
        words_NW: Tensor,
        *,
        order_N: Tensor | None,
        blocks: tuple[Tensor, Tensor, Tensor],
        flag: Tensor,
        top_k: int,
    ) -> None:
        shape, config, where = self._shape, self._config, self._map
        is_answer = order_N is None
        num_words = shape.answer_words if is_answer else shape.row_words
        vector = math.gcd(words_NW.stride(0), _VECTOR_WORDS)
        send_rows_kernel[shape.num_ranks, shape.slots_per_rank, config.parts](
            self._window.addresses,
            words_NW,
            flag if order_N is None else order_N,
            *blocks,
            flag,
            self._done_R,
            words_NW.stride(0) // vector,
            shape.rank,
            where.answers if is_answer else where.rows,
            where.counts,
            where.answer_flags if is_answer else where.flags,
            NUM_RANKS=shape.num_ranks,
            NUM_SLOTS=shape.slots_per_rank,
            CAPACITY=shape.pair_rows,
            WORDS=num_words,
            VECTOR=vector,
            TOP_K=top_k,
            **configurations.options(config),
        )

    def _wait(self, flag: Tensor, *, flags_offset: int, what: str) -> Tensor:
        """Return which ranks' flags are fine, bool [R]; raises if one is not."""
        seen_R = torch.zeros_like(self._bad_seen_R)

        def look(polls: Tensor) -> Tensor:
            wait_flags_kernel[(self._shape.num_ranks,)](
                self._window.addresses,
                flag,
                seen_R,
                polls,
                self._shape.rank,
                flags_offset,
                NUM_RANKS=self._shape.num_ranks,
                num_warps=1,
            )
            return fine_flags(seen_R, flag)

        if _is_capturing():
            # Of a graph's many waits only one is long: a missing rank stays missing.
            is_lost = self._bad_R.any()
            fine_R = look(torch.where(is_lost, self._polls_once, self._polls_captured))
            self._bad_R |= ~fine_R
            self._bad_seen_R.copy_(torch.where(fine_R, self._bad_seen_R, seen_R))
            self._bad_own.copy_(torch.where(fine_R.all(), self._bad_own, flag))
            return fine_R
        until = time.monotonic() + self._timeout_s
        polls, pause_s = self._polls_launch, _PAUSE_S
        if is_interpreting():
            polls, pause_s = self._polls_once, _INTERPRETER_PAUSE_S
        fine_R = look(polls)
        # A flag of this exchange that is not fine will not become fine.
        while bool(((seen_R ^ flag) << 33 != 0).any()) and time.monotonic() < until:
            time.sleep(pause_s)
            fine_R = look(polls)
        raise_faults(seen_R.tolist(), own=int(flag), timeout_s=self._timeout_s, what=what)
        return fine_R

    def _receive(self, incoming: Incoming, layout: RowLayout, flag: Tensor) -> Tensor:
        shape, config = self._shape, self._config
        most = layout.most_rows(shape)
        is_fixed = layout.is_fixed or layout.rows_per_slot is not None
        assert is_fixed or not _is_capturing(), "a captured exchange needs a layout that is fixed"
        num_rows = most if is_fixed else min(most, int(incoming.num_rows))
        new = torch.zeros if layout.alignment > 1 else torch.empty
        out_NW = new(num_rows, shape.row_words, dtype=torch.int32, device=flag.device)
        receive_rows_kernel[shape.num_ranks, shape.slots_per_rank, config.parts](
            self._window.addresses,
            out_NW,
            incoming.counts_RS,
            incoming.starts_RS,
            incoming.segment_RS,
            flag,
            shape.rank,
            num_rows,
            self._map.rows,
            NUM_RANKS=shape.num_ranks,
            NUM_SLOTS=shape.slots_per_rank,
            CAPACITY=shape.pair_rows,
            WORDS=shape.row_words,
            **configurations.options(config),
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


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def specializations(config: AllToAllConfig, shape: EpShape) -> list[Specialization]:
    """Specialisations of a configuration, for a buffer of one shape."""
    name = f"all_to_all {config} {shape.payload.value}"
    sizes = {"NUM_RANKS": shape.num_ranks, "CAPACITY": shape.pair_rows}
    blocks = configurations.options(config) | {"NUM_SLOTS": shape.slots_per_rank}
    words = {"dispatch": (shape.row_words, shape.top_k), "combine": (shape.answer_words, 0)}
    sends = {what: (n, math.gcd(n, _VECTOR_WORDS), k) for what, (n, k) in words.items()}
    return [
        *(
            Specialization(
                kernel=send_rows_kernel,
                name=f"{name} {what}",
                types={
                    "addresses_ptr order_ptr first_ptr counts_ptr segment_ptr flag_ptr": "*i64",
                    "words_ptr done_ptr": "*i32",
                    "slab_offset counts_offset flags_offset": "i64",
                },
                multiples_of_16="slab_offset counts_offset flags_offset",
                options=sizes | blocks | {"WORDS": words, "VECTOR": vector, "TOP_K": top_k},
                flags="release",
            )
            for what, (words, vector, top_k) in sends.items()
        ),
        Specialization(
            kernel=wait_flags_kernel,
            name=f"{name} wait",
            types={
                "addresses_ptr flag_ptr seen_ptr": "*i64",
                "polls_ptr": "*i32",
                "flags_offset": "i64",
            },
            multiples_of_16="flags_offset",
            options={"NUM_RANKS": shape.num_ranks, "num_warps": 1},
            flags="acquire",
        ),
        Specialization(
            kernel=receive_rows_kernel,
            name=f"{name} receive",
            types={
                "addresses_ptr counts_ptr starts_ptr segment_ptr flag_ptr": "*i64",
                "out_ptr": "*i32",
                "slab_offset": "i64",
            },
            multiples_of_16="slab_offset",
            options=sizes | blocks | {"WORDS": shape.row_words},
        ),
        Specialization(
            kernel=sum_answers_kernel,
            name=f"{name} sum",
            types={
                "addresses_ptr places_ptr flag_ptr": "*i64",
                "weights_ptr out_ptr": "*fp32",
                "slab_offset": "i64",
            },
            multiples_of_16="slab_offset",
            options=sizes
            | {
                "num_warps": config.num_warps,
                "BLOCK": config.block,
                "DIM": shape.dim,
                "TOP_K": shape.top_k,
                "IS_BF16": shape.payload.answer_dtype is torch.bfloat16,
                "IS_WEIGHTED": True,
            },
            fuses_products=False,
        ),
    ]


ALL_TO_ALL: KernelOperation[Callable[..., None], AllToAllConfig] = KernelOperation(
    name="all_to_all",
    backends={},  # `opening` opens buffers, and ranks agree on a backend there
    configs=CONFIG_SPACE,
    specializations=specializations,
)
