"""What DeepSeek-V3's routing sends between nodes, by one hop and by two."""

import pytest
import torch

from equipoise_kernels.nodes import Nodes
from equipoise_kernels.plain.route import route
from equipoise_model.node_traffic import NodeTraffic

NUM_TOKENS, NUM_EXPERTS, RANKS_PER_NODE = 20_000, 256, 8


@pytest.fixture(scope="module")
def experts():
    """The experts that tokens choose, [tokens, 8]: of 4 of 8 groups, with uniform scores."""
    generator = torch.Generator().manual_seed(0)
    ids, _ = route(
        torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator),
        torch.zeros(NUM_EXPERTS),
        num_groups=8,
        top_groups=4,
        top_k=8,
        normalize=True,
        scale=2.5,
    )
    return ids


@pytest.mark.parametrize(
    ("num_nodes", "is_grouped", "two_hops", "one_hop", "most_nodes"),
    [
        (4, True, 2.34, 6.0, 4),
        (8, True, 3.45, 7.0, 4),
        (4, False, 2.71, 6.0, 4),
        (8, False, 4.64, 7.0, 8),
    ],
)
def test_deepseek_v3s_rows_between_nodes(
    experts, num_nodes, is_grouped, two_hops, one_hop, most_nodes
):
    num_ranks = num_nodes * RANKS_PER_NODE
    rank_of_expert = torch.arange(NUM_EXPERTS) * num_ranks // NUM_EXPERTS
    if not is_grouped:
        order = torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
        rank_of_expert = rank_of_expert[order]
    nodes = Nodes(of_rank=tuple(rank // RANKS_PER_NODE for rank in range(num_ranks)))
    pairs = ranks_needed = remote = 0
    by_nodes = torch.zeros(num_nodes + 1)
    for rank, ids in enumerate(experts.split(-(-NUM_TOKENS // num_ranks))):
        traffic = NodeTraffic(nodes, rank=rank, device=torch.device("cpu"))
        ranks = rank_of_expert[ids]
        traffic.choose(ranks)
        of_rank = traffic.spread()
        remote += of_rank.remote_nodes
        by_nodes += torch.tensor(of_rank.rows_by_nodes)
        is_remote = ranks // RANKS_PER_NODE != rank // RANKS_PER_NODE
        pairs += int(is_remote.sum())
        ranks_needed += sum(
            len(set(row[here].tolist())) for row, here in zip(ranks, is_remote, strict=True)
        )
    print(
        f"{num_nodes} nodes, {'whole groups' if is_grouped else 'experts anywhere'}: two hops "
        f"{remote / NUM_TOKENS:.2f}, one hop per rank {ranks_needed / NUM_TOKENS:.2f}, per choice "
        f"{pairs / NUM_TOKENS:.2f}"
    )
    assert by_nodes.sum() == NUM_TOKENS
    assert remote / NUM_TOKENS == pytest.approx(two_hops, abs=0.03)
    assert pairs / NUM_TOKENS == pytest.approx(one_hop, abs=0.03)
    assert by_nodes.nonzero().max() == most_nodes
