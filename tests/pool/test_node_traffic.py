"""A pool shows how many rows travel between its nodes."""

import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.cli.live.balance import node_traffic_text
from tests.balancer.test_metrics import families_of
from tests.support.scrapes import value_of
from tests.support.scripted_worker import rows_of_a_step


@pytest.mark.parametrize("is_two_hop", [False, True])
def test_status_and_metrics_tell_the_rows_between_nodes_of_the_latest_window(
    serving_harness, skewed, is_two_hop
):
    harness, name = serving_harness, "equipoise_rows_between_nodes"
    for worker in harness.ranks:
        worker.nodes_a_step = rows_of_a_step(is_two_hop=is_two_hop)
    harness.run_traffic(skewed(1), seconds=20)
    shown = pool_status(harness.pool, now=harness.now).node_traffic
    # 4 ranks make 10 steps a second, and a window lasts 10 s.
    assert list(shown.rows_by_nodes) == [0, 0, 0, 400, 400]
    assert (shown.nodes, shown.most_nodes, shown.is_two_hop) == (3.5, 4, is_two_hop)
    assert node_traffic_text(shown) == (
        "between nodes, per token and layer: 2.50 rows by two hops (one hop: 6.00), 6.00 outputs; "
        "a token reaches 3.50 nodes, at most 4"
        if is_two_hop
        else "between nodes, per token and layer: 6.00 rows by one hop (two hops: 2.50), 6.00 "
        "outputs; a token reaches 3.50 nodes, at most 4"
    )
    families = families_of(harness.pool, now=harness.now)
    kinds = {
        kind: value_of(families, name, pool="tiny", kind=kind)
        for kind in ("rows", "outputs", "one_hop", "two_hops")
    }
    sent = 2.5 if is_two_hop else 6.0
    assert kinds == {"rows": sent, "outputs": 6.0, "one_hop": 6.0, "two_hops": 2.5}
    assert value_of(families, "equipoise_token_nodes", pool="tiny") == 3.5
    assert value_of(families, "equipoise_token_nodes_max", pool="tiny") == 4


def test_a_pool_on_one_node_shows_no_traffic_between_nodes(serving_harness, skewed):
    serving_harness.run_traffic(skewed(1), seconds=10)
    status = pool_status(serving_harness.pool, now=serving_harness.now)
    assert not status.HasField("node_traffic")
    families = families_of(serving_harness.pool, now=serving_harness.now)
    assert not families["equipoise_rows_between_nodes"].samples
