"""The digest that ends every message of a worker, so that damage in transit is noticed.

TCP and TLS protect a connection. A proxy that ends it, or a machine with bad memory, may still
change bytes, and what parses afterwards would be a false report of the worker.
"""

from hashlib import blake2b

from google.protobuf.message import DecodeError

from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.requests import check_protocol_version
from equipoise_api.v1 import worker_link_pb2 as pb

UNREADABLE = "link_bytes"
"""Kind of the rejection of damaged bytes."""

_DIGEST_BYTES = 16
_TAG = bytes([0xC2, 0x3E, _DIGEST_BYTES])
"""How `ConnectRequest.digest` begins on the wire: field 1000, bytes, and their number."""

_SEAL_BYTES = len(_TAG) + _DIGEST_BYTES


def seal(message: pb.ConnectRequest) -> pb.ConnectRequest:
    """Set the digest of a message to that of its other fields, and return it."""
    message.ClearField("digest")
    message.digest = _digest(message.SerializeToString())
    return message


def unsealed(request: bytes) -> pb.ConnectRequest:
    """Check the digest of a message, and decode it.

    Raises:
        InvalidMessageError: "link_bytes", or "hello_protocol_version" if a worker of another
            release sent it, which need not have a digest.
    """
    sealed = memoryview(request)
    body, end = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
    if end != _TAG + _digest(body):
        _check_release(request)
        raise InvalidMessageError(
            UNREADABLE,
            f"{len(request)} bytes do not have the digest that was sent with them: check the "
            "proxies between worker and balancer",
        )
    try:
        return pb.ConnectRequest.FromString(request)
    except DecodeError:
        raise InvalidMessageError(
            UNREADABLE,
            f"{len(request)} bytes are not a valid WorkerLink message: run the same release on "
            "both sides",
        ) from None


def _check_release(request: bytes) -> None:
    """Reject a Hello without a digest for its version, if that is not ours."""
    try:
        message = pb.ConnectRequest.FromString(request)
    except DecodeError:
        return
    if message.HasField("hello") and not message.digest:
        check_protocol_version(message.hello)


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
