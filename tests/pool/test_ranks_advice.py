"""A prefill or decode pool advises how many ranks its traffic asks for."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from equipoise.balancer.service.status import pool_status, pool_summary
from equipoise.cli.live.view import pool_view
from equipoise.planning.errors import InvalidReportError
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.wire.messages import GroupLost
from equipoise.wire.plain import as_json
from tests.support.deaths import with_spare_slots

STEP_S = 5


class ReportingPool:
    """Ranks of one phase that report what a test says."""

    def __init__(self, make_harness, phase):
        self.harness = harness = make_harness(policy=Policy(pause=True))
        for worker in harness.workers.values():
            worker.hello = replace(worker.hello, phase=phase)
        harness.serve()
        self.processed = self.cached = 0

    def run(self, *, minutes, tokens_per_s=0, cached_per_s=0, **stats):
        for _ in range(minutes * 60 // STEP_S):
            self.processed += tokens_per_s * STEP_S
            self.cached += cached_per_s * STEP_S
            self.harness.now += STEP_S
            for worker in self.harness.ranks:
                self.harness.say(worker, self.report(worker, **stats))
            self.harness.tick()

    def report(self, worker, **stats):
        report = worker.report()
        usual = {"max_requests": 10, "cache_tokens": 1000, "queued_requests": 0}
        counted = {"tokens_processed": self.processed, "prefix_tokens_found": self.cached}
        return replace(report, stats=replace(report.stats, **usual | counted | stats))

    def status(self):
        return pool_status(self.harness.pool, now=self.harness.now)

    def text(self):
        console = Console(file=io.StringIO(), width=2000)
        console.print(pool_view(self.status(), framed=False))
        return console.file.getvalue()


@pytest.fixture
def decode(make_harness):
    return ReportingPool(make_harness, Phase.DECODE)


@pytest.fixture
def prefill(make_harness):
    return ReportingPool(make_harness, Phase.PREFILL)


def test_a_decode_pool_whose_cache_is_full_asks_for_more_ranks(decode):
    decode.run(minutes=6, active_requests=3, queued_requests=1, cache_tokens_used=960)
    advice = decode.status().advice
    assert (advice.ranks, advice.needed) == (5, pytest.approx(3.84))
    assert advice.reason == (
        "requests use 40% of the slots and 96% of the cache: the load of 3.8 ranks over the "
        "latest 5 minutes, 77% of 5"
    )
    assert f"advice  5 ranks instead of 4: {advice.reason}" in decode.text()
    assert as_json(decode.status())["advice"]["ranks"] == 5
    assert pool_summary(decode.harness.pool).advised_ranks == 5


def test_one_rank_is_advised_in_the_singular(decode):
    decode.run(minutes=6)
    status = decode.status()
    status.advice.ranks = 1
    text = io.StringIO()
    Console(file=text, width=2000).print(pool_view(status, framed=False))
    assert "1 rank instead of 4: " in text.getvalue()


def test_requests_that_wait_count_as_demand(decode):
    decode.run(minutes=6, active_requests=10, queued_requests=5)
    assert decode.status().advice.ranks == 7


def test_a_prefill_pool_asks_for_the_ranks_that_prefill_its_prompts(prefill):
    prefill.run(minutes=1, tokens_per_s=2000, pending_prompt_tokens=20_000)
    prefill.run(minutes=6, tokens_per_s=1900, pending_prompt_tokens=0)
    advice = prefill.status().advice
    assert advice.ranks == 5
    assert "prompts arrive at 7,600 tokens/s, and a busy rank prefills 2,000" in advice.reason


def test_prompts_found_in_the_cache_do_not_show_how_fast_a_rank_prefills(prefill):
    prefill.run(minutes=6, tokens_per_s=2000, cached_per_s=2001, pending_prompt_tokens=20_000)
    advice = prefill.status().advice
    assert not advice.ranks
    assert "no rank has had prompts queued for long enough" in advice.reason


def test_a_pool_that_fits_says_so(decode):
    decode.run(minutes=6, active_requests=8)
    assert "advice  4 ranks, as now: requests use 80% of the slots" in decode.text()


def test_places_limit_how_few_ranks_are_advised(make_harness):
    """Three ranks have slots for the 32 experts of each layer, and places for 90 of the 96."""

    def with_places(**kinds):
        harness = with_spare_slots(make_harness(**kinds))
        for worker in harness.workers.values():
            worker.hello = replace(worker.hello, num_places=30)
        return harness

    pool = ReportingPool(with_places, Phase.DECODE)
    pool.run(minutes=6, active_requests=1)
    assert pool.status().advice.ranks == 4
    assert "fewer than 4 cannot hold all experts" in pool.status().advice.reason


def test_fewer_ranks_only_if_they_hold_all_experts(make_harness):
    roomy = ReportingPool(lambda **kinds: with_spare_slots(make_harness(**kinds)), Phase.DECODE)
    slots = roomy.harness.pool.roster.shape.slots_per_rank
    least = -(-32 // slots)
    assert 1 < least < 4
    roomy.run(minutes=6, active_requests=1)
    assert roomy.status().advice.ranks == least
    assert f"fewer than {least} cannot hold all experts" in roomy.status().advice.reason


def test_no_number_before_five_minutes(decode):
    decode.run(minutes=1, active_requests=10)
    assert decode.status().advice.ranks == 0
    assert "advice  no number of ranks yet: measured for 1 of 5 minutes" in decode.text()


def test_no_advice_to_a_mixed_pool_or_one_that_reports_no_limits(make_harness, decode):
    mixed = ReportingPool(make_harness, Phase.MIXED)
    mixed.run(minutes=6, active_requests=10)
    assert not mixed.status().HasField("advice")
    decode.run(minutes=6, active_requests=10, max_requests=0)
    assert not decode.status().HasField("advice")


def test_another_epoch_measures_again(decode):
    decode.run(minutes=6, active_requests=10)
    assert decode.status().advice.ranks
    harness = decode.harness
    for worker in harness.ranks:
        lost = GroupLost(epoch=worker.epoch, reason="a peer is gone", expert_of_slot=None)
        harness.say(worker, lost)
    assert harness.pool.roster.epoch == 2
    assert not decode.status().HasField("advice")


def test_a_rejected_report_is_not_counted(decode):
    decode.run(minutes=1, active_requests=5)
    before = decode.harness.pool.windows._demand._open
    worker = decode.harness.ranks[0]
    decode.harness.now += 1
    wild = decode.report(worker, active_requests=10)
    wild = replace(wild, load=replace(wild.load, assignments=wild.load.assignments + 2**40))
    with pytest.raises(InvalidReportError):
        decode.harness.say(worker, wild)
    assert decode.harness.pool.windows._demand._open == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens_processed", 2**53),
        ("active_requests", 2**32 - 1),
        ("pending_prompt_tokens", 2**53),
        ("cache_tokens_used", 2**53),
    ],
)
def test_a_number_out_of_proportion_at_most_doubles_the_ranks(prefill, decode, name, value):
    for pool in (prefill, decode):
        worker = pool.harness.ranks[0]
        pool.run(minutes=2, tokens_per_s=2000, pending_prompt_tokens=20_000, active_requests=9)
        for _ in range(8):
            pool.run(minutes=1, tokens_per_s=2000, pending_prompt_tokens=20_000, active_requests=9)
            wild = pool.report(worker, **{name: value})
            pool.harness.say(worker, wild)
        assert 0 < pool.status().advice.ranks <= 8
        assert np.isfinite(pool.status().advice.needed)


def test_handovers_are_summed_over_the_ranks(decode):
    counts = {"handed_over_prompts": 7, "handed_over_tokens": 700, "missing_tokens": 5}
    decode.run(minutes=1, **counts)
    num_ranks = len(decode.harness.ranks)
    for status in (decode.status(), pool_summary(decode.harness.pool)):
        assert as_json(status.handovers) == {
            **{name: num_ranks * count for name, count in counts.items()},
            "held_prompts": 0,
            "held_tokens": 0,
        }
    assert "99.2 % of their latents arrived" in decode.text()


def test_tokens_of_a_report_that_arrives_late_count_once(decode):
    """A stream that was given up may hold reports from before those of the next one."""
    worker = decode.harness.ranks[0]
    for steps, processed in (1, 100), (9, 900), (5, 500), (9, 900):
        decode.harness.now += STEP_S
        decode.harness.say(worker, decode.report(worker, steps=steps, tokens_processed=processed))
    assert decode.harness.pool.windows._demand._open.tokens == 800
