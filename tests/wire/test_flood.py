"""Many corrupt messages: each is rejected or valid, and none raises another exception."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.counters import LoadReport
from equipoise.planning.layout import Layout
from equipoise.wire.convert import to_balancer, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Hello
from equipoise_api.v1 import worker_link_pb2 as pb


def broken(random, original):
    """The bytes of a message with a few bytes changed, cut out, doubled or put in."""
    data = bytearray(original)
    for _ in range(random.integers(1, 5)):
        at = int(random.integers(0, len(data) + 1))
        match random.integers(0, 5):
            case 0:
                data[at : at + 1] = bytes([random.integers(0, 256)])
            case 1:
                if at < len(data):
                    data[at] ^= 1 << int(random.integers(0, 8))
            case 2:
                del data[at : at + int(random.integers(1, 9))]
            case 3:
                data[at:at] = random.bytes(int(random.integers(1, 12)))
            case 4:
                start = int(random.integers(0, len(data) + 1))
                data[at:at] = data[start : start + int(random.integers(1, 40))]
    return bytes(data)


def assert_sensible(value):
    """What the types promise, looked at by other means than the checks."""
    for field in fields(value):
        part = getattr(value, field.name)
        if field.name != "traceparent" or part:  # A rollout need not be traced.
            assert_sensible_part(part)
    if isinstance(value, Layout):
        assert set(range(value.num_experts)) == set(value.expert_of_slot[0].tolist())
        assert value.expert_of_slot.shape == (3, 5 * value.num_ranks)
        assert value.num_ranks <= 2
    if isinstance(value, LoadReport):
        assert value.assignments.shape == (3, 5)
        assert int(value.assignments.max()) <= 2**53
        assert value.epoch >= 1
        assert value.generation >= 1
    if "checksums" in {field.name for field in fields(value)}:
        assert value.checksums.shape == (3, 5, 16)


def assert_sensible_part(part):
    if isinstance(part, tuple):
        for one in part:
            assert_sensible_part(one)
    elif is_dataclass(part):
        assert_sensible(part)
    elif isinstance(part, float):
        assert 0 < part <= 3600
    elif isinstance(part, int):
        assert 0 <= part <= 2**53
    elif isinstance(part, str):
        assert part
        assert part.isprintable()
        assert len(part) <= 1000


@pytest.mark.parametrize("seed", range(10))
def test_a_corrupt_message_is_rejected_or_valid(good, seed):
    random = np.random.default_rng(seed)
    sent = [(to_balancer(value), good.received_by_balancer) for value in good.from_workers]
    sent += [(to_worker(value), good.received_by_worker) for value in good.from_balancer]
    outcomes = {"unreadable": 0, "rejected": 0, "accepted": 0}
    for number in range(2_000):
        message, receive = sent[number % len(sent)]
        try:
            damaged = type(message).FromString(broken(random, message.SerializeToString()))
        except Exception:  # noqa: BLE001 - protobuf's own, which gRPC turns into a status
            outcomes["unreadable"] += 1
            continue
        try:
            value = receive(damaged)
        except InvalidMessageError as error:
            rejection = error
        else:
            rejection = None
        if rejection is not None:
            assert rejection.kind.replace("_", "").isalpha()
            assert len(str(rejection)) < 1000
            outcomes["rejected"] += 1
            continue
        outcomes["accepted"] += 1
        if isinstance(value, Hello):
            # It may be for another pool, but its tables must fit into memory.
            num_slots = value.num_ranks * value.slots_per_rank
            assert value.model.num_experts <= num_slots <= 2**20 // value.model.num_layers
        else:
            assert_sensible(value)
    assert all(count > 50 for count in outcomes.values()), outcomes


NUMBERS = st.one_of(st.integers(0, 12), st.sampled_from([2**31 - 1, 2**32 - 1]))
WIDE = st.one_of(NUMBERS, st.sampled_from([2**53, 2**53 + 1, 2**63, 2**64 - 1]))


@settings(max_examples=300, deadline=None)
@given(
    layout=st.builds(
        pb.Layout,
        generation=WIDE,
        num_layers=NUMBERS,
        num_slots=NUMBERS,
        num_experts=NUMBERS,
        num_ranks=NUMBERS,
        expert_of_slot=st.binary(max_size=160),
        share_of_slot=st.one_of(st.none(), st.binary(max_size=80)),
    ),
    epoch=WIDE,
    base_generation=WIDE,
    timeout_s=st.floats(),
)
def test_generated_layouts_are_rejected_or_valid(good, layout, epoch, base_generation, timeout_s):
    stage = pb.Stage(
        epoch=epoch, layout=layout, base_generation=base_generation, timeout_s=timeout_s
    )
    try:
        value = good.received_by_worker(pb.ConnectResponse(stage=stage))
    except InvalidMessageError:
        return
    assert_sensible(value)
