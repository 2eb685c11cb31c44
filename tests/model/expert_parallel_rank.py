"""One rank of `test_expert_parallel`: runs every scenario and saves what it saw.

Arguments: rank, number of ranks, rendezvous file, result file. All is derived from seeds, so that
groups of any size compute the same model on the same rows.
"""

import dataclasses
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed as dist

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.exchange import ExchangeError
from equipoise_model.expert_step import ExpertStep
from equipoise_model.experts import StagedExperts
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.moe import MoE
from tests.support.small_models import MOE_LAYERS as CONFIG

SHARED_AS_ROUTED = dataclasses.replace(CONFIG, shared_as_routed=True)
NUM_SLOTS = 24
NUM_ROWS = 26


def layout_of(generation, config=CONFIG):
    """Spare slots hold anything; if the shared expert is in slots, it has three."""
    rng = np.random.default_rng(generation)
    num_experts, rows = config.num_placed_experts, []
    for _ in range(config.num_moe_layers):
        extra = rng.integers(0, CONFIG.n_routed_experts, NUM_SLOTS - num_experts)
        if config.shared_as_routed:
            extra[:2] = CONFIG.n_routed_experts
        rows.append(rng.permutation(np.concatenate([np.arange(num_experts), extra])))
    return np.array(rows)


def shares_of(generation, config):
    """Even for the first generation; then an expert's first slot serves all but an eighth."""
    if generation == 1:
        return None
    shares = np.zeros((config.num_moe_layers, NUM_SLOTS), dtype=np.int64)
    for row, experts in zip(shares, layout_of(generation, config), strict=True):
        for expert in range(config.num_placed_experts):
            first, *others = np.flatnonzero(experts == expert)
            row[others[:1]] = 1 << 12
            row[first] = (1 << 15) - row[others[:1]].sum()
    return shares


def expert_payload(layer, expert):
    generator = torch.Generator().manual_seed(1000 * layer + expert)
    values = torch.randn(CONFIG.expert_bytes // 2, generator=generator) / 6
    return values.to(torch.bfloat16).view(torch.uint8)


def fill(dense, payload, moe):
    """Give a dense network the weights of an expert's payload."""
    gate_up, down = moe.experts.decode(payload)
    gate, up = gate_up.chunk(2)
    for linear, weight in ((dense.gate_proj, gate), (dense.up_proj, up), (dense.down_proj, down)):
        linear.weight.copy_(weight)


class RankModel:
    """Two MoE layers in a residual stream, with the slots that one rank has of `layout_of(1)`."""

    def __init__(self, *, rank, num_ranks, row_block, group, config=CONFIG):
        self.config = config
        self.rank = rank
        self.num_slots = NUM_SLOTS // num_ranks
        self.num_ranks = num_ranks
        self.layers = []
        for layer in range(CONFIG.num_moe_layers):
            moe = MoE(config, num_slots=self.num_slots, row_block=row_block)
            with torch.no_grad():
                moe.gate.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(layer))
                if moe.shared_experts is not None:
                    fill(moe.shared_experts, expert_payload(layer, CONFIG.n_routed_experts), moe)
            self.layers.append(moe)
        for (layer, slot), payload in self.payloads(1).items():
            self.layers[layer].experts.write(slot, payload)
        self.ep = (
            ExpertParallel.local(config, self.placement(1))
            if num_ranks == 1
            else ExpertParallel.distributed(self.placement(1), group=group)
        )

    def placement(self, generation):
        return PlacementTables.from_layout(
            layout_of(generation, self.config),
            num_experts=self.config.num_placed_experts,
            num_ranks=self.num_ranks,
            generation=generation,
            share_of_slot=shares_of(generation, self.config),
        )

    def own_layout(self, generation):
        first = self.rank * self.num_slots
        return layout_of(generation, self.config)[:, first : first + self.num_slots]

    def payloads(self, generation):
        return {
            (layer, slot): expert_payload(layer, int(expert))
            for (layer, slot), expert in np.ndenumerate(self.own_layout(generation))
        }

    def forward(self, x):
        step = self.ep.begin_step(num_tokens=len(x))
        for moe in self.layers:
            x = x + moe(x, step)
        return x


