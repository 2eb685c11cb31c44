"""One rank of `test_two_hops`: takes the same steps by one hop and by two, over made-up nodes.

Arguments: rank, number of ranks, rendezvous file, result file.
"""

import hashlib
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
from torch import distributed as dist

from equipoise_kernels.nodes import Nodes
from equipoise_kernels.plain.permute import permute_rows, slot_order
from equipoise_model import expert_step
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import ExchangeError
from equipoise_model.expert_step import ExpertStep
from equipoise_model.experts import StagedExperts
from tests.model.expert_parallel_rank import CONFIG, NUM_ROWS, RankModel, rows_of_rank

NODES = {
    "4x1": (0, 1, 2, 3),
    "8x1": (0, 1, 2, 3, 4, 5, 6, 7),
    "2x2": (0, 0, 1, 1),
    "4x2": (0, 0, 1, 1, 2, 2, 3, 3),
    "uneven": (0, 0, 0, 0, 1, 1),
    "mixed up": (0, 1, 0, 2, 1, 0),
}
"""The node of each rank."""

ROW_BLOCKS = {"fast": None, "row blocks": 16}

SENDS = {"one hop": (False, False), "two hops": (True, False), "sums": (True, True)}
"""Whether rows travel by two hops, and whether outputs are summed on their nodes."""


@contextmanager
def recorded(of_rank, rank):
    """What ranks rows chose, what went to other nodes, and what experts ran."""
    seen = {"ranks": [], "rows": 0, "outputs": 0, "runs": []}
    choose, send, run = ExpertStep._choose_slots, dist.all_to_all_single, expert_step._run_pairs

    def chosen(step, expert_ids, *, layer):
        slots = choose(step, expert_ids, layer=layer)
        seen["ranks"].append(slots // step.placement.slots_per_rank)
        return slots

    def counted(received, rows, receive, send_splits, **options):
        between = sum(
            n for n, node in zip(send_splits, of_rank, strict=True) if node != of_rank[rank]
        )
        if rows.dtype == torch.float32:
            seen["rows" if rows.shape[1] > CONFIG.hidden_size else "outputs"] += between
        return send(received, rows, receive, send_splits, **options)

    def ran(x, pairs, slots, **options):
        order = slot_order(slots)
        rows = permute_rows(x, pairs[order], top_k=options["top_k"])
        digest = hashlib.sha256(rows.numpy().tobytes() + slots[order].numpy().tobytes())
        seen["runs"].append(digest.hexdigest())
        return run(x, pairs, slots, **options)

    with (
        patch.object(expert_step, "_run_pairs", ran),
        patch.object(ExpertStep, "_choose_slots", chosen),
        patch.object(dist, "all_to_all_single", counted),
    ):
        yield seen


def model_of(of_rank, *, rank, row_block, sums_on_nodes):
    model = RankModel(
        rank=rank, num_ranks=len(of_rank), row_block=row_block, group=dist.group.WORLD
    )
    model.ep = ExpertParallel.distributed(
        model.placement(1),
        group=dist.group.WORLD,
        nodes=Nodes(of_rank=of_rank),
        sums_on_nodes=sums_on_nodes,
    )
    return model


def take(of_rank, *, rank, row_block, send, is_balanced=False):
    """Outputs, loads, and what was counted and seen, of steps in two generations."""
    is_two_hop, sums_on_nodes = SENDS[send]
    num_ranks, seen = len(of_rank), {}
    model = model_of(of_rank, rank=rank, row_block=row_block, sums_on_nodes=sums_on_nodes)
    even = [len(part) for part in torch.arange(NUM_ROWS).tensor_split(num_ranks)]
    last_only = [0] * (num_ranks - 1) + [NUM_ROWS]
    with torch.no_grad(), recorded(of_rank, rank) as seen["traffic"]:
        model.ep.agree([even], is_two_hop=is_two_hop, is_balanced=is_balanced)
        seen["even"] = model.forward(rows_of_rank(rank, even))
        model.ep.agree([last_only], is_two_hop=is_two_hop, is_balanced=is_balanced)
        seen["idle"] = model.forward(rows_of_rank(rank, last_only))
        model.ep.agree([[0] * num_ranks], is_two_hop=is_two_hop, is_balanced=is_balanced)
        seen["all idle"] = model.forward(torch.empty(0, CONFIG.hidden_size))
        StagedExperts.prepare(model.payloads(2), [moe.experts for moe in model.layers]).apply()
        model.ep.switch(model.placement(2))
        for moe in model.layers:
            moe.gate.e_score_correction_bias[[0, 1, 2, 3]] = 100.0
        model.ep.agree([even], is_two_hop=is_two_hop, is_balanced=is_balanced)
        seen["switched and skewed"] = model.forward(rows_of_rank(rank, even))
    seen["loads"] = [(load.generation, load.slot_load_LS) for load in model.ep.loads()]
    seen["spread"] = model.ep.spread
    return seen


def gradients(of_rank, *, rank, send):
    model = model_of(of_rank, rank=rank, row_block=None, sums_on_nodes=False)
    even = [len(part) for part in torch.arange(NUM_ROWS).tensor_split(len(of_rank))]
    x = rows_of_rank(rank, even).requires_grad_()
    model.ep.agree([even], is_two_hop=SENDS[send][0])
    model.forward(x).square().sum().backward()
    return x.grad, [moe.experts.down.grad for moe in model.layers]


def outlive_the_last_rank(of_rank, *, rank):
    """The last rank leaves; the others' next step must end in a clear error. Returns its words."""
    num_ranks = len(of_rank)
    if rank == num_ranks - 1:
        return "left"
    model = model_of(of_rank, rank=rank, row_block=None, sums_on_nodes=False)
    tokens = [1] * (num_ranks - 1) + [NUM_ROWS - num_ranks + 1]
    model.ep.agree([tokens], is_two_hop=True)
    try:
        with torch.no_grad():
            model.forward(rows_of_rank(rank, tokens))
    except ExchangeError as error:
        return str(error)
    return "nothing was noticed"


def main(rank, num_ranks, rendezvous, result):
    rank, num_ranks = int(rank), int(num_ranks)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    here = {name: of_rank for name, of_rank in NODES.items() if len(of_rank) == num_ranks}
    seen = {
        (name, mode, send): take(of_rank, rank=rank, row_block=row_block, send=send)
        for name, of_rank in here.items()
        for mode, row_block in ROW_BLOCKS.items()
        for send in SENDS
    }
    for name, of_rank in here.items():
        for send in ("one hop", "two hops"):
            seen[name, "balanced", send] = take(
                of_rank, rank=rank, row_block=16, send=send, is_balanced=True
            )
            seen[name, "gradients", send] = gradients(of_rank, rank=rank, send=send)
    seen["last words"] = outlive_the_last_rank(of_rank, rank=rank)
    torch.save(seen, result)
    dist.destroy_process_group()
