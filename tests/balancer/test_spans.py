"""Traces of a pool's rollouts, however they end."""

from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from equipoise.balancer.spans import PoolSpans
from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Persisted, RankLost, RankStaged, RankSwitched
from equipoise.planning.topology import Topology
from equipoise.policy.book import PolicyBook
from equipoise.pool.counters import Counters
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.records import PoolMemory
from equipoise.pool.rollouts import Rollouts
from tests.support.store_records import A_DECISION

BASE = Layout(
    generation=7,
    num_experts=2,
    num_ranks=2,
    expert_of_slot=np.array([[0, 1]], dtype=np.int32),
)
SWAPPED = BASE.with_placement(np.array([[1, 0]], dtype=np.int32), generation=8)
WAVES = (
    LayoutChange.between(BASE, SWAPPED),
    LayoutChange.between(SWAPPED, BASE.with_placement(BASE.expert_of_slot, generation=9)),
)


class Harness:
    """Rollouts that are followed after every event."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = PoolSpans("blue", tracer=provider.get_tracer("test"))
        layouts = PoolLayouts(PoolMemory(committed=BASE))
        topology = Topology(node_of_rank=("node", "node"), slots_per_rank=1)
        policies = PolicyBook(Policy())
        self.rollouts = Rollouts(
            PoolPolicy("blue", policies, recorded=""),
            roster=SimpleNamespace(epoch=1, seated=tuple, topology=lambda: topology),
            layouts=layouts,
            verification=SimpleNamespace(table=np.zeros((1, 2, CHECKSUM_BYTES), dtype=np.uint8)),
            counters=Counters(Policy()),
        )

    def start(self, waves=WAVES):
        self.rollouts.start(waves, base=BASE, decision=A_DECISION, now=0.0)
        self.spans.follow(self.rollouts)

    def handle(self, *events):
        for event in events:
            self.rollouts.handle(event, now=1.0)
            self.spans.follow(self.rollouts)

    def switch(self, generation):
        ranks = (0, 1)
        self.handle(
            Persisted(generation=generation),
            *(RankStaged(rank=rank, generation=generation) for rank in ranks),
            *(RankSwitched(rank=rank, generation=generation, step=5, stall_us=9) for rank in ranks),
            Persisted(generation=generation),
        )

    @property
    def finished(self):
        """Ended spans as (name of the parent, own name), in the order in which they began."""
        ended = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)
        names = {span.context.span_id: span.name for span in ended}
        return [(names.get(span.parent and span.parent.span_id), span.name) for span in ended]

    @property
    def traces(self):
        return {span.context.trace_id for span in self._exporter.get_finished_spans()}

    @property
    def faults(self):
        ended = self._exporter.get_finished_spans()
        return {span.name: span.status.description for span in ended if not span.status.is_ok}


@pytest.fixture
def harness():
    return Harness()


def proposal(*, accepted):
    return SimpleNamespace(
        plan=SimpleNamespace(algorithm=SimpleNamespace(value="incremental")),
        verdict=SimpleNamespace(accepted=accepted, reason="it gains 0.1", moves=2, bytes=64),
    )


WAVE = [("rebalance", "wave"), ("wave", "stage"), ("wave", "switch"), ("wave", "commit")]


def test_a_plan_and_all_its_waves_are_one_trace(harness):
    planning = harness.spans.planning()
    planning.made(proposal(accepted=True))
    harness.spans.decided(planning, adopted=True)
    harness.start()
    harness.switch(8)
    assert ("rebalance", "rebalance") not in harness.finished
    harness.switch(9)
    assert harness.finished == [(None, "rebalance"), ("rebalance", "plan"), *WAVE, *WAVE]
    assert len(harness.traces) == 1
    assert harness.faults == {}


def test_a_plan_that_is_not_adopted_is_a_trace_by_itself(harness):
    harness.start()
    planning = harness.spans.planning()
    planning.made(proposal(accepted=False))
    harness.spans.decided(planning, adopted=False)
    assert harness.finished == [(None, "rebalance"), ("rebalance", "plan")]
    harness.spans.planning().abandoned("it took too long")
    assert harness.faults == {"plan": "it took too long"}


def test_an_abort_ends_the_trace_with_its_reason(harness):
    harness.start()
    harness.handle(Persisted(generation=8), RankLost(rank=1, reason="it died"))
    assert harness.finished == [(None, "rebalance"), *WAVE[:2]]
    assert harness.faults == dict.fromkeys(
        ("stage", "wave", "rebalance"), "rank 1 was lost: it died"
    )


def test_a_pool_that_re_forms_leaves_no_span_open(harness):
    harness.start()
    harness.handle(Persisted(generation=8))
    harness.rollouts.begin_epoch()
    harness.spans.follow(harness.rollouts)
    assert harness.finished == [(None, "rebalance"), *WAVE[:2]]
    assert set(harness.faults) == {"wave", "rebalance"}


def test_ranks_receive_only_the_wave_that_they_stage(harness):
    harness.start()
    harness.handle(Persisted(generation=8))
    parent = harness.spans.parent_for_ranks(8)
    assert parent.startswith("00-")
    assert harness.spans.parent_for_ranks(9) == ""
    harness.switch(8)
    harness.handle(Persisted(generation=9))
    assert harness.spans.parent_for_ranks(9) not in {"", parent}
