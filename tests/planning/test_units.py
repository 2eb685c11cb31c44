"""The published deployment units are consistent, and fit GPUs of 80 GB."""

import pytest

from equipoise.planning.policy import Algorithm
from equipoise.planning.units import NUM_EXPERTS, NUM_GROUPS, UNITS, Unit, UnitName
from equipoise_model.latent_cache import blocks_for
from equipoise_model.memory import RankSizes, plan_memory
from equipoise_model.presets import DEEPSEEK_V3

H100_BYTES = 78 * 2**30


def test_the_units_are_those_that_deepseek_published():
    assert {
        str(name): (unit.num_ranks, unit.num_nodes, unit.num_slots, unit.num_redundant)
        for name, unit in UNITS.items()
    } == {
        "prefill-ep32": (32, 4, 288, 32),
        "decode-ep144": (144, 18, 288, 32),
        # 64 ranks beyond the 256 routed experts hold the shared expert and redundant ones.
        "decode-ep320": (320, 40, 320, 63),
    }
    assert (DEEPSEEK_V3.n_routed_experts, DEEPSEEK_V3.n_group) == (NUM_EXPERTS, NUM_GROUPS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 36}, "do not fill machines"),
        ({"slots_per_rank": 7}, "224 slots cannot hold 256 experts"),
        ({"routes_shared_expert": True, "slots_per_rank": 8}, "256 slots cannot hold 257"),
        ({"num_ranks": 144}, "8 groups do not divide over 18 machines"),
    ],
)
def test_a_unit_that_cannot_be_is_refused(changes, words):
    fields = {
        "num_ranks": 32,
        "slots_per_rank": 9,
        "algorithm": Algorithm.HIERARCHICAL,
        "interval_s": 600.0,
    }
    with pytest.raises(ValueError, match=words):
        Unit(**fields | changes)


@pytest.mark.parametrize(
    ("name", "expert_gb", "cache_tokens", "max_requests", "step_tokens"),
    [
        (UnitName.PREFILL_EP32, 23.0, 196_608, 64, 1024),
        # DeepSeek's decode: 128 requests of 4,989 tokens on average.
        (UnitName.DECODE_EP144, 5.1, 128 * 4_989, 128, 128),
    ],
)
def test_a_rank_of_a_unit_fits_an_h100(name, expert_gb, cache_tokens, max_requests, step_tokens):
    unit = UNITS[name]
    sizes = RankSizes(
        is_fp8=True,
        on_gpu=True,
        num_ranks=unit.num_ranks,
        slots_per_rank=unit.slots_per_rank,
        spare_slots=0,
        num_blocks=1 + blocks_for(cache_tokens),
        block_tokens=16,
        fp8_latents=False,
        context_length=8192,
        max_requests=max_requests,
        max_step_tokens=step_tokens,
        max_graph_rows=max_requests,
        speculate=0,
    )
    plan = plan_memory(DEEPSEEK_V3, sizes)
    bytes_of = {term.name: term.num_bytes for term in plan.terms}
    assert bytes_of["experts"] == 44_050_944 * 58 * unit.slots_per_rank
    assert bytes_of["experts"] / 1e9 == pytest.approx(expert_gb, abs=0.05)
    assert bytes_of["latents"] / 1e9 == pytest.approx(cache_tokens * 70_272 / 1e9, rel=0.001)
    assert plan.obstacle(H100_BYTES) is None
