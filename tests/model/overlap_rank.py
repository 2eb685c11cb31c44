"""One rank of `test_hidden_delays`: times steps whose computation and exchanges take set times.

Arguments: rank, rendezvous file, result file, and a clock: "virtual", or "real", on which they
sleep. Sleeps take no core, so ranks that share cores behave as if each had its own.
"""

import dataclasses
import time
from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise_model import expert_step, overlap
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import RowExchange
from equipoise_model.latent_cache import LatentCache
from equipoise_model.overlap import Order, Stage
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.attention import Attention
from equipoise_model.plain.transformer import Transformer
from equipoise_model.step import StepBatch
from tests.support.small_models import SMALL

CONFIG = dataclasses.replace(SMALL, num_hidden_layers=6, first_k_dense_replace=0)
NUM_RANKS, NUM_ROWS = 2, 8

HALF_S = 0.1
"""Attention of a half of the rows, and the experts of a half: each takes this long."""

SHARES = (0.5, 1.0)
"""Delays of an exchange, or of one with half of the rows, as shares of that."""


class RealClock:
    """Time of this machine."""

    num_times = 3
    now = staticmethod(time.perf_counter)

    def sleep_until(self, end_s):
        time.sleep(max(0.0, end_s - self.now()))


class VirtualClock:
    """Time that passes only in sleeps; all ranks sleep alike."""

    num_times = 1

    def __init__(self):
        self._now_s = 0.0

    def now(self):
        return self._now_s

    def sleep_until(self, end_s):
        self._now_s = max(self._now_s, end_s)


def slowed(function, seconds, *, clock):
    def run(*arguments, **options):
        end_s = clock.now() + seconds(*arguments)
        result = function(*arguments, **options)
        clock.sleep_until(end_s)
        return result

    return run


class Network:
    """Exchanges give no result before a delay: fixed, or for each row of the step's first half."""

    def __init__(self, clock):
        self.clock = clock
        self.fixed_s = self.half_s = self.total_s = 0.0

    def around(self, begin):
        """Return `RowExchange.begin_exchange` with delays."""

        def delayed(ranks, x_ND, *, send, receive):
            delay_s = self._delay_s(x_ND, sum(receive))
            self.total_s += delay_s
            ready_s = self.clock.now() + delay_s
            receive_rows = begin(ranks, x_ND, send=send, receive=receive)

            def wait():
                received = receive_rows()
                self.clock.sleep_until(ready_s)
                return received

            return wait

        return delayed

    def _delay_s(self, x_ND, num_received):
        is_outputs = x_ND.shape[1] == CONFIG.hidden_size
        num_rows = num_received / (CONFIG.num_experts_per_tok if is_outputs else NUM_RANKS)
        return self.fixed_s + self.half_s * num_rows / (NUM_ROWS / 2)


def serial_turns(_order, *, num_batches, num_layers):
    """A layer of one micro-batch after that of the other: nothing can overlap."""
    return tuple(
        (batch, stage) for _ in range(num_layers) for batch in range(num_batches) for stage in Stage
    )


def main(rank, rendezvous, result, clock):
    rank, clock = int(rank), {"real": RealClock, "virtual": VirtualClock}[clock]()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = Transformer(CONFIG, num_slots=CONFIG.n_routed_experts // NUM_RANKS)
    row_s = HALF_S / (NUM_ROWS / 2)
    for name in ("project", "attend"):
        slow = slowed(getattr(Attention, name), lambda _, x, *__: len(x) * row_s / 2, clock=clock)
        setattr(Attention, name, slow)
    # Two ranks send all rows to each other, so both sleep as long.
    expert_step._run_pairs = slowed(
        expert_step._run_pairs, lambda x, *_: len(x) * row_s / NUM_RANKS, clock=clock
    )
    network = Network(clock)
    RowExchange.begin_exchange = network.around(RowExchange.begin_exchange)
    planned = overlap.turns

    def take(order, *, is_cut):
        layout = torch.arange(CONFIG.n_routed_experts).expand(CONFIG.num_moe_layers, -1).numpy()
        placement = PlacementTables.from_layout(
            layout, num_experts=CONFIG.n_routed_experts, num_ranks=NUM_RANKS, generation=1
        )
        experts = ExpertParallel.distributed(placement, group=dist.group.WORLD, order=order)
        cache = LatentCache(CONFIG, num_blocks=2, max_len=32)
        batch = StepBatch(
            tokens_T=torch.arange(NUM_ROWS),
            positions_T=torch.arange(NUM_ROWS),
            sequences_T=torch.zeros(NUM_ROWS, dtype=torch.int64),
            block_tables=[[0, 1]],
            sample_rows_S=torch.arange(1),
        )
        half = [NUM_ROWS // 2] * NUM_RANKS
        experts.agree([half, half] if is_cut else [[NUM_ROWS] * NUM_RANKS])
        dist.barrier()
        network.total_s, began = 0.0, clock.now()
        model.step(batch, cache, experts)
        return clock.now() - began, network.total_s

    seen = {}
    for name, is_cut, order, table in (
        ("whole", False, Order.PREFILL, planned),
        ("prefill", True, Order.PREFILL, planned),
        ("decode", True, Order.DECODE, planned),
        ("serial", True, Order.PREFILL, serial_turns),
    ):
        overlap.turns = table
        for kind, share in [("none", 0.0)] + [
            (kind, share) for kind in ("fixed", "per byte") for share in SHARES
        ]:
            network.fixed_s = share * HALF_S if kind == "fixed" else 0.0
            network.half_s = share * HALF_S if kind == "per byte" else 0.0
            taken = [take(order, is_cut=is_cut) for _ in range(clock.num_times)]
            seen[name, kind, share] = min(taken)
    torch.save(seen, result)
    dist.destroy_process_group()
