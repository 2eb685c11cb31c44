"""When a rank wants two hops, and when the ranks take them."""

import pytest

from equipoise.planning.node_traffic import NodeCounts
from equipoise.rank.header import balances_replicas, takes_two_hops
from equipoise.settings.errors import InvalidSettingsError
from equipoise.worker.hops import WINDOW_ROWS, HopChoice, Hops
from equipoise.worker.settings import WorkerSettings
from tests.worker.test_header import header


def counts(rows, *, by_two, by_one, outputs=0):
    return NodeCounts(
        rows_by_nodes=(0, rows),
        remote_nodes=by_two,
        direct_rows=by_one,
        sent_rows=0,
        sent_outputs=outputs,
    )


def test_what_is_set_is_wanted_whatever_was_counted():
    many = counts(10 * WINDOW_ROWS, by_two=1, by_one=9)
    assert HopChoice(Hops.TWO).wants_two(many)
    assert not HopChoice(Hops.ONE).wants_two(many)


@pytest.mark.parametrize("hops", list(Hops))
def test_a_single_node_has_one_hop(hops):
    assert not HopChoice(hops).wants_two(None)


def test_auto_wants_two_hops_if_they_send_less_than_two_thirds_between_nodes():
    choice = HopChoice(Hops.AUTO, sums_on_nodes=True)
    assert not choice.wants_two(counts(WINDOW_ROWS - 1, by_two=1, by_one=9))
    assert choice.wants_two(counts(WINDOW_ROWS, by_two=234, by_one=600, outputs=234))


def test_outputs_that_return_one_by_one_cross_as_often_by_two_hops():
    choice = HopChoice(Hops.AUTO)
    assert not choice.wants_two(counts(WINDOW_ROWS, by_two=234, by_one=600, outputs=600))
    # All experts of most rows are on the node that they come from, or on one other.
    assert choice.wants_two(counts(2 * WINDOW_ROWS, by_two=334, by_one=1400, outputs=1400))


def test_auto_follows_the_latest_window_not_all_that_was_counted():
    choice = HopChoice(Hops.AUTO, sums_on_nodes=True)
    assert choice.wants_two(counts(WINDOW_ROWS, by_two=2000, by_one=6000))
    assert choice.wants_two(counts(2 * WINDOW_ROWS - 1, by_two=8000, by_one=12_000))
    assert not choice.wants_two(counts(2 * WINDOW_ROWS, by_two=6000, by_one=12_000))
    assert choice.wants_two(counts(3 * WINDOW_ROWS, by_two=9900, by_one=18_000))


def test_rows_travel_as_most_ranks_want():
    one, two = header(), header(wants_two_hops=1)
    assert not takes_two_hops((one, one, two))
    assert not takes_two_hops((one, two))
    assert takes_two_hops((one, two, two))


def test_replicas_are_balanced_if_most_ranks_want_it():
    hashed, balanced = header(), header(wants_balance=1)
    assert not balances_replicas((hashed, balanced))
    assert balances_replicas((hashed, balanced, balanced))


def test_sums_on_nodes_are_rejected_where_results_must_not_depend_on_the_layout():
    with pytest.raises(InvalidSettingsError, match="sums_on_nodes needs no_batch_invariant"):
        WorkerSettings(sums_on_nodes=True)
    assert WorkerSettings(sums_on_nodes=True, batch_invariant=False).sums_on_nodes
