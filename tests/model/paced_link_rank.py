"""One rank of `test_paced_links`: times steps whose rows cross links that take time for each.

Arguments: rank, rendezvous file, result file, a clock as in `overlap_rank`, and times of links: in
which a rank's link carries the rows and outputs that one hop sends between nodes in a layer, as
multiples of its computation.
"""

import dataclasses
from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise_kernels.nodes import Nodes
from equipoise_model import expert_step
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import RowExchange
from equipoise_model.latent_cache import LatentCache
from equipoise_model.overlap import Order
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.attention import Attention
from equipoise_model.plain.transformer import Transformer
from equipoise_model.step import StepBatch
from tests.model.overlap_rank import RealClock, VirtualClock, slowed
from tests.support.small_models import SMALL

CONFIG = dataclasses.replace(
    SMALL,
    num_hidden_layers=4,
    first_k_dense_replace=0,
    n_routed_experts=64,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
)
"""Routing as in DeepSeek-V3: 8 experts of 4 of 8 groups."""

NODES = Nodes(of_rank=tuple(rank // 4 for rank in range(16)))
"""Four nodes of four ranks, each with two whole groups."""

NUM_RANKS, NUM_ROWS = len(NODES.of_rank), 32
"""Rows of each rank."""

COMPUTATION_S = 0.2
"""Attention of a rank's rows, and as many assignments as a rank has on average: half each."""

NODE_SPEED = 160 / 50
"""Of the links within a node, as a multiple of those between nodes: DeepSeek-V3's NVLink and
InfiniBand."""

SENDS = {"one hop": (False, False), "two hops": (True, False), "sums": (True, True)}
CUTS = {"whole": (False, Order.PREFILL), "cut": (True, Order.PREFILL)}
ONE_HOP_ROWS = NUM_ROWS * (3.65 + 6.0)
"""Rows and outputs that a rank sends to other nodes by one hop in a layer, about."""


class Links:
    """Each rank has a link to other nodes and one within its own, which carry one row at a time.

    An exchange ends when the last rank's links have sent and received all of it.
    """

    def __init__(self, rank, clock):
        self._own, self._clock = NODES.of_rank[rank], clock
        self._times = dist.new_group(backend="gloo")
        self.row_s = 0.0
        self.clear()

    def clear(self):
        self.sent = {"rows": 0, "outputs": 0}
        """What this rank sent to other nodes."""
        self._free_s = {True: 0.0, False: 0.0}

    def around(self, begin):
        """Return `RowExchange.begin_exchange` over such links."""

        def paced(ranks, x_ND, *, send, receive):
            if x_ND.dtype != torch.float32:
                return begin(ranks, x_ND, send=send, receive=receive)  # Numbers of rows.
            kind = "rows" if x_ND.shape[1] > CONFIG.hidden_size else "outputs"
            self.sent[kind] += self._across(send)
            ends_s = [self._carry(send, receive, across=across) for across in (True, False)]
            of_ranks = [torch.zeros(1, dtype=torch.float64) for _ in range(NUM_RANKS)]
            end = torch.tensor([max(ends_s)], dtype=torch.float64)
            told = dist.all_gather(of_ranks, end, group=self._times, async_op=True)
            receive_rows = begin(ranks, x_ND, send=send, receive=receive)

            def wait():
                received = receive_rows()
                told.wait()
                self._clock.sleep_until(float(max(of_ranks)))
                return received

            return wait

        return paced

    def _across(self, numbers, *, across=True):
        return sum(
            n
            for node, n in zip(NODES.of_rank, numbers, strict=True)
            if (node != self._own) is across
        )

    def _carry(self, send, receive, *, across):
        """Return when a link has carried its part of an exchange, behind earlier ones."""
        num_rows = max(self._across(send, across=across), self._across(receive, across=across))
        row_s = self.row_s if across else self.row_s / NODE_SPEED
        if num_rows:
            begins_s = max(self._free_s[across], self._clock.now())
            self._free_s[across] = begins_s + num_rows * row_s
        return self._free_s[across]


def main(rank, rendezvous, result, clock, *link_times):
    rank, clock = int(rank), {"real": RealClock, "virtual": VirtualClock}[clock]()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=300),
    )
    torch.manual_seed(0)
    model = Transformer(CONFIG, num_slots=CONFIG.n_routed_experts // NUM_RANKS)
    row_s = COMPUTATION_S / 2 / NUM_ROWS
    for name in ("project", "attend"):
        slow = slowed(getattr(Attention, name), lambda _, x, *__: len(x) * row_s / 2, clock=clock)
        setattr(Attention, name, slow)
    per_pair_s = row_s / CONFIG.num_experts_per_tok
    expert_step._run_pairs = slowed(
        expert_step._run_pairs, lambda _, pairs, *__: len(pairs) * per_pair_s, clock=clock
    )
    links = Links(rank, clock)
    RowExchange.begin_exchange = links.around(RowExchange.begin_exchange)

    def take(send, cut):
        (is_two_hop, sums_on_nodes), (is_cut, order) = SENDS[send], CUTS[cut]
        layout = torch.arange(CONFIG.n_routed_experts).expand(CONFIG.num_moe_layers, -1).numpy()
        placement = PlacementTables.from_layout(
            layout, num_experts=CONFIG.n_routed_experts, num_ranks=NUM_RANKS, generation=1
        )
        experts = ExpertParallel.distributed(
            placement, group=dist.group.WORLD, order=order, nodes=NODES, sums_on_nodes=sums_on_nodes
        )
        generator = torch.Generator().manual_seed(rank)
        batch = StepBatch(
            tokens_T=torch.randint(CONFIG.vocab_size, (NUM_ROWS,), generator=generator),
            positions_T=torch.arange(NUM_ROWS),
            sequences_T=torch.zeros(NUM_ROWS, dtype=torch.int64),
            block_tables=[[0, 1, 2, 3]],
            sample_rows_S=torch.arange(1),
        )
        half = [NUM_ROWS // 2] * NUM_RANKS
        experts.agree([half, half] if is_cut else [[NUM_ROWS] * NUM_RANKS], is_two_hop=is_two_hop)
        cache = LatentCache(CONFIG, num_blocks=4, max_len=64)
        dist.barrier()
        links.clear()
        began_s = clock.now()
        logits = model.step(batch, cache, experts).logits_SV
        took = torch.tensor([clock.now() - began_s], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took), dict(links.sent), experts.spread, logits

    seen = {}
    for link in (0.0, *map(float, link_times)):
        links.row_s = link * COMPUTATION_S / ONE_HOP_ROWS
        for send in SENDS:
            for cut in CUTS:
                taken = [take(send, cut) for _ in range(clock.num_times)]
                seen[link, send, cut] = min(taken, key=lambda one: one[0])
    torch.save(seen, result)
    dist.destroy_process_group()
