"""`DecodeGraphs`: decode steps captured once as CUDA graphs and replayed.

A decode step is hundreds of small kernels, which take the host longer to launch than the device
needs to run them. Owns the memory that a captured step reads and writes: it copies a step's input
there and replays the graph of the next larger size, with padding in the unused rows. A layout
switch does not invalidate graphs: experts stay at their places, the map of slots changes in place,
and the tables of replicas are copied in. One graph per size, like the runners of nano-vLLM.

Several ranks capture and replay together. Capturing runs a step again, with its exchanges, so every
rank must do so at the same step. Sizes therefore follow the rank with the most rows, which all
ranks know, and a new exchange, which a new group brings, discards all graphs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from equipoise_kernels.fp8 import selection
from equipoise_model.dispatch import ExpertStep
from equipoise_model.fp8.rows import StepRows
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

    def __init__(self, *, max_rows: int, capture: Capture | None = None) -> None:
        self._sizes = sizes(max_rows)
        self._capture = capture or CudaCapture()
        self._exchange: SlotExchange | None = None
        self._memory: _Memory | None = None
        self._graphs: dict[tuple[int, bool, str], Work] = {}

    def fits(self, step: ExpertStep) -> bool:
        """Whether a step can use a graph: few rows on every rank, and no obstacle."""
        most, exchange = max(step.tokens_by_rank), step.exchange
        limit = self._sizes[-1]
        if exchange is not None:
            limit = min(limit, exchange.max_captured_rows)
        return 0 < most <= limit and capture_obstacle(exchange) is None

    def run(
        self, forward: Callable[..., Tensor], rows: StepRows, cache: LatentCache, step: ExpertStep
    ) -> Tensor:
        """Return hidden states [T, D] of a step that fits; they are valid until the next step.

        Raises:
            ExchangeError: another rank is gone or stuck, or runs another generation.
        """
        if self._memory is None or step.exchange is not self._exchange:
            self._graphs.clear()
            self._exchange = step.exchange
            self._memory = _Memory(self._sizes[-1], cache=cache, step=step)
        memory = self._memory
        memory.overwrite(rows, step)
        size = next(size for size in self._sizes if size >= max(step.tokens_by_rank))
        key = (size, step.placement.share_ends is not None, selection.summary())
        if key not in self._graphs:
            views = memory.rows.first(size)
            self._graphs[key] = self._capture(
                lambda: forward(views, cache, memory.step(size), num_valid=memory.num_valid)
            )
            # Capturing may have run the work once or more.
            memory.slot_load_LS.zero_()
        hidden_TD = self._graphs[key]()
        if step.exchange is not None:
            step.exchange.check()
        step.slot_load_LS.add_(memory.slot_load_LS)
        memory.slot_load_LS.zero_()
        return hidden_TD[: rows.num_rows]


class CudaCapture:
    """Captures CUDA graphs that share memory, since only one runs at a time."""

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


class _Memory:
    """Memory that captured steps read and write, for the ranks and exchange of `step`."""

    def __init__(self, max_rows: int, *, cache: LatentCache, step: ExpertStep) -> None:
        placement = step.placement
        device = placement.replica_count.device
        self.rows = StepRows.padding(max_rows, cache=cache, device=device)
        self.num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._token_ids_T = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.slot_load_LS = torch.zeros(
            placement.num_layers, placement.slots_per_rank, dtype=torch.int64, device=device
        )
        self._ranks, self._exchange = step.ranks, step.exchange
        self._placement = _roomy(placement)
        self._follows: PlacementTables | None = None

    def step(self, num_rows: int) -> ExpertStep:
        """Return the experts' side of a step, in this memory."""
        placement = self._placement
        assert self._follows is not None
        if self._follows.share_ends is None:
            placement = replace(placement, share_ends=None)
        return ExpertStep(
            placement=placement,
            ranks=self._ranks,
            tokens_by_rank=(num_rows,) * self._ranks.count,
            token_ids_T=self._token_ids_T[:num_rows],
            slot_load_LS=self.slot_load_LS,
            exchange=self._exchange,
            is_captured=True,
        )

    def overwrite(self, rows: StepRows, step: ExpertStep) -> None:
        """Copy in a step's rows and the tables of its generation."""
        self.rows.overwrite(rows)
        self.num_valid.fill_(rows.num_rows)
        self._token_ids_T[: rows.num_rows].copy_(step.token_ids_T)
        if self._follows is not step.placement:
            self._follow(step.placement)

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
