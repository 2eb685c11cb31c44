"""Runs a small model in FP8 on the GPU, in several ways, and prints how they compare, in JSON.

python fp8_on_gpu.py FOLDER    an empty one, for its checkpoint
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.moe.route import route_to_slots
from equipoise_kernels.fp8.self_test import start_process
from equipoise_kernels.numerics import difference
from equipoise_model.checkpoint import Checkpoint, save
from equipoise_model.config import Fp8Config
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import StagedExperts
from equipoise_model.fp8 import block
from equipoise_model.fp8.graphs import DecodeGraphs
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables
from equipoise_model.plain.transformer import Transformer
from equipoise_model.step import StepBatch
from tests.support.fp8_models import NARROW

CUDA = torch.device("cuda")
CONFIG = dataclasses.replace(NARROW, num_hidden_layers=3, n_routed_experts=8, num_attention_heads=4)
LAYOUTS = (
    [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]] * 2,
    [[7, 1, 2, 3, 4, 5, 6, 0, 2, 2]] * 2,
    [[7, 1, 2, 3, 4, 5, 6, 0, 1, 0]] * 2,
)
WHOLE, QUARTER = 2**15, 2**13
SHARES = (
    None,
    [[WHOLE] * 2 + [QUARTER] + [WHOLE] * 5 + [QUARTER, 2 * QUARTER]] * 2,
    [[WHOLE, QUARTER] + [WHOLE] * 5 + [3 * QUARTER] * 2 + [QUARTER]] * 2,
)
PROMPTS = [[5, 9, 2, 40, 7], [11, 3], [8, 8, 8]]
NUM_DECODED = 11
# Slots of every layer that routes, call by call, and the cache before each step, since `run` began.
ROUTED = []
CACHES = []


def main(folder):
    torch.manual_seed(0)
    model = Transformer(CONFIG).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.1)
    save(model, folder / "fp8", fp8=Fp8Config())
    start_process()
    block.route_to_slots = recorded
    checkpoint = Checkpoint.open(folder / "fp8", keep_fp8=True)
    graphs = DecodeGraphs(max_rows=4)
    eager, eager_loads = run(checkpoint, switches=True)
    eager_routed, eager_caches = [*ROUTED], [*CACHES]
    captured, captured_loads = run(checkpoint, switches=True, graphs=graphs)
    unswitched, _ = run(checkpoint, switches=False)
    twins = selection.resolve("reference", lambda operation, backend: None)
    selection.adopt(twins)
    by_twins, _ = run(checkpoint, switches=True, caches=eager_caches)
    alike = agreeing(eager_routed, ROUTED)
    print(
        json.dumps(
            {
                "num_steps": len(eager),
                "num_graphs": len(graphs._graphs),
                "from_twins": [
                    difference(ours[row], theirs[row])
                    for ours, theirs, rows in zip(eager, by_twins, alike, strict=True)
                    for row in rows
                ],
                "num_rows": sum(map(len, eager)),
                "captured_is_eager": list(map(torch.equal, captured, eager)),
                "switched_is_unswitched": all(map(torch.equal, eager, unswitched)),
                "loads_agree": eager_loads == captured_loads,
            }
        )
    )


def run(checkpoint, *, switches, graphs=None, caches=()):
    """Logits of a prefill, of decode steps of three sequences, and of one alone; and the loads.

    Each step begins with the cache that `caches` has for it, or with what the last one left.

    The layout changes behind every third step, if it does: from even shares to uneven ones, to
    others, and back to even ones.
    """
    ROUTED.clear()
    CACHES.clear()
    with CUDA:
        model = Fp8Transformer(checkpoint.config, num_slots=10, num_spare=2, graphs=graphs)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, LAYOUTS[0])
    cache = LatentCache(CONFIG, num_blocks=8, max_len=64, dtype=torch.bfloat16, device=CUDA)
    experts = ExpertParallel.local(CONFIG, placement(0, generation=1))
    logits, generation = [], 1

    def run_step(tokens, starts):
        before = caches[len(CACHES)] if caches else cache._stores
        for store, kept in zip(cache._stores, before, strict=True):
            store.copy_(kept)
        CACHES.append([store.clone() for store in cache._stores])
        logits.append(model.step(batch(tokens, starts), cache, experts).logits_SV)

    run_step(PROMPTS, [0, 0, 0])
    for step in range(NUM_DECODED):
        # The last one is of a sequence alone, which takes another graph.
        rows = PROMPTS[:1] if step == NUM_DECODED - 1 else PROMPTS
        starts = [len(prompt) + step for prompt in rows]
        next_tokens = [[3 * step + n] for n in range(len(rows))]
        run_step(next_tokens, starts)
        if switches and step % 3 == 2:
            before, after = (generation - 1) % len(LAYOUTS), generation % len(LAYOUTS)
            staged(checkpoint, model, LAYOUTS[before], LAYOUTS[after]).apply()
            generation += 1
            experts.switch(placement(after, generation=generation))
    return [one.cpu() for one in logits], [load.slot_load_LS.tolist() for load in experts.loads()]


def recorded(*arguments, **options):
    """Route, and keep the slots unless a graph is being captured."""
    routes = route_to_slots(*arguments, **options)
    if not torch.cuda.is_current_stream_capturing():
        ROUTED.append(routes.slots_TK.cpu())
    return routes


def agreeing(ours, theirs):
    """Sequences of each step whose tokens took the same slots in both runs, in every layer.

    Scores that differ by less than they are rounded choose different experts now and then, which
    makes logits incomparable.
    """
    per_step = len(ours) // (1 + NUM_DECODED)
    steps = []
    for step in range(1 + NUM_DECODED):
        rows = PROMPTS if step < NUM_DECODED else PROMPTS[:1]
        owners = [n for n, row in enumerate(rows) for _ in (row if step == 0 else [0])]
        alike, layers = {*owners}, slice(step * per_step, (step + 1) * per_step)
        for one, other in zip(ours[layers], theirs[layers], strict=True):
            is_other = (one.sort(dim=1).values != other.sort(dim=1).values).any(dim=1)
            alike -= {owner for owner, differs in zip(owners, is_other, strict=True) if differs}
        steps.append(sorted(alike))
    return steps


def placement(number, *, generation):
    layout = PlacementTables.from_layout(
        LAYOUTS[number], num_experts=8, generation=generation, share_of_slot=SHARES[number]
    )
    return layout.to(CUDA)


def staged(checkpoint, model, before, after):
    moves = {
        (layer, slot): checkpoint.read_expert(layer, expert)
        for layer, row in enumerate(after)
        for slot, expert in enumerate(row)
        if before[layer][slot] != expert
    }
    return StagedExperts.prepare(moves, model.slots)


def batch(tokens, starts):
    flat = [token for row in tokens for token in row]
    places = [start + n for row, start in zip(tokens, starts, strict=True) for n in range(len(row))]
    owners = [owner for owner, row in enumerate(tokens) for _ in row]
    ends = torch.tensor([len(row) for row in tokens]).cumsum(0)
    return StepBatch(
        tokens_T=torch.tensor(flat),
        positions_T=torch.tensor(places),
        sequences_T=torch.tensor(owners),
        block_tables=[[2 * owner, 2 * owner + 1] for owner in range(len(tokens))],
        sample_rows_S=ends - 1,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
