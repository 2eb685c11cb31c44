"""What two hops and two micro-batches save where links between nodes take time for each row.

Sixteen ranks in processes run the model's real exchanges; computation and links have set times, on
a virtual clock, and on a real one.
"""

from pathlib import Path

import pytest
import torch

from tests.model.paced_link_rank import CONFIG, CUTS, NUM_RANKS, NUM_ROWS, SENDS
from tests.support.rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("paced_link_rank.py")


CASES = [
    ("virtual", 1.0),
    pytest.param(("virtual", 0.5, 1.0, 2.0), marks=pytest.mark.benchmark),
    pytest.param(("real", 1.0), marks=pytest.mark.benchmark),
]
"""A clock, and times of links."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(map(str, case)))
def runs(request, tmp_path_factory):
    """What every rank saw: seconds, what it sent to other nodes, its counters, and logits."""
    folder = tmp_path_factory.mktemp("links")
    run_ranks(
        PROGRAM,
        [(rank, folder / "meet", folder / str(rank), *request.param) for rank in range(NUM_RANKS)],
        timeout_s=500,
    )
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(NUM_RANKS)]


def sent(runs, key, kind):
    """What a row sent to other nodes in a layer, on average."""
    return sum(rank[key][1][kind] for rank in runs) / (NUM_RANKS * NUM_ROWS * CONFIG.num_moe_layers)


def step_s(runs, link, send, cut):
    return runs[0][link, send, cut][0]


def test_what_crosses_links_is_what_ranks_count(runs):
    for rank in runs:
        for key, (_, crossed, spread, _) in rank.items():
            assert crossed["rows"] == spread.sent_rows, key
            assert crossed["outputs"] == spread.sent_outputs, key
            assert spread.sent_rows == (
                spread.direct_rows if key[1] == "one hop" else spread.remote_nodes
            )


def test_tokens_do_not_depend_on_the_way_unless_outputs_are_summed_on_nodes(runs):
    for rank in runs:
        expected = rank[0.0, "one hop", "whole"][3]
        for (_, send, _), (_, _, _, logits) in rank.items():
            if send == "sums":
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            else:
                torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


def test_two_micro_batches_hide_links_and_two_hops_pay_if_outputs_are_summed_on_nodes(
    runs, request
):
    links = sorted({link for link, _, _ in runs[0]})
    for send in SENDS:
        rows, outputs = (sent(runs, (0.0, send, "whole"), kind) for kind in ("rows", "outputs"))
        print(f"{send}: {rows:.2f} rows and {outputs:.2f} outputs between nodes")
        for link in links:
            times = [1e3 * step_s(runs, link, send, cut) for cut in CUTS]
            print(f"  link {link}: whole {times[0]:.0f} ms, cut {times[1]:.0f} ms")
    for link in links[1:]:
        direct = step_s(runs, link, "one hop", "whole")
        assert direct / step_s(runs, link, "one hop", "cut") >= 1.4
        if "real" not in request.node.callspec.id:
            # Sixteen ranks on few cores compute longer than they pretend to.
            assert direct / step_s(runs, link, "sums", "whole") >= 1.08
            # Outputs cross as often as by one hop, and the hops within nodes cost more than that
            # saves.
            assert step_s(runs, link, "two hops", "whole") > direct
