"""Every field of every message of either end at its limits: rejected in words, or within bounds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.planning.topology import ModelShape
from equipoise.wire.checks import MAX_CELLS, MAX_COUNT, MAX_EXPERT_CELLS, MAX_RANKS
from equipoise.wire.convert import from_balancer, from_worker, to_balancer, to_worker
from equipoise.wire.encoder import Encoder
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference import request_from_proto, response_from_proto
from equipoise.wire.inference_messages import (
    MAX_GRAMMAR_BYTES,
    MAX_LISTED_TOKENS,
    GenerateRequest,
    Sampling,
)
from equipoise.wire.limits import (
    MAX_HELLO_BYTES,
    MAX_PUSH_BYTES,
    MAX_STATUS_BYTES,
    max_message_bytes,
    max_request_bytes,
)
from equipoise.wire.messages import GroupLost, Hello, RunningState
from equipoise_api.v1 import status_pb2, worker_link_pb2, worker_pb2
from tests.support.limits import (
    assert_bounded,
    assert_one_line,
    largest_join_epoch,
    long_name,
    variants,
)


def test_the_largest_request_fits_into_its_message():
    """Otherwise gRPC rejects it as if the worker were full, and gateways try it again."""
    largest, context = 2**31 - 1, 96
    request = worker_pb2.GenerateRequest(
        request_id=long_name("r", 1),
        prompt=[largest] * (context - 1),
        max_tokens=1,
        stop_tokens=[largest] * MAX_LISTED_TOKENS,
        logit_bias={largest - number: 1.5 for number in range(MAX_LISTED_TOKENS)},
        grammar=worker_pb2.Grammar(regex="a" * MAX_GRAMMAR_BYTES),
    )
    request_from_proto(request, vocab_size=2**31, context_length=context)
    assert request.ByteSize() < max_request_bytes(context_length=context)


def check(base, decode):
    """Decode the variants of a message; the numbers of accepted and of rejected ones."""
    assert_bounded(decode(base))
    num_accepted = num_rejected = 0
    for name, message in variants(base):
        try:
            value = decode(type(message).FromString(message.SerializeToString()))
        except InvalidMessageError as rejection:
            assert_one_line(str(rejection), name)
            num_rejected += 1
        else:
            assert_bounded(value, name)
            num_accepted += 1
    return num_accepted, num_rejected


def test_no_message_of_a_worker_passes_as_nonsense(said_by_worker, good):
    hello = None if isinstance(said_by_worker, Hello) else good.hello
    counts = check(to_balancer(said_by_worker), lambda message: from_worker(message, hello=hello))
    assert all(counts)


def test_no_message_of_a_balancer_passes_as_nonsense(said_by_balancer, good):
    running = said_by_balancer.base if hasattr(said_by_balancer, "base") else None
    counts = check(
        to_worker(said_by_balancer),
        lambda message: from_balancer(message, hello=good.hello, running=running),
    )
    assert all(counts)


def test_no_answer_of_a_rank_passes_as_nonsense():
    request = GenerateRequest(
        request_id="one", prompt=(1, 2), max_tokens=4, sampling=Sampling(logprobs=1)
    )
    one = worker_pb2.TokenLogprob(logprob=-0.5, top_tokens=[3], top_logprobs=[-0.5])

    def decode(message):
        answer = response_from_proto(message, request=request, num_before=0, vocab_size=64)
        for one in answer.logprobs:  # Minus infinity is the logarithm of 0.
            assert all(value < math.inf for value in (one.value, *(value for _, value in one.top)))
        return replace(answer, logprobs=())

    good = worker_pb2.GenerateResponse(tokens=[3], generation=1, step=2, epoch=1, logprobs=[one])
    assert all(check(good, decode))


@pytest.fixture
def hello_with(good):
    """A Hello of a rank that runs, with everything that it may report."""

    def build(*, num_layers, num_experts, num_ranks, slots_per_rank):
        layout = contiguous_layout(
            num_layers=num_layers,
            num_experts=num_experts,
            num_ranks=num_ranks,
            slots_per_rank=slots_per_rank,
            generation=3,
        )
        workers = tuple(f"{'w' * 248}{rank:05}" for rank in range(num_ranks))
        running = RunningState(
            epoch=1,
            rank=0,
            workers=workers,
            layout=layout,
            checksums=np.zeros((num_layers, slots_per_rank, 16), np.uint8),
            expert_checksums=np.zeros((num_layers, num_experts, 16), np.uint8),
            staged_generation=0,
        )
        model = ModelShape(
            num_layers=num_layers, num_experts=num_experts, num_groups=1, expert_bytes=1000
        )
        return replace(
            good.hello,
            worker=workers[0],
            model=model,
            num_ranks=num_ranks,
            slots_per_rank=slots_per_rank,
            max_replicas=0,
            running=running,
        )

    return build


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "num_ranks", "slots_per_rank"),
    [
        (59, 257, 320, 1),  # DeepSeek-V3 with its draft module and the shared expert placed
        (59, 257, 8, 40),
        (60, 384, 128, 4),  # Kimi K2
        (60, 512, 1, 1024),  # Qwen3.5-397B, by itself
        (94, 128, 16, 12),  # Qwen3-235B
        (15, 2048, 64, 40),  # Switch-C
        (1, MAX_EXPERT_CELLS, 4, MAX_EXPERT_CELLS),
        (64, 1024, 4096, 1),
    ],
)
def test_the_largest_models_and_pools_fit_the_limits(
    hello_with, num_layers, num_experts, num_ranks, slots_per_rank
):
    hello = hello_with(
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
    )
    message = to_balancer(hello)
    assert message.ByteSize() <= MAX_HELLO_BYTES < 5 << 20
    assert from_worker(message, hello=None).num_ranks == num_ranks
    assert max_message_bytes(hello) <= (3 << 20) + (64 << 10)


def test_what_exceeds_the_limits_is_rejected_before_its_tables_are_read(hello_with, good):
    assert 4 * MAX_EXPERT_CELLS == MAX_CELLS
    message = to_balancer(
        hello_with(num_layers=1, num_experts=8, num_ranks=4, slots_per_rank=MAX_EXPERT_CELLS)
    )
    message.hello.slots_per_rank += 1
    with pytest.raises(InvalidMessageError, match="at most 65536 slots over all layers"):
        from_worker(message, hello=None)


@pytest.mark.parametrize(("num_ranks", "num_layers"), [(MAX_RANKS, 64), (MAX_RANKS, 1), (4, 1)])
def test_the_largest_join_epoch_fits_its_limit_and_can_be_read(num_ranks, num_layers):
    hello, largest = largest_join_epoch(num_ranks=num_ranks, num_layers=num_layers)
    sent = Encoder().encode(largest)
    assert len(sent) <= MAX_PUSH_BYTES < 9 << 20
    read = from_balancer(worker_link_pb2.ConnectResponse.FromString(sent), hello=hello)
    assert read.peers == largest.peers
    assert read.moves == largest.moves


def test_the_status_of_the_largest_pool_fits_its_limit():
    rank = status_pb2.RankStatus()
    for field in rank.DESCRIPTOR.fields:
        match field.type:
            case field.TYPE_STRING if field.name in {"steps", "trouble"}:
                setattr(rank, field.name, "x" * 1000)
            case field.TYPE_STRING:
                setattr(rank, field.name, long_name("x", 0))
            case field.TYPE_UINT32:
                setattr(rank, field.name, 2**32 - 1)
            case _:
                setattr(rank, field.name, MAX_COUNT)
    largest = status_pb2.WatchStatusResponse(
        status=status_pb2.PoolStatus(ranks=[rank] * MAX_RANKS, pool=long_name("p", 0))
    )
    assert largest.ByteSize() <= MAX_STATUS_BYTES < 26 << 20


def test_a_rank_may_report_that_it_reached_no_peer_of_the_largest_pool(hello_with):
    hello = hello_with(num_layers=1, num_experts=8, num_ranks=MAX_RANKS, slots_per_rank=8)
    peers = hello.running.workers[1:]
    lost = GroupLost(
        epoch=1, reason="x" * 1000, expert_of_slot=np.zeros((1, 8), np.int32), unreached=peers
    )
    message = to_balancer(lost)
    assert message.ByteSize() <= max_message_bytes(hello)
    assert from_worker(message, hello=hello).unreached == peers


def test_a_name_is_bounded_in_bytes_and_one_of_kubernetes_is_never_too_long(hello_with):
    hello = hello_with(num_layers=1, num_experts=8, num_ranks=4, slots_per_rank=8)
    subdomain = ".".join(["n" * 63, "n" * 63, "n" * 63, "n" * 61])
    for node in (subdomain, "語" * 84):
        good = replace(hello, node=node, address=f"{subdomain}:65535")
        assert from_worker(to_balancer(good), hello=None).node == node
    with pytest.raises(InvalidMessageError, match="node must be 1 to 253 bytes of printable"):
        from_worker(to_balancer(replace(hello, node="語" * 85)), hello=None)
