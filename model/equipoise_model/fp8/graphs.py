"""`DecodeGraphs`: decode steps captured once as CUDA graphs and replayed.

A decode step is hundreds of small kernels, which take the host longer to launch than the device
needs to run them. Owns the memory that a captured step reads and writes: it copies a step's input
there and replays the graph of the next larger size, with padding in the unused rows. A layout
switch does not invalidate graphs: experts stay at their places, the map of slots changes in place,
and the tables of replicas are copied in. One graph per size, like the runners of nano-vLLM.

Several ranks capture and replay together. Capturing runs a step again, with its exchanges, so every
rank must do so at the same step. Sizes therefore follow the rank with the most rows, which all
ranks know, and a new exchange, which a new group brings, discards all graphs. A step in two
micro-batches is one graph, with memory for each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from equipoise_kernels.fp8 import selection
from equipoise_model.expert_step import ExpertStep
from equipoise_model.fp8.rows import MicroBatch, StepRows
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]
"""Turns work into a callable that repeats it, with the same memory and the same result tensor."""


_ATTENTION_OF_HOST = "mla_decode=flashinfer"


def capture_obstacle(exchange: SlotExchange | None) -> str | None:
    """Return why decode steps cannot be captured with these kernels and this exchange, or None."""
    if _ATTENTION_OF_HOST in selection.summary():
        return "flashinfer plans attention on the host"
    return None if exchange is None else exchange.capture_obstacle


class DecodeGraphs:
    """Graphs of up to `max_rows` rows, captured on first use with each selection of kernels.

    For one model and one cache; used from the engine's thread.
    """

    def __init__(self, *, max_rows: int, new_capture: Callable[[], Capture] | None = None) -> None:
        """`new_capture` makes what captures the graphs of one exchange; CUDA's by default."""
        self._sizes = sizes(max_rows)
        self._new_capture = new_capture or CudaCapture
        self._capture: Capture | None = None
        self._exchange: SlotExchange | None = None
        self._memory: _Memory | None = None
        self._graphs: dict[tuple[tuple[int, ...], bool, str], Work] = {}

    def fits(self, step: ExpertStep) -> bool:
        """Whether a step can use a graph: few rows on every rank, and no obstacle.

        Of a step in micro-batches, each must have few rows.
        """
        exchange, limit = step.exchange, self._sizes[-1]
        if exchange is not None:
            limit = min(limit, exchange.max_captured_rows)
        most_rows = map(max, step.tokens_by_batch or [step.tokens_by_rank])
        return capture_obstacle(exchange) is None and all(0 < most <= limit for most in most_rows)

    def run(
        self,
        forward: Callable[[Sequence[MicroBatch], LatentCache], Tensor],
        batches: Sequence[MicroBatch],
        cache: LatentCache,
        step: ExpertStep,
    ) -> Tensor:
        """Return hidden states [T, D] of a step that fits; they are valid until the next step.

        `batches` are the step's micro-batches, with rows on the host.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        if self._memory is None or step.exchange is not self._exchange:
            self._graphs.clear()
            self._capture = self._new_capture()
            self._exchange = step.exchange
            self._memory = _Memory(self._sizes[-1], cache=cache, step=step)
        memory, capture = self._memory, self._capture
        assert capture is not None
        memory.overwrite(batches, step)
        most = max(max(batch.experts.tokens_by_rank) for batch in batches)
        # Micro-batches are about equally large. A size for each would make too many graphs.
        chosen = (next(size for size in self._sizes if size >= most),) * len(batches)
        key = (chosen, step.placement.share_ends is not None, selection.summary())
        if key not in self._graphs:
            self._graphs[key] = capture(lambda: forward(memory.batches(chosen, step), cache))
            # Capturing may have run the work once or more.
            memory.clear()
        hidden_TD = self._graphs[key]()
        if step.exchange is not None:
            step.exchange.check()
        memory.count(step)
        real = [
            part[: batch.rows.num_rows]
            for part, batch in zip(hidden_TD.split(chosen), batches, strict=True)
        ]
        return real[0] if len(real) == 1 else torch.cat(real)


class CudaCapture:
    """Captures CUDA graphs that share memory, since only one runs at a time.

    Make a new one when all of them are discarded: torch refuses to capture into their memory again
    while anything else still holds a part of it, such as the traceback of the step that failed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run the work once, which compiles its kernels, and capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy experts meanwhile on other streams.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs: powers of two, then multiples of 8, so at most 7 rows are padding."""
    small = [size for size in (1, 2, 4, 8) if size < max_rows]
    return (*small, *range(16, max_rows, 8), max_rows)


class _Lane:
    """Memory for the rows of one micro-batch."""

    def __init__(self, max_rows: int, *, cache: LatentCache, device: torch.device) -> None:
        self.rows = StepRows.padding(max_rows, cache=cache, device=device)
        self.num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self.token_ids_T = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def overwrite(self, batch: MicroBatch) -> None:
        """Copy in a micro-batch."""
        num_rows = batch.rows.num_rows
        self.rows.overwrite(batch.rows)
        self.num_valid.fill_(num_rows)
        self.token_ids_T[:num_rows].copy_(batch.experts.token_ids_T)


class _Memory:
    """Memory that captured steps read and write, for the ranks and exchange of `step`."""

    def __init__(self, max_rows: int, *, cache: LatentCache, step: ExpertStep) -> None:
        placement = step.placement
        self._device = placement.replica_count.device
        self._max_rows, self._cache = max_rows, cache
        self._lanes: list[_Lane] = []
        self._slot_load_LS = torch.zeros_like(step.slot_load_LS)
        self._traffic = None if step.traffic is None else step.traffic.empty()
        self._placement = _roomy(placement)
        self._follows: PlacementTables | None = None

    def batches(self, num_rows: Sequence[int], step: ExpertStep) -> list[MicroBatch]:
        """Return micro-batches of a step like this one in this memory, with as many rows each."""
        placement = self._placement
        assert self._follows is not None
        if self._follows.share_ends is None:
            placement = replace(placement, share_ends=None)
        return [
            MicroBatch(
                rows=lane.rows.first(count),
                experts=replace(
                    step,
                    placement=placement,
                    tokens_by_rank=(count,) * step.ranks.count,
                    tokens_by_batch=(),
                    token_ids_T=lane.token_ids_T[:count],
                    slot_load_LS=self._slot_load_LS,
                    traffic=self._traffic,
                    most_of_batches=max(num_rows),
                    is_captured=True,
                ),
                num_valid=lane.num_valid,
            )
            for count, lane in zip(num_rows, self._lanes, strict=False)
        ]

    def overwrite(self, batches: Sequence[MicroBatch], step: ExpertStep) -> None:
        """Copy in a step's rows and the tables of its generation."""
        while len(self._lanes) < len(batches):
            self._lanes.append(_Lane(self._max_rows, cache=self._cache, device=self._device))
        for lane, batch in zip(self._lanes, batches, strict=False):
            lane.overwrite(batch)
        if self._follows is not step.placement:
            self._follow(step.placement)

    def count(self, step: ExpertStep) -> None:
        """Add to a step's counters what was counted in this memory."""
        step.slot_load_LS.add_(self._slot_load_LS)
        if step.traffic is not None:
            assert self._traffic is not None
            step.traffic.add(self._traffic)
        self.clear()

    def clear(self) -> None:
        """Set the counters to zero."""
        self._slot_load_LS.zero_()
        if self._traffic is not None:
            self._traffic.clear()

    def _follow(self, placement: PlacementTables) -> None:
        own, width = self._placement, placement.slots_of_expert.shape[-1]
        own.slots_of_expert[..., :width].copy_(placement.slots_of_expert)
        own.replica_count.copy_(placement.replica_count)
        if placement.share_ends is not None:
            assert own.share_ends is not None
            # Absent replicas get the last one's end.
            own.share_ends[..., width:].copy_(placement.share_ends[..., -1:])
            own.share_ends[..., :width].copy_(placement.share_ends)
        self._follows = placement


def _roomy(placement: PlacementTables) -> PlacementTables:
    """Tables that fit every layout with as many slots, even all spare slots on one expert."""
    num_layers, num_experts = placement.replica_count.shape
    most = placement.num_slots - num_experts + 1
    shape = (num_layers, num_experts, most)
    return replace(
        placement,
        slots_of_expert=placement.slots_of_expert.new_full(shape, -1),
        replica_count=torch.ones_like(placement.replica_count),
        share_ends=placement.slots_of_expert.new_zeros(shape),
    )