def rows_of_rank(rank, splits):
    """This rank's part of the same rows that every group size computes."""
    x = torch.randn(NUM_ROWS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(7))
    return x.split(splits)[rank].clone()


@contextmanager
def recorded():
    """The slots that rows chose in each layer, and the rows sent with them to each rank."""
    slots, sent = [], []
    choose, send = ExpertStep._choose_slots, dist.all_to_all_single

    def chosen(step, expert_ids, *, layer):
        slots.append(choose(step, expert_ids, layer=layer))
        return slots[-1]

    def counted(received, rows, receive, send_splits, **options):
        if rows.shape[1] > CONFIG.hidden_size:
            sent.extend(send_splits)
        return send(received, rows, receive, send_splits, **options)

    with (
        patch.object(ExpertStep, "_choose_slots", chosen),
        patch.object(dist, "all_to_all_single", counted),
    ):
        yield slots, sent


def run_mode(*, rank, num_ranks, row_block, group, config=CONFIG):
    """Outputs and loads of all scenarios in one mode."""
    place = {
        "rank": rank, "num_ranks": num_ranks, "row_block": row_block, "group": group,
        "config": config,
    }  # fmt: skip
    even = [len(part) for part in torch.arange(NUM_ROWS).tensor_split(num_ranks)]
    last_only = [0] * (num_ranks - 1) + [NUM_ROWS]
    first_only = [NUM_ROWS] + [0] * (num_ranks - 1)
    seen = {}
    with torch.no_grad():
        model = RankModel(**place)
        with recorded() as (seen["even slots"], seen["even sent"]):
            seen["even"] = model.forward(rows_of_rank(rank, even))
        model.ep.agree([last_only])
        seen["idle"] = model.forward(rows_of_rank(rank, last_only))
        model.ep.agree([[0] * num_ranks])
        seen["all idle"] = model.forward(torch.empty(0, CONFIG.hidden_size))
        staged = StagedExperts.prepare(model.payloads(2), [moe.experts for moe in model.layers])
        staged.apply()
        model.ep.switch(model.placement(2))
        seen["switched"] = model.forward(rows_of_rank(rank, first_only))
        seen["loads"] = [(load.generation, load.slot_load_LS) for load in model.ep.loads()]
        model = RankModel(**place)
        for moe in model.layers:
            moe.gate.e_score_correction_bias[[0, 1, 2, 3]] = 100.0
        with recorded() as (seen["skewed slots"], seen["skewed sent"]):
            seen["skewed"] = model.forward(rows_of_rank(rank, even))
        seen["skewed loads"] = model.ep.loads()[0].slot_load_LS
    model = RankModel(**place)
    x = rows_of_rank(rank, even).requires_grad_()
    model.forward(x).square().sum().backward()
    seen["row gradients"] = x.grad
    seen["slot gradients"] = [moe.experts.down.grad for moe in model.layers]
    seen["own layout"] = model.own_layout(1)
    return seen


def outlive_the_last_rank(model, *, rank, num_ranks):
    """The last rank leaves; the others' next step must end in a clear error. Returns its words."""
    if rank == num_ranks - 1:
        return "left"
    try:
        with torch.no_grad():
            model.forward(rows_of_rank(rank, [1] * num_ranks + [NUM_ROWS - num_ranks]))
    except ExchangeError as error:
        return str(error)
    return "nothing was noticed"


def main(rank, num_ranks, rendezvous, result):
    rank, num_ranks = int(rank), int(num_ranks)
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
    group = dist.group.WORLD if num_ranks > 1 else None
    place = {"rank": rank, "num_ranks": num_ranks, "group": group}
    seen = {
        "fast": run_mode(row_block=None, **place),
        "row blocks": run_mode(row_block=16, **place),
        "shared as routed": run_mode(row_block=16, config=SHARED_AS_ROUTED, **place),
    }
    if num_ranks > 1:
        model = RankModel(row_block=None, **place)
        seen["last words"] = outlive_the_last_rank(model, rank=rank, num_ranks=num_ranks)
    torch.save(seen, result)
    if num_ranks > 1:
        # Else the group's threads may still run when the process takes down what they use, and a
        # thread that is not joined then ends it with "terminate called".
        dist.destroy_process_group()
