"""Rows that travel between nodes once, against rows that travel directly: ranks in processes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise_kernels.nodes import Nodes
from tests.model.two_hop_rank import NODES, ROW_BLOCKS
from tests.support.rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("two_hop_rank.py")
STEPS = ("even", "idle", "all idle", "switched and skewed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every rank saw: by number of ranks, a list by rank."""
    folder = tmp_path_factory.mktemp("nodes")
    sizes = sorted({len(of_rank) for of_rank in NODES.values()})
    run_ranks(
        PROGRAM,
        [
            (rank, size, folder / f"meet-{size}", folder / f"{size}-{rank}")
            for size in sizes
            for rank in range(size)
        ],
        timeout_s=250,
    )
    return {
        size: [torch.load(folder / f"{size}-{rank}", weights_only=False) for rank in range(size)]
        for size in sizes
    }


def of_ranks(runs, nodes, mode, send):
    return [rank[nodes, mode, send] for rank in runs[len(NODES[nodes])]]


@pytest.mark.parametrize("mode", ROW_BLOCKS)
@pytest.mark.parametrize("nodes", NODES)
def test_two_hops_change_no_bit_and_no_load(runs, nodes, mode):
    direct, relayed = (of_ranks(runs, nodes, mode, send) for send in ("one hop", "two hops"))
    for one, two in zip(direct, relayed, strict=True):
        for step in STEPS:
            assert torch.equal(two[step], one[step])
        for (generation, load), (other, other_load) in zip(one["loads"], two["loads"], strict=True):
            assert generation == other
            assert np.array_equal(load, other_load)
        # In which slots' experts ran which rows, in which order.
        assert two["traffic"]["runs"] == one["traffic"]["runs"] != []


@pytest.mark.parametrize("send", ["one hop", "two hops"])
@pytest.mark.parametrize("nodes", NODES)
def test_balanced_replicas_change_the_loads_and_no_bit(runs, nodes, send):
    hashed, balanced = (of_ranks(runs, nodes, mode, send) for mode in ("row blocks", "balanced"))
    for one, other in zip(hashed, balanced, strict=True):
        for step in STEPS:
            assert torch.equal(other[step], one[step])
    # Generation 2, with shares, in which all rows choose the same experts; then generation 1.
    for number in range(2):
        hashed_RL, balanced_RL = (
            np.array([rank["loads"][number][1].sum(1) for rank in ranks])
            for ranks in (hashed, balanced)
        )
        assert (balanced_RL.sum(0) == hashed_RL.sum(0)).all()
        assert (balanced_RL.max(0) <= hashed_RL.max(0)).all()
    # In a layer, one expert without another replica may be what the busiest rank has.
    assert (balanced_RL.max(0) < hashed_RL.max(0)).any()


@pytest.mark.parametrize("nodes", NODES)
def test_balanced_replicas_are_the_same_however_rows_travel(runs, nodes):
    one_hop, two_hops = (
        of_ranks(runs, nodes, "balanced", send) for send in ("one hop", "two hops")
    )
    for one, two in zip(one_hop, two_hops, strict=True):
        assert one["traffic"]["runs"] == two["traffic"]["runs"] != []


@pytest.mark.parametrize("nodes", NODES)
def test_sums_on_nodes_are_close_and_count_the_same_loads(runs, nodes):
    direct, summed = (of_ranks(runs, nodes, "fast", send) for send in ("one hop", "sums"))
    for one, two in zip(direct, summed, strict=True):
        for step in STEPS:
            torch.testing.assert_close(two[step], one[step], atol=1e-5, rtol=1e-5)
        assert np.array_equal(one["loads"][0][1], two["loads"][0][1])


def nodes_of_rows(rank, nodes):
    """The distinct nodes of the slots that each of a rank's rows chose, in all layers and steps."""
    of_rank = np.array(NODES[nodes])
    return [
        set(of_rank[row].tolist()) for ranks in rank["traffic"]["ranks"] for row in ranks.tolist()
    ]


