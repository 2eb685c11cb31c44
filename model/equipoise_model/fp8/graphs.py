"""`DecodeGraphs`: steps of a few single tokens, captured once as CUDA graphs and replayed.

A decode step is hundreds of small kernels, whose launches take the host longer than the device
needs to run them. Owns the memory that a captured step reads and writes: a step is copied in, the
nearest larger graph is replayed, its unused rows being padding. A layout switch leaves graphs as
they are: experts stay at their places, the map of slots is changed where it lies, and the tables of
replicas are copied in (as in `EpBuffer`'s and nano-vLLM's runners, one graph for each size).

Several ranks capture and replay together. Capturing runs a step once more, exchanges and all, so
each must do so at the same step as all others: hence sizes go by the rank with the most rows, which
all know, and everything is captured anew with another exchange, which a new group brings.
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
"""Makes of work what does it again, with the same memory and the same result tensor."""


_ATTENTION_OF_HOST = "mla_decode=flashinfer"


def capture_obstacle(exchange: SlotExchange | None) -> str | None:
    """Why decode steps cannot be captured with these kernels and this exchange, or None.

    The one place that decides it.
    """
    if _ATTENTION_OF_HOST in selection.summary():
        return "flashinfer plans attention on the host"
    return None if exchange is None else exchange.capture_obstacle


class DecodeGraphs:
    """Graphs of up to `max_rows` rows, captured when a choice of kernels first needs them.

    For one model and one cache; used from the engine's thread.
    """

    def __init__(self, *, max_rows: int, capture: Capture | None = None) -> None:
        self._sizes = sizes(max_rows)
        self._capture = capture or CudaCapture()
        self._exchange: SlotExchange | None = None
        self._memory: _Memory | None = None
        self._graphs: dict[tuple[int, bool, str], Work] = {}

    def fits(self, step: ExpertStep) -> bool:
        """Whether a step is one of these: few rows on every rank, and no obstacle."""
        most, exchange = max(step.tokens_by_rank), step.exchange
        limit = self._sizes[-1]
        if exchange is not None:
            limit = min(limit, exchange.max_captured_rows)
        return 0 < most <= limit and capture_obstacle(exchange) is None

    def run(
        self, forward: Callable[..., Tensor], rows: StepRows, cache: LatentCache, step: ExpertStep
    ) -> Tensor:
        """Hidden states [T, D] of a step that fits, valid until the next one.

        Raises:
            ExchangeError: a rank is gone, stuck, or runs another generation.
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
            # Capturing may have run the work, once or more.
            memory.rows_LS.zero_()
        hidden_TD = self._graphs[key]()
        if step.exchange is not None:
            step.exchange.check()
        step.rows_LS.add_(memory.rows_LS)
        memory.rows_LS.zero_()
        return hidden_TD[: rows.num_rows]


class CudaCapture:
    """Captures CUDA graphs that share their memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run work once, which compiles its kernels, and capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy experts meanwhile, which is none of this stream's business.
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
    """Where captured steps read and write, of the ranks that `step` is of."""

    def __init__(self, max_rows: int, *, cache: LatentCache, step: ExpertStep) -> None:
        placement = step.placement
        device = placement.replica_count.device
        self.rows = StepRows.padding(max_rows, cache=cache, device=device)
        self.num_valid = torch.zeros(1, dtype=torch.int32, device=device)
        self._token_ids_T = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows_LS = torch.zeros(
            placement.num_layers, placement.slots_per_rank, dtype=torch.int64, device=device
        )
        self._ranks, self._exchange = step.ranks, step.exchange
        self._placement = _roomy(placement)
        self._follows: PlacementTables | None = None

    def step(self, num_rows: int) -> ExpertStep:
        """The experts' side of a step, in this memory."""
        placement = self._placement
        assert self._follows is not None
        if self._follows.share_ends is None:
            placement = replace(placement, share_ends=None)
        return ExpertStep(
            placement=placement,
            ranks=self._ranks,
            tokens_by_rank=(num_rows,) * self._ranks.count,
            token_ids_T=self._token_ids_T[:num_rows],
            rows_LS=self.rows_LS,
            exchange=self._exchange,
        )

    def overwrite(self, rows: StepRows, step: ExpertStep) -> None:
        """Have a step's rows here, and the tables of its generation."""
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
            # Replicas that are not there have the last one's end.
            own.share_ends[..., width:].copy_(placement.share_ends[..., -1:])
            own.share_ends[..., :width].copy_(placement.share_ends)
        self._follows = placement


def _roomy(placement: PlacementTables) -> PlacementTables:
    """Tables with room for every layout of as many slots: all that are left over on one expert."""
    num_layers, num_experts = placement.replica_count.shape
    most = placement.num_slots - num_experts + 1
    shape = (num_layers, num_experts, most)
    return replace(
        placement,
        slots_of_expert=placement.slots_of_expert.new_full(shape, -1),
        replica_count=torch.ones_like(placement.replica_count),
        share_ends=placement.slots_of_expert.new_zeros(shape),
    )
