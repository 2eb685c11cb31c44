"""One rank of `test_micro_batches`: takes the same steps uncut and with every cut.

Arguments: rank, number of ranks, rendezvous file, file of the model, result file.
"""

import itertools
import os
import time
from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise_kernels.nodes import Nodes
from equipoise_model import expert_step
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import ExchangeError
from equipoise_model.latent_cache import LatentCache
from equipoise_model.overlap import Order
from equipoise_model.placement import PlacementTables
from equipoise_model.step import StepBatch
from tests.model.serving_rank import part_of

TIMEOUT_S = 30

TOKENS = (6, 1, 0)
"""Rows of each rank in the step that is cut: some of two sequences, of one, and none."""


def batch_of(rank):
    """The prompt's beginning, and the step that follows, on a rank."""
    first = _batch([(0, range(3))] if rank == 0 else [])
    second = _batch([[(0, range(3, 8)), (1, range(1))], [(0, range(1))], []][rank])
    return first, second


def _batch(spans):
    tokens, positions, sequences = [], [], []
    for sequence, span in spans:
        tokens += [(7 * position + 3 * sequence) % 64 for position in span]
        positions += span
        sequences += [sequence] * len(span)
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        block_tables=[[0, 2], [1, 3]],
        sample_rows_S=torch.arange(len(tokens)),
    )


NODES = (0, 1, 0)
"""Node of each rank in steps whose rows travel by two hops."""


def take(case, *, rank, num_ranks, order, second, is_two_hop=False, is_balanced=False):
    """Logits, loads and latents after two steps.

    The last one is cut so that the ranks' second micro-batches have `second` rows; None: uncut.
    """
    placement = PlacementTables.from_layout(
        case["layout"], num_experts=8, num_ranks=num_ranks, generation=1
    )
    experts = ExpertParallel.distributed(
        placement, group=dist.group.WORLD, order=order, nodes=Nodes(of_rank=NODES[:num_ranks])
    )
    model = part_of(case, rank=rank, num_ranks=num_ranks, row_block=16)
    cache = LatentCache(case["config"], num_blocks=4, max_len=32)
    before, batch = batch_of(rank)
    tokens = [3, 0, 0][:num_ranks]
    experts.agree([tokens], is_two_hop=is_two_hop, is_balanced=is_balanced)
    model.step(before, cache, experts)
    tokens = TOKENS[:num_ranks]
    if second is None:
        batches = [tokens]
    else:
        batches = [[all_ - cut for all_, cut in zip(tokens, second, strict=True)], second]
    experts.agree(batches, is_two_hop=is_two_hop, is_balanced=is_balanced)
    logits = model.step(batch, cache, experts).logits_SV
    latents = b"".join(cache.read_block(block) for block in range(4))
    return logits, experts.loads()[0].slot_load_LS, latents


def die_between_dispatch_and_combine(case, *, rank, num_ranks):
    """The last rank dies in the cut step: it has sent rows, and no outputs.

    Returns the others' words, and seconds until then.
    """
    computed, layers = expert_step._run_pairs, itertools.count()

    def die(*arguments, **options):
        if next(layers) == case["config"].num_moe_layers and rank == num_ranks - 1:
            os._exit(0)
        return computed(*arguments, **options)

    expert_step._run_pairs = die
    began = time.monotonic()
    second = [cut // 2 for cut in TOKENS[:num_ranks]]
    try:
        take(case, rank=rank, num_ranks=num_ranks, order=Order.PREFILL, second=second)
    except ExchangeError as error:
        return str(error), time.monotonic() - began
    return "nothing was noticed", time.monotonic() - began


def main(rank, num_ranks, rendezvous, models, result):
    rank, num_ranks = int(rank), int(num_ranks)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    case = torch.load(models, weights_only=False)[num_ranks]
    place = {"rank": rank, "num_ranks": num_ranks}
    seen = {"uncut": take(case, **place, order=Order.PREFILL, second=None)}
    cuts = list(itertools.product(*(range(1 + tokens) for tokens in TOKENS[:num_ranks])))
    for order, second in itertools.product(Order, cuts):
        seen[order.name, second] = take(case, **place, order=order, second=list(second))
        seen[order.name, "two hops", second] = take(
            case, **place, order=order, second=list(second), is_two_hop=True
        )
    for order, is_two_hop in itertools.product(Order, (False, True)):
        second = [cut // 2 for cut in TOKENS[:num_ranks]]
        seen[order.name, is_two_hop, "balanced"] = take(
            case, **place, order=order, second=second, is_two_hop=is_two_hop, is_balanced=True
        )
    torch.save(seen, result)
    seen["last words"] = die_between_dispatch_and_combine(case, **place)
    torch.save(seen, result)
    dist.destroy_process_group()
