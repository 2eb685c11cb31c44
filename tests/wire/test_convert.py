"""Round trips, refusals one by one, and a flood of broken messages."""

# ruff: noqa: C408 - fields of messages read better as keywords

import re
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.load import LoadReport, Phase
from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.planning.topology import ModelShape
from equipoise.wire.checks import MAX_COUNT
from equipoise.wire.convert import from_balancer, from_worker, to_balancer, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    Abort,
    Assignment,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leaving,
    Peer,
    RankStats,
    Refused,
    Rejection,
    Report,
    RunningState,
    Serving,
    Stage,
    Staged,
    Switched,
)
from equipoise_api.v1 import worker_link_pb2 as pb

MODEL = ModelShape(num_layers=3, num_experts=8, num_groups=4, expert_bytes=4096)
HELLO = Hello(
    pool="decode",
    worker="worker-1",
    boot_id="boot-7",
    node="node-0",
    address="10.0.0.7:7071",
    rendezvous_address="worker-1.pool:29500",
    model=MODEL,
    slots_per_rank=5,
    num_ranks=2,
    checkpoint_fingerprint="0badcafe",
)
LAYOUT = contiguous_layout(num_layers=3, num_experts=8, num_ranks=2, slots_per_rank=5, generation=4)
CHECKSUMS = np.arange(3 * 5 * 16, dtype=np.uint8).reshape(3, 5, 16)
STATS = RankStats(
    steps=9,
    tokens_processed=100,
    tokens_generated=40,
    median_step_us=12_000,
    active_requests=3,
    queued_requests=1,
)
REPORT = Report(
    load=LoadReport(
        boot_id="boot-7",
        epoch=1,
        rank=1,
        generation=4,
        phase=Phase.MIXED,
        tokens=np.arange(15, dtype=np.uint64).reshape(3, 5),
    ),
    stats=STATS,
)
RUNNING = RunningState(epoch=2, rank=1, staged_generation=5, layout=LAYOUT, checksums=CHECKSUMS)
SERVING = Serving(epoch=1, rank=0, generation=4, checksums=CHECKSUMS)
STAGED = Staged(
    epoch=1, rank=1, generation=5, peer_bytes=8192, checkpoint_bytes=4096, duration_us=77
)
SWITCHED = Switched(
    epoch=1,
    rank=1,
    generation=5,
    step=0,
    stall_us=800,
    median_step_us=12_000,
    checksums=CHECKSUMS,
)
ASSIGNMENT = Assignment(
    epoch=1,
    rank=1,
    peers=(
        Peer(rank=0, address="10.0.0.6:7071", node="node-0", worker="worker-0"),
        Peer(rank=1, address="10.0.0.7:7071", node="node-0", worker="worker-1"),
    ),
    rendezvous_address="10.0.0.6:29500",
    layout=LAYOUT,
    report_interval_s=1.0,
    heartbeat_interval_s=0.5,
)
STAGE = Stage(
    epoch=1,
    layout=LAYOUT,
    base_generation=3,
    moves=(
        Move(
            layer=2,
            slot=5,
            expert=5,
            checksum=b"0123456789abcdef",
            sources=(RankSource(rank=0), CheckpointSource()),
        ),
    ),
    timeout_s=30.0,
)

FROM_WORKERS = [
    HELLO,
    replace(HELLO, running=RUNNING),
    SERVING,
    REPORT,
    STAGED,
    Refused(epoch=1, rank=0, generation=5, reason="expert 3 of layer 1: checksum differs"),
    SWITCHED,
    Heartbeat(epoch=1, generation=4, staged_generation=5, sequence=12),
    Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=0),
    Leaving(reason="Ctrl-C"),
]
FROM_BALANCER = [
    ASSIGNMENT,
    STAGE,
    replace(STAGE, moves=()),
    Abort(epoch=1, generation=5, reason="rank 0 refused"),
    HeartbeatAck(sequence=12),
    Rejection(reason="the pool is complete", fatal=True),
]


