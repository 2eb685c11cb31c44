"""One rank of `test_ranks`: serves in FP8 with others, and saves its results.

Arguments: rank, number of ranks, folder of the checkpoint, empty folder that all share, backend of
the exchange. The last rank leaves at the end, and the others continue without it, with the shared
expert in slots.
"""

import dataclasses
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.testing.interpreter import corrected_casts
from equipoise_kernels.nodes import Nodes
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import ExchangeError
from equipoise_model.fp8.graphs import DecodeGraphs, capture_obstacle
from equipoise_model.fp8.slot_exchange import SlotExchange
from equipoise_model.overlap import Order
from tests.support.fp8_models import NARROW
from tests.support.fp8_ranks import (
    ROOM,
    SLOTS_PER_RANK,
    Part,
    compute_rows_one_by_one,
    placement_of,
)

PATIENCE_S = 60
IMPATIENCE_S = 4.0
CAPTURED_ROWS = 2

MORE = {
    "reference": {
        "two hops": {"is_two_hop": True},
        "two hops, cut": {"is_two_hop": True, "order": Order.PREFILL},
        "sums on nodes": {"is_two_hop": True, "sums_on_nodes": True},
        "balanced": {"is_balanced": True, "is_two_hop": True, "order": Order.DECODE},
    },
    "triton": {"balanced": {"is_balanced": True}},
}
"""Further ways in which ranks serve, by backend."""


def met(folder, rank, num_ranks, *, epoch):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'epoch-{epoch}'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def nodes_of(num_ranks):
    return Nodes(of_rank=(0, 1, 1, 0)[:num_ranks])


def opened(rank, num_ranks, *, config=NARROW, timeout_s=PATIENCE_S, sums_on_nodes=False):
    """This rank's end, as a worker opens it; rank 0 alone wishes for all the room."""
    shape = EpShape(
        rank=rank,
        num_ranks=num_ranks,
        slots_per_rank=SLOTS_PER_RANK,
        top_k=config.slots_per_token,
        dim=NARROW.hidden_size,
        max_tokens=ROOM if rank == 0 else 1,
        payload=Payload.FP8,
    )
    return SlotExchange.open(
        shape,
        max_captured_rows=CAPTURED_ROWS + rank,
        generation=1,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        nodes=nodes_of(num_ranks),
        sums_on_nodes=sums_on_nodes,
    )


def experts_over(exchange, num_ranks, *, config=NARROW, order=Order.PREFILL):
    return ExpertParallel.distributed(
        placement_of(config, num_ranks, 1),
        group=dist.group.WORLD,
        exchange=exchange,
        order=order,
        nodes=nodes_of(num_ranks),
    )


def served_together(
    checkpoint,
    rank,
    num_ranks,
    *,
    shared_as_routed=False,
    order=None,
    sums_on_nodes=False,
    **agreed,
):
    """Logits, loads by generation, how steps ran, and how many graphs there are.

    With an order of exchanges, steps are cut into two micro-batches.
    """
    captures = []

    def capture(work):
        # As on a device: capturing runs the work once more than asked for.
        captures.append(work())
        return work

    config = dataclasses.replace(NARROW, shared_as_routed=shared_as_routed)
    exchange = opened(rank, num_ranks, config=config, sums_on_nodes=sums_on_nodes)
    part = Part(
        checkpoint,
        rank=rank,
        num_ranks=num_ranks,
        shared_as_routed=shared_as_routed,
        graphs=DecodeGraphs(max_rows=4, new_capture=lambda: capture),
    )
    experts = experts_over(exchange, num_ranks, config=config, order=order or Order.PREFILL)
    logits = part.serve(experts, is_cut=order is not None, **agreed)
    seen = {
        "logits": logits,
        "loads": [(load.generation, load.slot_load_LS) for load in experts.loads()],
        "backend": exchange.backend,
        "obstacle": capture_obstacle(exchange),
        "captured rows": exchange.max_captured_rows,
        "captures": len(captures),
        "waited": experts.waited_s,
        "spread": experts.spread,
    }
    experts.close()
    return seen


def words_of_failure(part, exchange, num_ranks):
    """What a step ends in that cannot succeed."""
    experts = experts_over(exchange, num_ranks)
    # As a step's header would announce.
    experts.agree([[1] * num_ranks])
    try:
        part.step(experts)
    except ExchangeError as error:
        return str(error)
    finally:
        experts.close()
    return "nothing was noticed"


def wait_for(files):
    """Until all are there; a rank that leaves is noticed at once, and these are to wait in vain."""
    until = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files) and time.monotonic() < until:
        time.sleep(0.02)


def main(rank, num_ranks, checkpoint, folder, backend):
    warnings.simplefilter("ignore", DeprecationWarning)
    with corrected_casts():
        serve(int(rank), int(num_ranks), Path(checkpoint), Path(folder), backend)


def serve(rank, num_ranks, checkpoint, folder, backend):
    torch.set_num_threads(1)
    compute_rows_one_by_one()
    setting = f"reference,all_to_all={backend}"
    selection.start(selection.resolve(setting, lambda _operation, _name: None))
    met(folder, rank, num_ranks, epoch=1)
    seen = {"together": served_together(checkpoint, rank, num_ranks)}
    for order in Order:
        seen[order.name] = served_together(checkpoint, rank, num_ranks, order=order)
    for name, changes in MORE[backend].items():
        seen[name] = served_together(checkpoint, rank, num_ranks, **changes)
    part = Part(checkpoint, rank=rank, num_ranks=num_ranks)
    skewed = opened(rank, num_ranks)
    skewed.switch(8 if rank == 1 else 7)
    seen["skewed"] = words_of_failure(part, skewed, num_ranks)
    lonely = opened(rank, num_ranks, timeout_s=IMPATIENCE_S)
    survivors = range(num_ranks - 1)
    dist.barrier()  # Else the last to be ready is named, and not the one that stands still.
    if rank in survivors:
        seen["lonely"] = words_of_failure(part, lonely, num_ranks)
        (folder / f"waited-{rank}").touch()
    wait_for([folder / f"waited-{other}" for other in survivors])
    dist.destroy_process_group()
    if rank in survivors:
        met(folder, rank, num_ranks - 1, epoch=2)
        seen["re-formed"] = served_together(checkpoint, rank, num_ranks - 1, shared_as_routed=True)
        dist.destroy_process_group()
    torch.save(seen, folder / f"result-{rank}")
