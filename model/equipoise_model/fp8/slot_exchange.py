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
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise_kernels.errors import AllToAllError, PeerMissingError
from equipoise_kernels.formats import QuantizedRows
from equipoise_kernels.fp8.all_to_all.buffer import EpBuffer, SentRows
from equipoise_kernels.fp8.all_to_all.opening import OpenedBuffer, open_buffer
from equipoise_kernels.fp8.all_to_all.order import RowLayout
from equipoise_kernels.fp8.all_to_all.payload import Payload, Rows
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.two_hop import TwoHopBackend
from equipoise_kernels.fp8.gemm.schedule import GROUP_ALIGNMENT
from equipoise_kernels.fp8.selection import REFERENCE
from equipoise_kernels.nodes import Nodes
from equipoise_model.exchange import ExchangeError
from equipoise_model.fp8.experts import Fp8ExpertSlots
from equipoise_model.node_traffic import NodeTraffic
from equipoise_model.overlap import Stage, Stages, finish
from equipoise_model.ranges import named

PART_TOKENS = 256
"""Rows per rank and part, unless decode steps are larger; memory grows with it."""

# Codes must start at multiples of this many bytes.
_ROW_BYTES = 16


def exchange_tokens(max_step_tokens: int, *, max_graph_rows: int) -> int:
    """Rows per rank that an exchange has room for, and so the rows of a part."""
    return max(max_graph_rows, min(max_step_tokens, PART_TOKENS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangedStep:
    """What all ranks know of how the rows of a step, or of a micro-batch, travel."""

    most_tokens: int
    """Most rows that a rank brings."""
    most_of_batches: int
    """Most rows that a rank brings to any micro-batch of the step."""
    is_fixed: bool = False
    """Whether shapes and kernels depend on `most_tokens` alone, as in a captured step."""
    is_two_hop: bool = False
    """Whether rows travel over a rank of each node, if the exchange can do that."""

    def num_parts(self, room: int) -> int:
        """In how many parts the rows travel if a part has this much room."""
        return -(-max(self.most_tokens, 1) // room)


class SlotExchange:
    """One rank's end, used from the engine's thread; all ranks call `open` together.

    `max_captured_rows` is the largest step that all ranks can capture.
    """

    def __init__(
        self,
        opened: OpenedBuffer,
        *,
        max_captured_rows: int,
        timeout_s: float,
        generation: int,
        two_hop: EpBuffer | None = None,
    ) -> None:
        self._opened: OpenedBuffer | None = opened
        self._two_hop = two_hop
        self.max_captured_rows = max_captured_rows
        self._timeout_s = timeout_s
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
        nodes: Nodes | None = None,
        sums_on_nodes: bool = False,
    ) -> Self:
        """Open a buffer with all ranks of a group, within the group's own timeout.

        Its room is the largest that any rank asks for; steps are captured up to the smallest limit.
        If ranks are on several `nodes` (one by default), and exchange rows over torch.distributed,
        a second buffer is for steps of two hops.

        Raises:
            RuntimeError: another rank is gone, or no backend works for all ranks.
        """
        wishes = torch.tensor([shape.max_tokens, -max_captured_rows])
        dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=group)
        max_tokens, captured = int(wishes[0]), -int(wishes[1])
        roomy = replace(shape, max_tokens=max_tokens, payload=Payload.FP8)
        opened, two_hop = open_buffer(roomy, group=group, device=device, timeout_s=timeout_s), None
        if opened.backend == REFERENCE and nodes is not None and nodes.count > 1:
            backend = TwoHopBackend(
                opened.shape,
                nodes=nodes,
                group=group,
                timeout_s=timeout_s,
                sums_on_nodes=sums_on_nodes,
            )
            two_hop = EpBuffer(opened.shape, backend, device=device)
        return cls(
            opened,
            max_captured_rows=min(captured, max_tokens),
            timeout_s=timeout_s,
            generation=generation,
            two_hop=two_hop,
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

    @property
    def waited_s(self) -> float:
        """Total seconds of waits for other ranks, as far as the backend knows."""
        one_hop, two_hop = self._live.buffer, self._two_hop
        return one_hop.waited_s + (0.0 if two_hop is None else two_hop.waited_s)

    @property
    def overlaps(self) -> bool:
        """Whether an exchange may begin while another is under way."""
        return self._live.buffer.max_open > 1

    def switch(self, generation: int) -> None:
        """Announce another generation of the layout from the next step on."""
        self._live.buffer.switch(generation)
        if self._two_hop is not None:
            self._two_hop.switch(generation)

    def stages(
        self,
        x_TD: Tensor,
        rows: QuantizedRows,
        *,
        slots_TK: Tensor,
        weights_TK: Tensor,
        experts: Fp8ExpertSlots,
        load_S: Tensor,
        step: ExchangedStep,
        traffic: NodeTraffic | None = None,
    ) -> Stages[Tensor]:
        """Compute each row's weighted sum over its slots on any rank, [T, D] in the rows' dtype.

        `rows` is `x_TD` quantised; the backend's format decides which of the two is sent.
        Assignments received for this rank's slots are counted in `load_S`, and rows by node in
        `traffic`.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        room, num_parts = self._live.shape.max_tokens, step.num_parts(self._live.shape.max_tokens)
        parts = [
            self._part_stages(
                x_TD[first : first + room],
                QuantizedRows(
                    codes=rows.codes[first : first + room], scales=rows.scales[first : first + room]
                ),
                slots_TK=slots_TK[first : first + room],
                weights_TK=weights_TK[first : first + room],
                experts=experts,
                load_S=load_S,
                step=replace(step, most_tokens=min(room, step.most_tokens - first)),
                traffic=traffic,
            )
            for first in range(0, num_parts * room, room)
        ]
        if step.most_of_batches <= room:
            (part,) = parts
            summed_TD = yield from part
        else:
            # The buffer keeps at most two exchanges apart. One may be open in another micro-batch.
            summed_TD = torch.cat([finish(part) for part in parts])
            yield Stage.SENT
            yield Stage.COMPUTED
        return summed_TD.to(x_TD.dtype)

    def _part_stages(
        self,
        x_TD: Tensor,
        rows: QuantizedRows,
        *,
        slots_TK: Tensor,
        weights_TK: Tensor,
        experts: Fp8ExpertSlots,
        load_S: Tensor,
        step: ExchangedStep,
        traffic: NodeTraffic | None,
    ) -> Stages[Tensor]:
        """The same in float32, for rows that the buffer has room for."""
        opened, shape = self._live, self._live.shape
        buffer = self._two_hop if step.is_two_hop and self._two_hop else opened.buffer
        most = step.most_tokens
        sent: Rows = rows
        layout = RowLayout(alignment=GROUP_ALIGNMENT, most_tokens=most, is_fixed=step.is_fixed)
        if opened.is_low_latency:
            sent, layout = x_TD, buffer.low_latency_layout
        with self._reporting():
            receive = buffer.begin_dispatch(sent, slots_TK, layout=layout)
        yield Stage.SENT
        with self._reporting():
            came = receive()
        # Of one slot if routing were even; kernels then do not depend on what arrives.
        expected = -(-most * shape.num_ranks * shape.top_k // shape.num_slots)
        with named("experts"):
            if isinstance(came.rows, QuantizedRows):
                y_ND = experts.run_packed(
                    _aligned(came.rows), came.slot_ends, expected_rows=expected
                )
            else:
                y_ND = experts.run_padded(came.rows, came.rows_of_slot, expected_rows=expected)
        load_S += came.rows_of_slot
        with self._reporting():
            receive_sums = buffer.begin_combine(y_ND, came.handle, weights_TK=weights_TK)
        if traffic is not None:
            _count(traffic, slots_TK, came.sent, slots_per_rank=shape.slots_per_rank)
        yield Stage.COMPUTED
        with self._reporting():
            return receive_sums()

    def check(self) -> None:
        """Check the exchanges of a replayed graph; waits for the device.

        Raises:
            ExchangeError: one of them failed.
        """
        # A replayed exchange that misses a rank has waited in full: it counts polls, not time.
        with self._reporting(timeout_s=0.0):
            self._live.buffer.check()

    def close(self) -> None:
        """Release the memory; the exchange can no longer be used."""
        self._opened = self._two_hop = None

    @property
    def _live(self) -> OpenedBuffer:
        assert self._opened is not None, "it is closed"
        return self._opened

    @contextmanager
    def _reporting(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Raise the buffer's errors as `ExchangeError`: a timeout if that took `timeout_s`.

        By default, that is what waits are bounded by.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        began = time.perf_counter()
        try:
            with named("exchange"):
                yield
        except AllToAllError as error:
            late = isinstance(error, PeerMissingError)
            # A broken connection shows at once; only an exchange that waited in full timed out.
            if late and time.perf_counter() - began >= timeout_s:
                raise ExchangeError(f"an exchange of rows timed out: {error}") from error
            raise ExchangeError(f"an exchange of rows failed: {error}") from error


def _aligned(rows: QuantizedRows) -> QuantizedRows:
    """Align rows as matrix products require; copies them only if scales are between rows."""
    if rows.codes.stride(0) % _ROW_BYTES == 0:
        return rows
    # A contiguous tensor of a single row may keep its old stride.
    codes = rows.codes.clone(memory_format=torch.contiguous_format)
    return QuantizedRows(codes=codes, scales=rows.scales)


def _count(
    traffic: NodeTraffic, slots_TK: Tensor, sent: SentRows | None, *, slots_per_rank: int
) -> None:
    """Count rows by node. What a backend keeps to itself is as many as one hop sends."""
    ranks_TK = slots_TK.div(slots_per_rank, rounding_mode="floor")
    traffic.choose(ranks_TK)
    direct = traffic.remote_pairs(ranks_TK)
    if sent is None:
        traffic.note(direct=direct, rows=direct, outputs=direct)
    else:
        rows, outputs = traffic.between(sent.rows), traffic.between(sent.outputs)
        traffic.note(direct=direct, rows=rows, outputs=outputs)
