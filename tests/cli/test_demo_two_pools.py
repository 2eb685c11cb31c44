"""The figures of a demo of two pools, and its requests."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.two_pools import BLOCK_TOKENS, DECODE, PREFILL, prompts_by_phase
from equipoise.cli.demo.two_pools_result import PoolRecord, TwoPoolsResult, figures_of, summary
from equipoise.planning.layout import Layout
from equipoise_model import latent_cache

READ = np.array([[6.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
WRITTEN = np.array([[1.0, 3.0, 6.0], [2.0, 2.0, 2.0]])


def layout(first_layer):
    """Two ranks with two slots each, of three experts in two layers."""
    table = np.array([first_layer, [0, 1, 0, 2]], dtype=np.int32)
    return Layout(generation=3, num_experts=3, num_ranks=2, expert_of_slot=table)


PREFILL_RECORD = PoolRecord(
    pool=PREFILL, phase="prefill", rollouts=2, load=READ, layout=layout([0, 1, 0, 2])
)
DECODE_RECORD = PoolRecord(
    pool=DECODE, phase="decode", rollouts=1, load=WRITTEN, layout=layout([2, 0, 2, 1])
)


@pytest.fixture
def result():
    return TwoPoolsResult(
        pools=(
            figures_of(PREFILL_RECORD, DECODE_RECORD),
            figures_of(DECODE_RECORD, PREFILL_RECORD),
        ),
        requests=90,
        failures=(),
        tokens_compared=500,
        tokens_identical=500,
        handovers=80,
        peak_memory_bytes=2**30,
        wall_s=100.0,
    )


def test_a_pool_is_compared_with_the_other_layout_on_its_own_load():
    found = figures_of(PREFILL_RECORD, DECODE_RECORD)
    # Both experts 0: 5 and 5. Its only copy with half of expert 2: 7 and 3. In both, layer 1 has
    # 3 and 3.
    assert found.balancedness == pytest.approx(1.0)
    assert found.balancedness_of_other == pytest.approx((5 / 7 + 1) / 2)
    busiest = found.busiest[0]
    assert (busiest.expert, busiest.share, busiest.other_share) == (0, 0.6, 0.1)
    assert (busiest.ranks, busiest.other_ranks) == ((0, 1), (0,))


def test_a_good_run_has_no_fault_and_is_plain_json(result):
    assert result.faults == ()
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [one["pool"] for one in document["pools"]] == [PREFILL, DECODE]
    assert document["faults"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": ("status 503: no rank",)}, "1 requests failed; the first: status 503"),
        ({"tokens_identical": 499}, "1 of 500 tokens differ"),
        ({"tokens_identical": 0, "tokens_compared": 0}, "no token was compared"),
        ({"handovers": 0}, "no request was handed over"),
    ],
)
def test_what_went_wrong_is_a_fault(result, changes, words):
    (fault,) = replace(result, **changes).faults
    assert words in fault


def test_a_pool_without_a_layout_of_its_own_is_a_fault(result):
    prefill, decode = result.pools
    (fault,) = replace(result, pools=(prefill, replace(decode, rollouts=0))).faults
    assert "pool decode rolled out no layout of its own" in fault
    alike = replace(decode, balancedness=0.8, balancedness_of_other=0.8)
    (fault,) = replace(result, pools=(prefill, alike)).faults
    assert "pool decode would be balanced as well by the other pool's layout" in fault


def test_the_tables_show_both_layouts_and_why_they_differ(result):
    console = Console(width=120, file=io.StringIO())
    console.print(summary(result))
    lines = console.file.getvalue().splitlines()
    assert any(line.split() == ["prefill", "prefill", "3", "1.00", "0.86"] for line in lines)
    assert any("expert 0" in line and "60% on ranks 0, 1" in line for line in lines)
    assert any("expert 0" in line and "10% on rank 0" in line for line in lines)
    assert "80 of 90 requests handed over, 0 failed; 500 of 500 tokens" in lines[-1]


def test_prompts_are_whole_blocks_of_different_kinds():
    prompts = prompts_by_phase(DemoSettings(disaggregated=True, prompts_per_domain=4))
    assert BLOCK_TOKENS == latent_cache.BLOCK_TOKENS
    for one in prompts[PREFILL]:
        assert (one.domain, one.max_tokens, len(one.tokens) % BLOCK_TOKENS) == ("code", 2, 0)
        assert len(one.tokens) > BLOCK_TOKENS
    for one in prompts[DECODE]:
        assert (one.domain, len(one.tokens)) == ("english", BLOCK_TOKENS)
        assert one.max_tokens >= 48
