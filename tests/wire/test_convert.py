"""Messages survive a round trip through protobuf."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.shares import whole_shares
from equipoise.planning.topology import ModelShape
from equipoise.wire.checks import MAX_COUNT
from equipoise.wire.convert import from_worker, to_balancer, to_worker


def test_a_workers_message_survives_a_round_trip(good, said_by_worker):
    assert_same(good.received_by_balancer(to_balancer(said_by_worker)), said_by_worker)


def test_a_balancers_message_survives_a_round_trip(good, said_by_balancer):
    assert_same(good.received_by_worker(to_worker(said_by_balancer)), said_by_balancer)


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 5),
    num_experts=st.integers(1, 12),
    num_ranks=st.integers(1, 4),
    extra=st.integers(0, 3),
    generation=st.integers(1, MAX_COUNT),
    data=st.data(),
)
def test_any_layout_and_any_counters_survive_a_round_trip(
    good, num_layers, num_experts, num_ranks, extra, generation, data
):
    slots_per_rank = -(-num_experts // num_ranks) + extra
    layout = contiguous_layout(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        generation=generation,
    )
    relabel = np.array(data.draw(st.permutations(range(num_experts))), dtype=np.int32)
    layout = layout.with_placement(relabel[layout.expert_of_slot], generation=generation)
    if data.draw(st.booleans()):
        parts = np.random.default_rng(generation).random(layout.expert_of_slot.shape)
        for layer, experts in enumerate(layout.expert_of_slot):
            parts[layer] /= np.bincount(experts, weights=parts[layer])[experts]
        shares = whole_shares(parts, layout.expert_of_slot, num_experts=num_experts)
        layout = replace(layout, share_of_slot=shares)
    model = ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)
    hello = replace(good.hello, model=model, slots_per_rank=slots_per_rank, num_ranks=num_ranks)
    checksums = np.zeros((num_layers, slots_per_rank, 16), dtype=np.uint8)
    workers = (hello.worker, *(f"worker-{rank}-of-many" for rank in range(1, layout.num_ranks)))
    running = replace(good.running, rank=0, staged_generation=0, layout=layout, checksums=checksums)
    running = replace(running, workers=workers)
    hello = replace(hello, running=running)
    assert_same(good.received_by_balancer(to_balancer(hello)), hello)

    cells = num_layers * slots_per_rank
    counters = data.draw(st.lists(st.integers(0, MAX_COUNT), min_size=cells, max_size=cells))
    assignments = np.array(counters, dtype=np.uint64).reshape(num_layers, slots_per_rank)
    report = replace(good.report, load=replace(good.report.load, rank=0, assignments=assignments))
    assert_same(from_worker(to_balancer(report), hello=hello), report)


def test_received_arrays_are_read_only(good):
    serving = good.received_by_balancer(to_balancer(good.serving))
    report = good.received_by_balancer(to_balancer(good.report))
    assert not serving.checksums.flags.writeable
    assert not report.load.assignments.flags.writeable


def test_an_invalid_traceparent_is_dropped_and_the_stage_is_valid(good):
    for text in ("", "nonsense", "00-" + "f" * 5000, f"00-{1:032X}-{2:016x}-01\n"):
        stage = replace(good.stage, traceparent=text)
        assert good.received_by_worker(to_worker(stage)).traceparent == ""


def test_an_epoch_of_a_balancer_that_sets_no_join_timeout_is_bounded_too(good):
    message = to_worker(good.join_epoch)
    message.join_epoch.ClearField("join_timeout_s")
    assert good.received_by_worker(message).join_timeout_s == 600.0


def assert_same(a, b):
    """Equality of values that hold arrays and layouts."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif is_dataclass(a):
        for field in (field for field in fields(a) if field.compare):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b
