"""What balance gains on the demo's traffic where the busiest rank of each layer sets its time.

Counted from what the demo's model routes in each decode step, so that no clock matters.
"""

import numpy as np
import pytest
import torch

from equipoise.cli.demo.arguments import domain_prompts
from equipoise.cli.demo.settings import DemoSettings
from equipoise.planning.layout import contiguous_layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from equipoise.worker.settings import ROW_BLOCK
from equipoise_kernels.replica_balance import balanced_replicas, count_experts
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.expert_step import ExpertStep
from equipoise_model.generate import greedy
from equipoise_model.placement import PlacementTables

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_REQUESTS, NUM_EXPERTS, NUM_RANKS, TOKENS = 64, 32, 4, 24
SETTINGS = DemoSettings(prompts_per_domain=NUM_REQUESTS, min_output_tokens=TOKENS)
MIXED = "mixed"


@pytest.fixture(scope="module")
def routed():
    """By traffic, layer and step: the experts that 64 requests choose while they decode, [T, K]."""
    model = Checkpoint.open(SETTINGS.checkpoint).load_model(row_block=ROW_BLOCK)
    prompts = {
        domain: domain_prompts(SETTINGS, domain, max_tokens=(TOKENS, TOKENS))
        for domain in SETTINGS.domains
    }
    prompts[MIXED] = [one for same in zip(*prompts.values(), strict=True) for one in same][
        :NUM_REQUESTS
    ]
    choose, found = ExpertStep._choose_slots, {}
    for traffic, these in prompts.items():
        seen = found[traffic] = []

        def noted(step, expert_ids, *, layer, seen=seen):
            if len(expert_ids) == NUM_REQUESTS:  # a decode step
                seen.append((layer, expert_ids, step.token_ids_T))
            return choose(step, expert_ids, layer=layer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExpertStep, "_choose_slots", noted)
            greedy(model, [one.tokens for one in these], max_tokens=TOKENS, chunk_tokens=ROW_BLOCK)
    return found


def load_of(steps, num_layers):
    load = np.zeros((num_layers, NUM_EXPERTS))
    for layer, experts, _ in steps:
        load[layer] += np.bincount(experts.flatten().numpy(), minlength=NUM_EXPERTS)
    return load


def balanced(experts, tables, layer):
    """The replicas that ranks choose together, each with equally many requests."""
    slots, count, _ = tables.of_layer(layer)
    of_rank = experts.chunk(tables.num_ranks)
    counts = torch.stack([count_experts(own, num_experts=NUM_EXPERTS) for own in of_rank])
    place = {"slots_per_rank": tables.slots_per_rank}
    return torch.cat(
        [
            balanced_replicas(own, counts, slots, count, rank=rank, **place)
            for rank, own in enumerate(of_rank)
        ]
    )


def busiest(steps, layout, *, is_balanced=False):
    """The busiest rank's assignments, summed over layers and steps, over those of the mean rank."""
    tables = PlacementTables.from_layout(
        layout.expert_of_slot, num_experts=NUM_EXPERTS, num_ranks=layout.num_ranks, generation=1
    )
    most = mean = 0
    for layer, experts, tokens in steps:
        if is_balanced:
            replicas = balanced(experts, tables, layer)
        else:
            replicas = choose_replicas(experts, tokens, tables.replica_count[layer], layer=layer)
        ranks = tables.slots_of_expert[layer][experts, replicas] // tables.slots_per_rank
        counts = np.bincount(ranks.flatten().numpy(), minlength=layout.num_ranks)
        most, mean = most + counts.max(), mean + counts.mean()
    return most / mean


def test_balance_makes_the_demos_traffic_1_4_times_as_fast_where_experts_take_most_of_a_step(
    routed,
):
    num_layers = 1 + max(layer for layer, _, _ in routed[MIXED])
    start = contiguous_layout(
        num_layers=num_layers,
        num_experts=NUM_EXPERTS,
        num_ranks=NUM_RANKS,
        slots_per_rank=SETTINGS.slots_per_rank,
    )
    found, stale = {}, None
    for traffic, steps in routed.items():
        before, after = steps[: len(steps) // 2], steps[len(steps) // 2 :]
        made = plan(
            load_of(before, num_layers),
            model=ModelShape(
                num_layers=num_layers, num_experts=NUM_EXPERTS, num_groups=1, expert_bytes=1
            ),
            topology=Topology(
                node_of_rank=("a", "a", "b", "b"), slots_per_rank=SETTINGS.slots_per_rank
            ),
            current=start,
            algorithm=Algorithm.INCREMENTAL,
            target_balancedness=0.98,
        )
        balanced_layout = start.with_placement(made.expert_of_slot, generation=2)
        layouts = {"contiguous": start, "stale": stale, "balanced": balanced_layout}
        found[traffic] = {
            name: busiest(after, layout) for name, layout in layouts.items() if layout is not None
        }
        by_counts = busiest(after, balanced_layout, is_balanced=True)
        assert by_counts < found[traffic]["balanced"]
        print(traffic, "replicas chosen by counts", round(float(by_counts), 2))
        print(traffic, {name: round(float(one), 2) for name, one in found[traffic].items()})
        stale = balanced_layout
    for share in (0.6, 0.75, 0.9, 1.0):
        gains = {traffic: gain(share, [found[traffic]]) for traffic in found}
        gains["one kind after the other"] = gain(share, [found[one] for one in SETTINGS.domains])
        print(share, {name: round(float(one), 2) for name, one in gains.items()})
        assert gains[MIXED] >= 0.99
    assert gain(0.75, [found[one] for one in SETTINGS.domains]) >= 1.4


def gain(share, layouts):
    """Of the balanced layout over the contiguous one, if its experts take this share of a step."""
    contiguous, balanced = (
        sum(one[name] for one in layouts) for name in ("contiguous", "balanced")
    )
    return 1 - share + share * contiguous / balanced