@pytest.mark.parametrize("send", ["one hop", "two hops", "sums"])
@pytest.mark.parametrize("nodes", NODES)
def test_rows_between_nodes_are_those_of_distinct_nodes_by_two_hops(runs, nodes, send):
    of_rank = NODES[nodes]
    for rank, seen in enumerate(of_ranks(runs, nodes, "fast", send)):
        distinct = nodes_of_rows(seen, nodes)
        remote = sum(len(of_row - {of_rank[rank]}) for of_row in distinct)
        spread, counted = seen["spread"], seen["traffic"]
        assert spread.remote_nodes == remote
        assert np.array_equal(
            spread.rows_by_nodes,
            np.bincount([len(of_row) for of_row in distinct], minlength=max(of_rank) + 2),
        )
        assert spread.sent_rows == counted["rows"]
        # Of two hops, those within a node carry outputs too.
        assert spread.sent_outputs == counted["outputs"]
        assert spread.sent_rows == (spread.direct_rows if send == "one hop" else remote)


@pytest.mark.parametrize("nodes", NODES)
def test_what_one_hop_would_send_is_known_without_sending_it(runs, nodes):
    direct, relayed = (of_ranks(runs, nodes, "fast", send) for send in ("one hop", "two hops"))
    for one, two in zip(direct, relayed, strict=True):
        assert one["spread"].direct_rows == two["spread"].direct_rows
        assert one["spread"].remote_nodes == two["spread"].remote_nodes <= one["spread"].direct_rows


def test_between_nodes_of_one_rank_one_hop_sends_no_row_twice(runs):
    for send in ("one hop", "two hops"):
        for rank in of_ranks(runs, "8x1", "fast", send):
            spread = rank["spread"]
            assert spread.sent_rows == spread.direct_rows == spread.remote_nodes > 0


@pytest.mark.parametrize("nodes", NODES)
def test_sums_on_nodes_return_as_many_outputs_as_rows_came(runs, nodes):
    totals = {
        send: [
            (rank["spread"].sent_rows, rank["spread"].sent_outputs)
            for rank in of_ranks(runs, nodes, "fast", send)
        ]
        for send in ("two hops", "sums")
    }
    rows, outputs = np.sum(totals["sums"], axis=0)
    assert rows == outputs
    rows, outputs = np.sum(totals["two hops"], axis=0)
    assert rows < outputs


@pytest.mark.parametrize("nodes", NODES)
def test_gradients_cross_two_hops(runs, nodes):
    for rank in runs[len(NODES[nodes])]:
        one, two = (rank[nodes, "gradients", send] for send in ("one hop", "two hops"))
        torch.testing.assert_close(two[0], one[0], atol=1e-2, rtol=1e-3)
        for ours, theirs in zip(two[1], one[1], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)


def test_a_rank_that_leaves_is_named_however_rows_travel(runs):
    for size, ranks in runs.items():
        *others, last = [rank["last words"] for rank in ranks]
        assert last == "left"
        for words in others:
            assert "could not exchange rows" in words
            assert f"the connection to rank {size - 1} is broken" in words


def test_relays_have_the_same_index_in_their_node():
    nodes = Nodes.named(["a", "a", "b", "b", "b", "c"])
    assert nodes.of_rank == (0, 0, 1, 1, 1, 2)
    assert [nodes.relays(rank) for rank in range(6)] == [
        (0, 2, 5), (1, 3, 5), (0, 2, 5), (1, 3, 5), (0, 4, 5), (0, 2, 5),
    ]  # fmt: skip
    assert [nodes.origins(rank) for rank in range(6)] == [
        (0, 2, 4, 5), (1, 3), (0, 2, 5), (1, 3), (4,), (0, 1, 2, 3, 4, 5),
    ]  # fmt: skip
    for rank in range(6):
        assert sum(rank in nodes.origins(relay) for relay in range(6)) == nodes.count