def assert_same(a, b):
    """Equality of values that hold arrays and layouts."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def received_by_balancer(message):
    hello = None if message.HasField("hello") else HELLO
    return from_worker(over_the_wire(message), hello=hello)


def received_by_worker(message):
    return from_balancer(over_the_wire(message), hello=HELLO)


# Round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", FROM_WORKERS, ids=lambda value: type(value).__name__)
def test_what_a_worker_says_arrives_as_it_was_said(value):
    assert_same(received_by_balancer(to_balancer(value)), value)


@pytest.mark.parametrize("value", FROM_BALANCER, ids=lambda value: type(value).__name__)
def test_what_the_balancer_says_arrives_as_it_was_said(value):
    assert_same(received_by_worker(to_worker(value)), value)


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 5),
    num_experts=st.integers(1, 12),
    num_ranks=st.integers(1, 4),
    extra=st.integers(0, 3),
    generation=st.integers(1, MAX_COUNT),
    data=st.data(),
)
def test_any_layout_and_any_counters_arrive_as_they_were_sent(
    num_layers, num_experts, num_ranks, extra, generation, data
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
    model = ModelShape(num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1)
    hello = replace(HELLO, model=model, slots_per_rank=slots_per_rank, num_ranks=num_ranks)
    checksums = np.zeros((num_layers, slots_per_rank, 16), dtype=np.uint8)
    running = replace(RUNNING, rank=0, staged_generation=0, layout=layout, checksums=checksums)
    hello = replace(hello, running=running)
    assert_same(received_by_balancer(to_balancer(hello)), hello)

    cells = num_layers * slots_per_rank
    counters = data.draw(st.lists(st.integers(0, MAX_COUNT), min_size=cells, max_size=cells))
    tokens = np.array(counters, dtype=np.uint64).reshape(num_layers, slots_per_rank)
    report = replace(REPORT, load=replace(REPORT.load, rank=0, tokens=tokens))
    assert_same(from_worker(to_balancer(report), hello=hello), report)


def test_arrays_from_the_wire_cannot_be_written_to():
    serving = received_by_balancer(to_balancer(SERVING))
    report = received_by_balancer(to_balancer(REPORT))
    assert not serving.checksums.flags.writeable
    assert not report.load.tokens.flags.writeable


# The order of a stream ----------------------------------------------------------------------------


def refusal_of(receive, *arguments, **keywords):
    with pytest.raises(InvalidMessageError) as caught:
        receive(*arguments, **keywords)
    return caught.value


def test_a_stream_starts_with_hello_and_says_it_once():
    assert refusal_of(from_worker, to_balancer(SERVING), hello=None).kind == "hello_missing"
    assert refusal_of(from_worker, pb.ConnectRequest(), hello=None).kind == "hello_missing"
    assert refusal_of(from_worker, to_balancer(HELLO), hello=HELLO).kind == "hello_repeated"


def test_a_message_of_a_later_protocol_is_refused_not_guessed_at():
    # A oneof field that this release does not know arrives as an unknown field.
    from_the_future = pb.ConnectRequest.FromString(b"\xfa\x01\x02\x08\x01")
    assert refusal_of(from_worker, from_the_future, hello=HELLO).kind == "message_empty"
    assert refusal_of(from_balancer, pb.ConnectResponse(), hello=HELLO).kind == "message_empty"


# Refusals, one fault each -------------------------------------------------------------------------


def set_fields(message, **changes):
    for name, value in changes.items():
        *path, last = name.split("__")
        target = message
        for step in path:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        setattr(target, last, value)
    return message


def floats(*shape, value=np.nan):
    return np.full(shape, value, dtype="<f8").tobytes()


def table(*, at=(0, 0), holds=0):
    cells = LAYOUT.expert_of_slot.copy()
    cells[at] = holds
    return cells.astype("<i4").tobytes()


HELLO_FAULTS = [
    (dict(protocol_version=2), "hello_protocol_version", "speaks protocol version 2, the balancer"),
    (dict(pool=""), "hello_name", "pool must be 1 to 253 printable"),
    (dict(worker="a\x1b[2J"), "hello_name", r"'a\\x1b\[2J'"),
    (dict(node="n" * 254), "hello_name", "node must be"),
    (dict(boot_id=" "), "hello_name", "boot_id"),
    (dict(checkpoint_fingerprint=""), "hello_name", "checkpoint_fingerprint"),
    (dict(address="worker-1"), "hello_address", "address must be host:port"),
    (dict(address=":7071"), "hello_address", "address must be host:port"),
    (dict(address="h:0"), "hello_address", "from 1 to 65535, not 'h:0'"),
    (dict(address="h:65536"), "hello_address", "from 1 to 65535"),
    (dict(address="h:٣"), "hello_address", "host:port"),
    (dict(rendezvous_address="two words:1"), "hello_address", "rendezvous_address"),
    (dict(model__num_layers=0), "hello_model", "num_layers must be at least 1"),
    (dict(model__num_groups=3), "hello_model", "8 experts do not divide into 3 groups"),
    (dict(model__expert_bytes=0), "hello_range", "expert_bytes must be from 1"),
    (dict(model__num_experts=2**32 - 1), "hello_model", "more than 2\\^20 experts"),
    (dict(num_ranks=1), "hello_slots", "1 ranks x 5 slots must be at least the model's 8 experts"),
    (dict(num_ranks=2**32 - 1), "hello_slots", "at most 2\\^20"),
    (dict(slots_per_rank=0), "hello_slots", "2 ranks x 0 slots"),
    (dict(running__rank=2), "running_rank", "ranks 0 to 1, not 2"),
    (dict(running__epoch=0), "running_range", "epoch must be from 1"),
    (dict(running__generation=3), "running_generation", "generation 3 is said to run"),
    (dict(running__staged_generation=4), "running_generation", "but 4 runs already"),
    (dict(running__slot_checksums=b""), "running_shape", r"\[3, 5, 16\] = 240 bytes, not 0"),
    (dict(running__layout__num_layers=2), "running_shape", r"\[2, 10\] = 80 bytes, not 120"),
    (dict(running__layout__num_experts=0), "running_shape", "cannot hold 0 experts"),
    (dict(running__layout__num_experts=2**32 - 1), "running_shape", "cannot hold 4294967295"),
    (dict(running__layout__num_slots=2**32 - 1), "running_shape", "from 1 to 2\\^20 cells"),
    (dict(running__layout__num_ranks=0), "running_layout", "do not divide over 0 ranks"),
    (dict(running__layout__num_ranks=5), "running_shape", r"has \(layers, experts, slots per"),
    (dict(running__layout__num_experts=9), "running_layout", "no slot for expert 8"),
    (dict(running__layout__generation=0), "running_range", "generation must be from 1"),
    (
        dict(running__layout__expert_of_slot=table(at=(1, 9), holds=8)),
        "running_layout",
        "layer 1, slot 9 holds expert 8, but experts are 0 to 7",
    ),
    (
        dict(running__layout__expert_of_slot=table(at=(2, 4), holds=0)),
        "running_layout",
        "layer 2 has no slot for expert 4",
    ),
    (
        dict(running__layout__expert_of_slot=table(at=(2, 9), holds=5)),
        "running_layout",
        "rank 1 holds expert 5 more than 1",
    ),
]
REPORT_FAULTS = [
    (dict(tokens=b"\0" * 119), "report_shape", r"<u8 of shape \[3, 5\] = 120 bytes, not 119"),
    (dict(tokens=b""), "report_shape", "not 0 bytes"),
    (dict(tokens=floats(3, 5)), "report_range", "above 2\\^53: counters are whole numbers"),
    (dict(tokens=floats(3, 5, value=1.0)), "report_range", "layer 0, own slot 0"),
    (dict(tokens=floats(3, 5, value=-np.inf)), "report_range", "above 2\\^53"),
    (dict(tokens=np.full(15, -1, "<i8").tobytes()), "report_range", "18446744073709551615"),
    (dict(rank=2), "report_rank", "ranks 0 to 1, not 2"),
    (dict(epoch=0), "report_range", "epoch must be from 1"),
    (dict(generation=0), "report_range", "generation must be from 1"),
    (dict(phase=0), "report_phase", "phase 0 is none of prefill, decode and mixed"),
    (dict(phase=17), "report_phase", "phase 17"),
    (dict(steps=2**63), "report_range", "steps must be from 0 to 2\\^53"),
    (dict(median_step_us=2**64 - 1), "report_range", "median_step_us"),
]
OTHER_FAULTS = [
    (SERVING, dict(slot_checksums=b"x" * 239), "serving_shape", "240 bytes, not 239"),
    (SERVING, dict(generation=2**60), "serving_range", "generation"),
    (STAGED, dict(rank=4_000_000_000), "staged_rank", "not 4000000000"),
    (STAGED, dict(peer_bytes=2**64 - 1), "staged_range", "peer_bytes"),
    (SWITCHED, dict(step=2**64 - 1), "switched_range", "step must be from 0"),
    (SWITCHED, dict(slot_checksums=b""), "switched_shape", "not 0 bytes"),
    (FROM_WORKERS[7], dict(staged_generation=3), "heartbeat_generation", "4 runs already"),
]
ASSIGNMENT_FAULTS = [
    (dict(rank=2), "assignment_rank", "ranks 0 to 1, not 2"),
    (dict(rank=0), "assignment_peers", "rank 0 is said to be worker-0, but this is worker-1"),
    (dict(peers__1__rank=0), "assignment_peers", "must be the layout's 2 ranks, in order"),
    (dict(peers__0__worker="worker-1"), "assignment_peers", "two ranks have one worker"),
    (dict(peers__0__address="nowhere"), "assignment_address", "address of rank 0"),
    (dict(peers__0__node=""), "assignment_name", "node of rank 0"),
    (dict(report_interval_s=0.0), "assignment_range", "report_interval_s must be above 0"),
    (dict(report_interval_s=float("nan")), "assignment_range", "report_interval_s"),
    (dict(heartbeat_interval_s=float("inf")), "assignment_range", "heartbeat_interval_s"),
    (dict(heartbeat_interval_s=-1.0), "assignment_range", "not -1.0"),
    (dict(layout__num_ranks=1), "assignment_shape", r"has .* \(3, 8, 10\), but worker-1 serves"),
    (dict(rendezvous_address=""), "assignment_address", "rendezvous_address"),
]
STAGE_FAULTS = [
    (dict(base_generation=4), "stage_generation", "generation 4 cannot follow generation 4"),
    (dict(base_generation=0), "stage_range", "base_generation must be from 1"),
    (dict(timeout_s=float("nan")), "stage_range", "timeout_s"),
    (dict(timeout_s=3601.0), "stage_range", "at most 3600 seconds, not 3601"),
    (dict(moves__0__layer=3), "stage_move", "layer 3, slot 5 does not exist"),
    (dict(moves__0__slot=10), "stage_move", "slot 10 does not exist"),
    (dict(moves__0__expert=6), "stage_move", "moved expert 6, but the layout wants expert 5"),
    (dict(moves__0__checksum=b"short"), "stage_checksum", "has 16 bytes, not 5"),
    (dict(moves__0__sources__0__rank=2), "stage_source", "a rank 0 to 1 or the checkpoint only"),
    (dict(moves__0__sources__1__checkpoint=False), "stage_source", "or the checkpoint only"),
    (dict(moves__0__sources__0__checkpoint=True), "stage_source", "each named once"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), HELLO_FAULTS)
def test_a_hello_with_one_fault_is_refused_in_words(changes, kind, words):
    message = to_balancer(replace(HELLO, running=RUNNING))
    set_fields(message.hello, **changes)
    check_refusal(refusal_of(received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), REPORT_FAULTS)
def test_a_report_with_one_fault_is_refused_in_words(changes, kind, words):
    message = to_balancer(REPORT)
    set_fields(message.load_report, **changes)
    check_refusal(refusal_of(received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("value", "changes", "kind", "words"), OTHER_FAULTS)
def test_any_message_of_a_worker_with_one_fault_is_refused_in_words(value, changes, kind, words):
    message = to_balancer(value)
    set_fields(getattr(message, message.WhichOneof("message")), **changes)
    check_refusal(refusal_of(received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), ASSIGNMENT_FAULTS)
def test_an_assignment_with_one_fault_is_refused_in_words(changes, kind, words):
    message = to_worker(ASSIGNMENT)
    set_fields(message.assignment, **changes)
    check_refusal(refusal_of(received_by_worker, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), STAGE_FAULTS)
def test_a_stage_with_one_fault_is_refused_in_words(changes, kind, words):
    message = to_worker(STAGE)
    set_fields(message.stage, **changes)
    check_refusal(refusal_of(received_by_worker, message), kind, words)


def test_a_stage_that_fills_a_slot_twice_or_from_nowhere_is_refused():
    twice = to_worker(replace(STAGE, moves=STAGE.moves * 2))
    check_refusal(refusal_of(received_by_worker, twice), "stage_move", "two moves fill one slot")
    nowhere = to_worker(replace(STAGE, moves=(replace(STAGE.moves[0], sources=()),)))
    check_refusal(refusal_of(received_by_worker, nowhere), "stage_source", "needs sources")


def test_a_layout_of_another_model_is_refused_with_both_shapes():
    other = replace(HELLO, slots_per_rank=4)
    error = refusal_of(from_balancer, to_worker(STAGE), hello=other)
    check_refusal(error, "stage_shape", r"\(3, 8, 5\), but worker-1 serves \(3, 8, 4\)")


def test_a_layout_with_more_ranks_than_the_pool_is_refused():
    wide = contiguous_layout(num_layers=3, num_experts=8, num_ranks=3, slots_per_rank=5)
    message = to_worker(replace(STAGE, layout=replace_generation(wide, 4), moves=()))
    error = refusal_of(received_by_worker, message)
    check_refusal(error, "stage_shape", "the layout has 3 ranks, the pool 2")


def test_words_for_people_are_kept_short_and_steer_no_terminal():
    told = Leaving(reason="\x1b[31mred\n" + "x" * 5000)
    reason = received_by_balancer(to_balancer(told)).reason
    assert reason.startswith("[31mred xxx")
    assert reason.isprintable()
    assert len(reason) == 1000
    assert received_by_balancer(to_balancer(Leaving(reason="\n"))).reason == "no reason given"


def check_refusal(error, kind, words):
    assert error.kind == kind, error
    assert re.search(words, str(error)), error


def replace_generation(layout, generation):
    return layout.with_placement(layout.expert_of_slot, generation=generation)


# A flood of broken messages -----------------------------------------------------------------------


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
        assert_sensible_part(part)
    if isinstance(value, Layout):
        assert set(range(value.num_experts)) == set(value.expert_of_slot[0].tolist())
        assert value.expert_of_slot.shape == (3, 5 * value.num_ranks)
        assert value.num_ranks <= 2
    if isinstance(value, LoadReport):
        assert value.tokens.shape == (3, 5)
        assert int(value.tokens.max()) <= 2**53
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
def test_no_broken_message_raises_anything_else_or_passes_as_nonsense(seed):
    random = np.random.default_rng(seed)
    sent = [(to_balancer(value), received_by_balancer) for value in FROM_WORKERS]
    sent += [(to_worker(value), received_by_worker) for value in FROM_BALANCER]
    outcomes = {"unreadable": 0, "refused": 0, "accepted": 0}
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
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.kind.replace("_", "").isalpha()
            assert len(str(refusal)) < 1000
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        if isinstance(value, Hello):
            # It may be another pool's, but never one that nobody could allocate tables for.
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
    ),
    epoch=WIDE,
    base_generation=WIDE,
    timeout_s=st.floats(),
)
def test_made_up_layouts_are_refused_or_valid(layout, epoch, base_generation, timeout_s):
    stage = pb.Stage(
        epoch=epoch, layout=layout, base_generation=base_generation, timeout_s=timeout_s
    )
    try:
        value = received_by_worker(pb.ConnectResponse(stage=stage))
    except InvalidMessageError:
        return
    assert_sensible(value)
