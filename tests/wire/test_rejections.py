"""Each fault by itself is rejected with its kind and a reason."""

# ruff: noqa: C408 - fields of messages read better as keywords

import re
from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.wire.checks import MAX_RANKS
from equipoise.wire.convert import from_balancer, from_worker, to_balancer, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Leaving
from equipoise_api.v1 import worker_link_pb2 as pb


def set_fields(message, **changes):
    for name, value in changes.items():
        *path, last = name.split("__")
        target = message
        for step in path:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        if isinstance(value, list):
            getattr(target, last)[:] = value
        else:
            setattr(target, last, value)
    return message


def floats(*shape, value=np.nan):
    return np.full(shape, value, dtype="<f8").tobytes()


def table(*, at, holds):
    """A layout's table with one wrong cell; right, it is 0 to 7, 0, 1 in each of 3 layers."""
    cells = np.tile(np.arange(10) % 8, (3, 1))
    cells[at] = holds
    return cells.astype("<i4").tobytes()


def shares(*, at, holds):
    """Shares of that table with one wrong cell; right, slots 0, 1, 8 and 9 have halves."""
    cells = np.tile([2**14] * 2 + [2**15] * 6 + [2**14] * 2, (3, 1))
    cells[at] = holds
    return cells.astype("<u2").tobytes()


