"""Every field of every message of either end at its limits: rejected in words, or within bounds."""

import math
from dataclasses import replace

from equipoise.wire.convert import from_balancer, from_worker, to_balancer, to_worker
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference import response_from_proto
from equipoise.wire.inference_messages import GenerateRequest, Sampling
from equipoise.wire.messages import Hello
from equipoise_api.v1 import worker_pb2
from tests.support.limits import assert_bounded, assert_one_line, variants


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
