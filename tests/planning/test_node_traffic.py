"""How rows spread over nodes, from ranks' reports to a window."""

import numpy as np
import pytest

from equipoise.planning.node_traffic import NodeCounters, NodeCounts

STEPS = np.array([10, 10])


def counts(*rows_by_nodes, remote=0, direct=None, rows=0, outputs=0):
    return NodeCounts(
        rows_by_nodes=rows_by_nodes,
        remote_nodes=remote,
        direct_rows=remote if direct is None else direct,
        sent_rows=rows,
        sent_outputs=outputs,
    )


def test_a_window_has_the_means_over_the_rows_of_all_ranks():
    counters = NodeCounters(num_ranks=2, is_heard_from_start=True)
    counters.accept(0, counts(0, 10, 20, remote=25, direct=60, rows=25, outputs=70))
    counters.accept(1, counts(0, 5, 0, 5, remote=15, direct=20, rows=15, outputs=10))
    traffic = counters.in_window(STEPS)
    assert traffic.rows_by_nodes == (0, 15, 20, 5)
    assert traffic.nodes == pytest.approx((15 + 40 + 15) / 40)
    assert traffic.most_nodes == 3
    assert traffic.remote_nodes == traffic.sent_rows == pytest.approx(1.0)
    assert traffic.direct_rows == traffic.sent_outputs == pytest.approx(2.0)
    assert traffic.rows_per_step == pytest.approx((3 + 1) / 2)
    assert traffic.is_two_hop


def test_only_what_was_counted_since_the_window_opened_belongs_to_it():
    counters = NodeCounters(num_ranks=1, is_heard_from_start=True)
    counters.accept(0, counts(0, 1, 7, remote=8, direct=16, rows=16))
    counters.open_next()
    assert counters.in_window(STEPS[:1]) is None
    counters.accept(0, counts(0, 11, 7, remote=13, direct=36, rows=36))
    traffic = counters.in_window(STEPS[:1])
    assert traffic.rows_by_nodes == (0, 10, 0)
    assert (traffic.nodes, traffic.most_nodes) == (1.0, 1)
    assert (traffic.remote_nodes, traffic.direct_rows) == (0.5, 2.0)
    assert not traffic.is_two_hop


def test_the_first_report_is_a_baseline_if_earlier_ones_were_not_heard():
    counters = NodeCounters(num_ranks=1, is_heard_from_start=False)
    counters.accept(0, counts(0, 500, remote=400))
    assert counters.in_window(STEPS[:1]) is None
    counters.accept(0, counts(0, 510, remote=401))
    assert counters.in_window(STEPS[:1]).remote_nodes == pytest.approx(0.1)


@pytest.mark.parametrize(
    "second",
    [
        None,
        counts(0, 9, remote=5),
        counts(0, 20, remote=4),
        counts(0, 20, remote=21, direct=30),
        counts(0, 20, remote=15, direct=14),
        counts(0, 20, remote=5, direct=5, rows=-1),
    ],
)
def test_counts_of_a_rank_that_cannot_be_true_leave_the_window_without_traffic(second):
    counters = NodeCounters(num_ranks=2, is_heard_from_start=True)
    for rank in range(2):
        counters.accept(rank, counts(0, 10, remote=5))
    counters.open_next()
    counters.accept(0, counts(0, 20, remote=6))
    counters.accept(1, second)
    assert counters.in_window(STEPS) is None