HELLO_FAULTS = [
    (
        dict(protocol_version=2),
        "hello_protocol_version",
        "uses protocol version 2, the balancer 3: run the same release",
    ),
    (dict(backends=["gemm"]), "hello_backends", "operation=backend.backend, not 'gemm'"),
    (dict(backends=["gemm=a"] * 65), "hello_backends", "at most 64 of operation=backend.backend"),
    (dict(backends=["gemm=\n"]), "hello_name", "backends must be"),
    (dict(phase=4), "hello_phase", "prefill, decode or mixed, not 4"),
    (dict(latent_form="x" * 254), "hello_name", "latent_form must be"),
    (dict(pool=""), "hello_name", "pool must be 1 to 253 bytes of printable"),
    (dict(worker="a\x1b[2J"), "hello_name", r"'a\\x1b\[2J'"),
    (dict(node="n" * 254), "hello_name", "node must be"),
    (dict(node="語" * 85), "hello_name", "node must be 1 to 253 bytes"),
    (dict(address=f"{'h' * 254}:1"), "hello_address", "address must be host:port"),
    (dict(address="höst:1"), "hello_address", "address must be host:port"),
    (dict(boot_id=" "), "hello_name", "boot_id"),
    (dict(checkpoint_fingerprint=""), "hello_name", "checkpoint_fingerprint"),
    (dict(experts_digest=b""), "hello_experts_digest", "run the same release"),
    (dict(experts_digest=bytes(15)), "hello_experts_digest", "16 bytes, not 15"),
    (dict(address="worker-1"), "hello_address", "address must be host:port"),
    (dict(address=":7071"), "hello_address", "address must be host:port"),
    (dict(address="h:0"), "hello_address", "from 1 to 65535, not 'h:0'"),
    (dict(address="h:65536"), "hello_address", "from 1 to 65535"),
    (dict(address="h:٣"), "hello_address", "host:port"),
    (dict(rendezvous_address="two words:1"), "hello_address", "rendezvous_address"),
    (dict(model__num_layers=0), "hello_model", "num_layers must be at least 1"),
    (dict(model__num_groups=3), "hello_model", "8 experts do not divide evenly into 3 groups"),
    (dict(model__expert_bytes=0), "hello_range", "expert_bytes must be from 1"),
    (dict(model__num_experts=2**32 - 1), "hello_model", "must be at most 65536"),
    (dict(num_ranks=1), "hello_slots", "1 ranks x 5 slots must be at least the model's 8 experts"),
    (dict(num_ranks=2**32 - 1), "hello_slots", "at most 4096 ranks"),
    (dict(slots_per_rank=0), "hello_slots", "2 ranks x 0 slots"),
    (
        dict(slots_per_rank=21_846),
        "hello_slots",
        "at most 65536 slots over all layers, not 3 layers",
    ),
    (dict(num_ranks=4097), "hello_slots", "at most 4096 ranks, not 4097"),
    (dict(num_ranks=4000, slots_per_rank=22), "hello_slots", "at most 262144 over its 3 layers"),
    (dict(model__num_experts=21_848), "hello_model", "3 layers x 21848 experts must be at most"),
    (dict(num_places=2), "hello_places", "2 places must be from 3, one for each layer, to 15, one"),
    (dict(num_places=16), "hello_places", "16 places must be from 3"),
    (dict(num_places=14), "running_places", "rank 1 of the layout holds 15 experts, but worker-1 "),
    (dict(running__rank=2), "running_rank", "rank must be from 0 to 1, not 2"),
    (dict(running__workers=["worker-1", "worker-0"]), "running_workers", "worker-1 at rank 1"),
    (dict(running__workers=["worker-1", "worker-1"]), "running_workers", "each once"),
    (dict(running__workers=["worker-1"]), "running_workers", "the layout's 2 ranks"),
    (dict(running__workers=["two\nlines", "worker-1"]), "running_name", "workers"),
    (dict(running__epoch=0), "running_range", "epoch must be from 1"),
    (dict(running__generation=3), "running_generation", "generation 3 differs from the layout's"),
    (dict(running__staged_generation=4), "running_generation", "above the running generation 4"),
    (dict(running__slot_checksums=b""), "running_shape", r"\[3, 5, 16\] = 240 bytes, not 0"),
    (dict(running__layout__num_layers=2), "running_shape", r"\[2, 10\] = 80 bytes, not 120"),
    (dict(running__layout__num_experts=0), "running_shape", "cannot hold 0 experts"),
    (dict(running__layout__num_experts=2**32 - 1), "running_shape", "cannot hold 4294967295"),
    (dict(running__layout__num_slots=2**32 - 1), "running_shape", "1 to 262144 slots"),
    (dict(running__layout__num_ranks=0), "running_layout", "do not divide evenly over 0 ranks"),
    (dict(running__layout__num_ranks=5), "running_shape", r"has \(layers, experts, slots per"),
    (dict(running__layout__num_experts=9), "running_layout", "no slot for expert 8"),
    (dict(running__layout__share_of_slot=b""), "running_shape", r"share_of_slot must be <u2 of"),
    (dict(running__layout__share_of_slot=bytes(59)), "running_shape", "= 60 bytes, not 59"),
    (
        dict(running__layout__share_of_slot=shares(at=(2, 9), holds=2**14 - 1)),
        "running_layout",
        "layer 2: the shares of expert 1 sum to 32767, not 32768",
    ),
    (
        dict(running__layout__share_of_slot=shares(at=(0, 3), holds=2**16 - 1)),
        "running_layout",
        "layer 0, slot 3 has a share of 65535",
    ),
    (dict(running__layout__generation=0), "running_range", "generation must be from 1"),
    (
        dict(running__layout__expert_of_slot=table(at=(1, 9), holds=8)),
        "running_layout",
        "layer 1, slot 9 holds expert 8, but experts are numbered 0 to 7",
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
    (dict(assignments=b"\0" * 119), "report_shape", r"<u8 of shape \[3, 5\] = 120 bytes, not 119"),
    (dict(assignments=b""), "report_shape", "not 0 bytes"),
    (dict(assignments=floats(3, 5)), "report_range", "above 2\\^53: send little-endian"),
    (dict(assignments=floats(3, 5, value=1.0)), "report_range", "layer 0, own slot 0"),
    (dict(assignments=floats(3, 5, value=-np.inf)), "report_range", "above 2\\^53"),
    (dict(assignments=np.full(15, -1, "<i8").tobytes()), "report_range", "18446744073709551615"),
    (dict(rank=2**16), "report_rank", "rank must be from 0 to 4095, not 65536"),
    (dict(epoch=0), "report_range", "epoch must be from 1"),
    (dict(generation=0), "report_range", "generation must be from 1"),
    (dict(phase=0), "report_phase", "must be prefill, decode or mixed, not 0"),
    (dict(phase=17), "report_phase", "not 17"),
    (dict(steps=2**63), "report_range", "steps must be from 0 to 2\\^53"),
    (dict(median_step_us=2**64 - 1), "report_range", "median_step_us"),
    (dict(nodes__rows_by_nodes=[1] * 66), "report_nodes", "must have at most 65 counts, not 66"),
    (dict(nodes__rows_by_nodes=[2**54]), "report_range", "rows_by_nodes must be from 0 to"),
    (dict(nodes__sent_rows=2**54), "report_range", "sent_rows must be from 0 to"),
]
OTHER_FAULTS = [
    ("serving", dict(slot_checksums=b"x" * 239), "serving_shape", "240 bytes, not 239"),
    ("serving", dict(generation=2**60), "serving_range", "generation"),
    ("staged", dict(rank=4_000_000_000), "staged_rank", "not 4000000000"),
    ("staged", dict(peer_bytes=2**64 - 1), "staged_range", "peer_bytes"),
    ("switched", dict(step=2**64 - 1), "switched_range", "step must be from 0"),
    ("switched", dict(slot_checksums=b""), "switched_shape", "not 0 bytes"),
    (
        "heartbeat",
        dict(staged_generation=3),
        "heartbeat_generation",
        "above the running generation 4",
    ),
]
JOIN_EPOCH_FAULTS = [
    (dict(rank=2), "join_epoch_rank", "rank must be from 0 to 1, not 2"),
    (dict(rank=0), "join_epoch_peers", "rank 0 is worker-0, but the receiver is worker-1"),
    (dict(peers__1__rank=0), "join_epoch_peers", "must be the layout's 2 ranks, in order"),
    (dict(peers__0__worker="worker-1"), "join_epoch_peers", "a worker has two ranks"),
    (dict(peers__0__address="nowhere"), "join_epoch_address", "address of rank 0"),
    (dict(peers__0__node=""), "join_epoch_name", "node of rank 0"),
    (dict(report_interval_s=0.0), "join_epoch_range", "report_interval_s must be above 0"),
    (dict(report_interval_s=float("nan")), "join_epoch_range", "report_interval_s"),
    (dict(heartbeat_interval_s=float("inf")), "join_epoch_range", "heartbeat_interval_s"),
    (dict(heartbeat_interval_s=-1.0), "join_epoch_range", "not -1.0"),
    (dict(layout__num_ranks=1), "join_epoch_shape", r"has .* \(3, 8, 10\), but worker-1 serves"),
    (dict(rendezvous_address=""), "join_epoch_address", "rendezvous_address"),
]
STAGE_FAULTS = [
    (
        dict(base_generation=4),
        "stage_generation",
        "generation 4 must be above the base generation 4",
    ),
    (dict(base_generation=0), "stage_range", "base_generation must be from 1"),
    (dict(timeout_s=float("nan")), "stage_range", "timeout_s"),
    (dict(timeout_s=3601.0), "stage_range", "at most 3600 seconds, not 3601"),
    (dict(moves__0__layer=3), "stage_move", "layer 3, slot 5 does not exist"),
    (dict(moves__0__slot=10), "stage_move", "slot 10 does not exist"),
    (dict(moves__0__expert=6), "stage_move", "must get expert 5 of the layout, not expert 6"),
    (dict(moves__0__checksum=b"short"), "stage_checksum", "must have 16 bytes, not 5"),
    (dict(moves__0__sources__0__rank=2), "stage_source", "a rank from 0 to 1 or the checkpoint"),
    (dict(moves__0__sources__1__checkpoint=False), "stage_source", "or the checkpoint"),
    (dict(moves__0__sources__0__checkpoint=True), "stage_source", "must be distinct"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), HELLO_FAULTS)
def test_a_hello_with_one_fault_is_rejected_with_the_reason(good, changes, kind, words):
    message = to_balancer(good.reconnecting)
    set_fields(message.hello, **changes)
    check_rejection(rejection_of(good.received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), REPORT_FAULTS)
def test_a_report_with_one_fault_is_rejected_with_the_reason(good, changes, kind, words):
    message = to_balancer(good.report)
    set_fields(message.load_report, **changes)
    check_rejection(rejection_of(good.received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("name", "changes", "kind", "words"), OTHER_FAULTS)
def test_any_message_of_a_worker_with_one_fault_is_rejected_with_the_reason(
    good, name, changes, kind, words
):
    message = to_balancer(getattr(good, name))
    set_fields(getattr(message, message.WhichOneof("message")), **changes)
    check_rejection(rejection_of(good.received_by_balancer, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), JOIN_EPOCH_FAULTS)
def test_a_join_epoch_with_one_fault_is_rejected_with_the_reason(good, changes, kind, words):
    message = to_worker(good.join_epoch)
    set_fields(message.join_epoch, **changes)
    check_rejection(rejection_of(good.received_by_worker, message), kind, words)


@pytest.mark.parametrize(("changes", "kind", "words"), STAGE_FAULTS)
def test_a_stage_with_one_fault_is_rejected_with_the_reason(good, changes, kind, words):
    message = to_worker(good.stage)
    set_fields(message.stage, **changes)
    check_rejection(rejection_of(good.received_by_worker, message), kind, words)


CHANGE_FAULTS = [
    ({"cells": b"123"}, "stage_shape", "cells must be"),
    ({"cells": b"1234"}, "stage_shape", "expert_of_cell must be"),
    ({"share_of_cell": b"12"}, "stage_shape", "share_of_cell must be"),
    ({"digest": b"short"}, "stage_shape", "digest must have 16 bytes, not 5"),
    ({"digest": bytes(16)}, "stage_layout", "a change to another layout than generation 3"),
    ({"cells": b"\xff" * 8}, "stage_layout", "cell 4294967295 does not exist among 3 layers"),
    ({"expert_of_cell": bytes(8)}, "stage_layout", "layer 1"),
    ({"generation": 0}, "stage_range", "generation must be from 1"),
]


@pytest.mark.parametrize(("changes", "kind", "words"), CHANGE_FAULTS)
def test_a_change_of_a_layout_with_one_fault_is_rejected_with_the_reason(
    good, changes, kind, words
):
    message = to_worker(good.change)
    set_fields(message.stage.change, **changes)
    check_rejection(rejection_of(good.received_by_worker, message), kind, words)


@pytest.mark.parametrize("runs", [None, 2])
def test_a_change_from_a_generation_that_is_not_running_is_rejected(good, runs):
    running = None if runs is None else replace(good.change.base, generation=runs)
    error = rejection_of(from_balancer, to_worker(good.change), hello=good.hello, running=running)
    check_rejection(error, "stage_base", "from generation 3, but worker-1 runs (nothing|gen)")


def test_a_stage_that_fills_a_slot_twice_or_without_a_source_is_rejected(good):
    twice = to_worker(replace(good.stage, moves=good.stage.moves * 2))
    check_rejection(
        rejection_of(good.received_by_worker, twice), "stage_move", "two moves fill one slot"
    )
    nowhere = to_worker(replace(good.stage, moves=(replace(good.stage.moves[0], sources=()),)))
    check_rejection(
        rejection_of(good.received_by_worker, nowhere),
        "stage_source",
        "sources must be distinct and at least one",
    )


def test_a_layout_of_another_model_is_rejected_with_both_shapes(good):
    other = replace(good.hello, slots_per_rank=4)
    error = rejection_of(from_balancer, to_worker(good.stage), hello=other)
    check_rejection(error, "stage_shape", r"\(3, 8, 5\), but worker-1 serves \(3, 8, 4\)")


def test_a_layout_may_have_more_ranks_than_the_pool_started_with(good):
    wide = contiguous_layout(num_layers=3, num_experts=8, num_ranks=3, slots_per_rank=5)
    message = to_worker(replace(good.stage, layout=replace_generation(wide, 4), moves=()))
    assert good.received_by_worker(message).layout.num_ranks == 3


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_no_slot_can_hold_is_rejected(good, expert):
    held = good.group_lost.expert_of_slot.copy()
    held[1, 2] = expert
    message = to_balancer(replace(good.group_lost, expert_of_slot=held))
    error = rejection_of(good.received_by_balancer, message)
    check_rejection(error, "group_lost_shape", f"experts are 0 to 7, not .*{expert}|{expert}")


@pytest.mark.parametrize("unreached", [("worker-1",), ("worker-0", ""), ("x" * 254,), ("a\nb",)])
def test_unreached_peers_must_be_names_of_others(good, unreached):
    message = to_balancer(replace(good.group_lost, unreached=unreached))
    error = rejection_of(good.received_by_balancer, message)
    kind = "group_lost_unreached" if unreached == ("worker-1",) else "group_lost_name"
    check_rejection(error, kind, "unreached")


def test_more_unreached_peers_than_a_pool_can_have_are_rejected(good):
    message = to_balancer(replace(good.group_lost, unreached=("w",) * (MAX_RANKS + 1)))
    error = rejection_of(good.received_by_balancer, message)
    check_rejection(error, "group_lost_unreached", "must be at most 4096 peers")


def test_reasons_are_truncated_and_have_no_control_characters(good):
    leaving = Leaving(reason="\x1b[31mred\n" + "x" * 5000)
    reason = good.received_by_balancer(to_balancer(leaving)).reason
    assert reason.startswith("[31mred xxx")
    assert reason.isprintable()
    assert len(reason) == 1000
    assert good.received_by_balancer(to_balancer(Leaving(reason="\n"))).reason == "no reason given"


def test_a_stream_starts_with_exactly_one_hello(good):
    assert rejection_of(from_worker, to_balancer(good.serving), hello=None).kind == "hello_missing"
    assert rejection_of(from_worker, pb.ConnectRequest(), hello=None).kind == "hello_missing"
    assert (
        rejection_of(from_worker, to_balancer(good.hello), hello=good.hello).kind
        == "hello_repeated"
    )


def test_a_message_of_a_newer_protocol_is_rejected(good):
    # A oneof field that this release does not know arrives as an unknown field.
    from_the_future = pb.ConnectRequest.FromString(b"\xfa\x01\x02\x08\x01")
    assert rejection_of(from_worker, from_the_future, hello=good.hello).kind == "message_empty"
    assert (
        rejection_of(from_balancer, pb.ConnectResponse(), hello=good.hello).kind == "message_empty"
    )


def rejection_of(receive, *arguments, **keywords):
    with pytest.raises(InvalidMessageError) as caught:
        receive(*arguments, **keywords)
    return caught.value


def check_rejection(error, kind, words):
    assert error.kind == kind, error
    assert re.search(words, str(error)), error


def replace_generation(layout, generation):
    return layout.with_placement(layout.expert_of_slot, generation=generation)
