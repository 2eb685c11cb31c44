"""A message of a worker whose bytes were changed on the way is rejected, whatever it says."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from equipoise.wire.convert import to_balancer
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import PROTOCOL_VERSION
from equipoise.wire.seal import unsealed
from equipoise_api.v1 import worker_link_pb2 as pb


def test_every_message_of_a_worker_is_sealed(said_by_worker):
    message = to_balancer(said_by_worker)
    assert unsealed(message.SerializeToString()) == message


def test_the_digest_is_the_last_field_of_the_contract():
    *_, last = sorted(pb.ConnectRequest.DESCRIPTOR.fields, key=lambda field: field.number)
    assert last.name == "digest"


def test_no_changed_byte_passes(said_by_worker):
    sent = to_balancer(said_by_worker).SerializeToString()
    chance = np.random.default_rng(0)
    num_parsed = 0
    for at in {*chance.integers(len(sent), size=100), *range(len(sent) - 20, len(sent))}:
        damaged = bytearray(sent)
        damaged[at] ^= 1 << int(chance.integers(8))
        check_rejected(bytes(damaged))
        num_parsed += parses(bytes(damaged))
    assert num_parsed, "some would have been heard as something else"


@pytest.mark.parametrize("kept", [0, 1, 18, 19])
def test_a_message_that_is_cut_or_has_no_digest_is_rejected(good, kept):
    message = to_balancer(good.serving)
    check_rejected(message.SerializeToString()[:kept])
    message.ClearField("digest")
    check_rejected(message.SerializeToString())


def check_rejected(request):
    with pytest.raises(InvalidMessageError, match=f"^{len(request)} bytes do not") as caught:
        unsealed(request)
    assert caught.value.kind == "link_bytes"


def parses(request):
    try:
        pb.ConnectRequest.FromString(request)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("version", [0, 1, 2, PROTOCOL_VERSION + 1])
def test_a_hello_without_a_digest_is_of_another_release_if_its_version_is(good, version):
    message = to_balancer(good.hello)
    message.ClearField("digest")
    message.hello.protocol_version = version
    with pytest.raises(InvalidMessageError) as caught:
        unsealed(message.SerializeToString())
    assert caught.value.kind == "hello_protocol_version"
    assert str(caught.value) == (
        f"hello: the worker uses protocol version {version}, the balancer {PROTOCOL_VERSION}: run "
        "the same release on both sides"
    )


def test_a_hello_of_this_version_without_a_digest_is_damaged(good):
    message = to_balancer(good.hello)
    message.ClearField("digest")
    check_rejected(message.SerializeToString())


def test_a_hello_whose_version_and_digest_differ_from_those_sent_is_damaged(good):
    message = to_balancer(good.hello)
    message.hello.protocol_version = 2
    check_rejected(message.SerializeToString())
