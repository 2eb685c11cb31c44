"""How many nodes a token reaches under planned layouts: as ranks count it, and as pools show it."""

import numpy as np
import pytest
import torch

from equipoise.planning.layout import Layout
from equipoise.planning.node_traffic import NodeCounters
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from equipoise.worker.placement import placement_of
from equipoise.worker.statistics import node_counts
from equipoise_kernels.nodes import Nodes
from equipoise_kernels.plain.route import route
from equipoise_kernels.replica_choice import choose_replicas
from equipoise_model.node_traffic import NodeTraffic

NUM_TOKENS, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS = 4_000, 256, 8, 4
NUM_NODES, NUM_RANKS, SLOTS_PER_RANK = 8, 32, 9
SLOTS_PER_NODE = NUM_RANKS // NUM_NODES * SLOTS_PER_RANK
NODES = Nodes(of_rank=tuple(np.repeat(np.arange(NUM_NODES), NUM_RANKS // NUM_NODES).tolist()))


@pytest.fixture(scope="module")
def experts():
    """The experts that tokens choose, [tokens, 8], by DeepSeek-V3's routing; some are popular."""
    generator = torch.Generator().manual_seed(0)
    ids, _ = route(
        torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator),
        torch.randn(NUM_EXPERTS, generator=generator) / 10,
        num_groups=NUM_GROUPS,
        top_groups=TOP_GROUPS,
        top_k=8,
        normalize=True,
        scale=2.5,
    )
    return ids


def slots_of_tokens(experts, **options):
    """The slots that tokens choose, [tokens, 8], in a layout planned for exactly these tokens."""
    made = plan(
        np.bincount(experts.flatten(), minlength=NUM_EXPERTS)[None].astype(float),
        model=ModelShape(
            num_layers=1, num_experts=NUM_EXPERTS, num_groups=NUM_GROUPS, expert_bytes=1
        ),
        topology=Topology(
            node_of_rank=tuple(map(str, NODES.of_rank)), slots_per_rank=SLOTS_PER_RANK
        ),
        **options,
    )
    layout = Layout(
        generation=1,
        num_experts=NUM_EXPERTS,
        num_ranks=NUM_RANKS,
        expert_of_slot=made.expert_of_slot,
    )
    slots, count, _ = placement_of(layout).of_layer(0)
    replicas = choose_replicas(experts, torch.arange(NUM_TOKENS), count, layer=0)
    return slots[experts, replicas]


def shown_by_the_pool(slots):
    """What a window shows if ranks bring equally many of the tokens and send them by one hop."""
    counters = NodeCounters(num_ranks=NUM_RANKS, is_heard_from_start=True)
    for rank, own in enumerate((slots // SLOTS_PER_RANK).chunk(NUM_RANKS)):
        traffic = NodeTraffic(NODES, rank=rank, device=torch.device("cpu"))
        traffic.choose(own)
        pairs = traffic.remote_pairs(own)
        traffic.note(direct=pairs, rows=pairs, outputs=pairs)
        counters.accept(rank, node_counts(traffic.spread()))
    return counters.in_window(np.ones(NUM_RANKS))


@pytest.mark.parametrize(
    ("options", "most_nodes"),
    [
        ({"algorithm": Algorithm.HIERARCHICAL}, TOP_GROUPS),
        ({"algorithm": Algorithm.INCREMENTAL, "locality": 0.0}, TOP_GROUPS),
        ({"algorithm": Algorithm.GLOBAL}, 8),
    ],
    ids=["hierarchical", "incremental, locality 0", "global"],
)
def test_tokens_reach_as_many_nodes_as_groups_only_if_groups_are_on_one_node(
    experts, options, most_nodes
):
    slots = slots_of_tokens(experts, **options)
    reached = [len(set(row)) for row in (slots // SLOTS_PER_NODE).tolist()]
    assert max(reached) == most_nodes
    traffic = shown_by_the_pool(slots)
    assert traffic.most_nodes == most_nodes
    assert traffic.rows_by_nodes == tuple(np.bincount(reached))
    assert traffic.nodes == pytest.approx(np.mean(reached))
