"""One rank of `test_serving_paths`: serves texts of its own by its share of every model's experts.

Arguments: rank, rendezvous file, file of the models, result file. Groups are the first ranks of
all, so that four processes are enough.
"""

from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.transformer import Transformer
from tests.support.serving_paths import GROUP_SIZES, served_logits


def part_of(case, *, rank, num_ranks, row_block):
    """A model with the experts that the layout gives to this rank."""
    layout = case["layout"]
    num_slots = layout.shape[1] // num_ranks
    model = Transformer(case["config"], num_slots=num_slots, row_block=row_block)
    own = iter(torch.from_numpy(layout[:, rank * num_slots : (rank + 1) * num_slots]))
    state = dict(case["state"])
    for layer in range(case["config"].first_k_dense_replace, case["config"].num_hidden_layers):
        slots = next(own).to(torch.int64)
        for name in ("gate_up", "down"):
            key = f"layers.{layer}.mlp.experts.{name}"
            state[key] = state[key][slots]
    model.load_state_dict(state)
    return model.eval()


def serve_all(cases, *, rank, num_ranks, group):
    """The logits that this rank of a group gives for its own texts, by model and form."""
    seen = {}
    for name, case in cases.items():
        placement = PlacementTables.from_layout(
            case["layout"],
            num_experts=case["config"].n_routed_experts,
            num_ranks=num_ranks,
            generation=1,
        )
        for row_block in (None, 16):
            seen[name, row_block] = served_logits(
                part_of(case, rank=rank, num_ranks=num_ranks, row_block=row_block),
                ExpertParallel.distributed(placement, group=group),
                case["tokens"][rank],
            )
    return seen


def main(rank, rendezvous, models, result):
    rank = int(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=max(GROUP_SIZES),
        timeout=timedelta(seconds=60),
    )
    cases = torch.load(models, weights_only=False)
    seen = {}
    for size in GROUP_SIZES:
        group = dist.new_group(range(size))
        if rank < size:
            seen[size] = serve_all(cases, rank=rank, num_ranks=size, group=group)
    torch.save(seen, result)
    dist.destroy_process_group()
