"""One rank of `test_many_ranks_benchmark`: layers whose rows go to some ranks, and to all of them.

Arguments: rank, rows per rank, file with the layout and what rows choose, rendezvous file, result
file. Each layer sends the same rows both ways, in turn.
"""

import time
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
from torch import distributed as dist

from equipoise_model import hops
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.overlap import finish
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.router import Routing

NUM_EXPERTS, TOP_K, DIM = 32, 4, 256
WAYS = {"ranks that need them": True, "all ranks": False}
"""To which ranks rows are sent, and whether they are counted first."""


class ScalingExperts:
    """Expert e returns its rows times e + 1, which costs next to nothing."""

    def __init__(self, experts):
        self.num_slots = len(experts)
        self._factors = torch.tensor(experts) + 1.0

    def __call__(self, x, rows):
        return x * self._factors.repeat_interleave(torch.tensor(rows)).unsqueeze(1)


@contextmanager
def counted():
    """Rows sent to each rank, and bytes of all exchanges."""
    seen, send = {"rows": None, "bytes": 0}, dist.all_to_all_single

    def counting(received, rows, receive, send_splits, **options):
        if rows.shape[1] > DIM:
            seen["rows"] = send_splits
        seen["bytes"] += rows.nbytes
        return send(received, rows, receive, send_splits, **options)

    with patch.object(dist, "all_to_all_single", counting):
        yield seen


def main(rank, case, meet, result):
    rank = int(rank)
    layout, layers = torch.load(case)
    num_ranks = len(layers[0]["ids"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    parallel = ExpertParallel.distributed(
        PlacementTables.from_layout(
            layout.unsqueeze(0), num_experts=NUM_EXPERTS, num_ranks=num_ranks
        ),
        group=dist.group.WORLD,
    )
    experts = ScalingExperts(layout.chunk(num_ranks)[rank].tolist())
    found = []
    for layer in layers:
        x, ids, weights = (layer[name][rank] for name in ("x", "ids", "weights"))
        routing = Routing(expert_ids_TK=ids, weights_TK=weights, scores_TE=weights)
        for way, is_exact in WAYS.items():
            parallel.agree([[len(x)] * num_ranks])
            step = parallel.begin_step(num_tokens=len(x))
            with patch.object(hops, "_is_exact", lambda *_, is_exact=is_exact: is_exact):
                dist.barrier()
                began = time.perf_counter()
                with torch.no_grad(), counted() as seen:
                    y = finish(step.stages(x, routing, experts))
                seen["s"] = time.perf_counter() - began
            found.append({"way": way, "y": y, **seen})
    torch.save(found, result)
    dist.destroy_process_group()
