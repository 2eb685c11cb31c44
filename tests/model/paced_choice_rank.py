"""One rank of `test_replica_choice_benchmark`: layers whose experts take time for each assignment.

Arguments: rank, seconds for each assignment, file with the layout and what rows choose, rendezvous
file, result file. Each layer runs hashed and balanced in turn, on the same rows.
"""

import statistics
import time
from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.overlap import finish
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.router import Routing

EXPERTS, DIM = 256, 64


class FreeExperts:
    """Experts that return their rows; what they cost is the pace."""

    def __init__(self, num_slots):
        self.num_slots = num_slots

    def __call__(self, x, rows):
        return x


def main(rank, pace_s, case, meet, result):
    rank = int(rank)
    layout, chosen = torch.load(case, weights_only=False)
    _, num_ranks, num_rows, top_k = chosen.shape
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    experts = ExpertParallel.distributed(
        PlacementTables.from_layout(layout, num_experts=EXPERTS, num_ranks=num_ranks),
        group=dist.group.WORLD,
        pace_s_per_row=float(pace_s),
    )
    took, x = {False: [], True: []}, torch.ones(num_rows, DIM)
    weights = torch.ones(num_rows, top_k)
    with torch.no_grad():
        for ids in chosen[:, rank]:
            routing = Routing(expert_ids_TK=ids, weights_TK=weights, scores_TE=weights)
            for is_balanced, times in took.items():
                experts.agree([[num_rows] * num_ranks], is_balanced=is_balanced)
                step = experts.begin_step(num_tokens=num_rows)
                dist.barrier()
                began = time.perf_counter()
                finish(step.stages(x, routing, FreeExperts(layout.shape[1] // num_ranks)))
                times.append(time.perf_counter() - began)
    torch.save({name: statistics.median(times) for name, times in took.items()}, result)
    dist.destroy_process_group()
