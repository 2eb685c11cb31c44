"""Values of `messages` to protobuf and back: the four doors of the stream.

`to_*` trusts its own side. `from_*` trusts nobody: whatever it returns has the shapes, ranges and
finite numbers that the types promise, and anything else raises `InvalidMessageError`. Shapes come
from the worker's `Hello`, which both sides keep for the life of the stream.
"""

from equipoise.wire.messages import BalancerMessage, Hello, WorkerMessage
from equipoise_api.v1 import worker_link_pb2 as pb


def to_balancer(value: WorkerMessage) -> pb.ConnectRequest:
    """What a worker sends."""
    raise NotImplementedError


def from_worker(message: pb.ConnectRequest, *, hello: Hello | None) -> WorkerMessage:
    """What the balancer received from a worker that introduced itself by `hello`.

    `hello` is None for the first message of a stream, which must be the Hello and nothing else.

    Raises:
        InvalidMessageError: the message cannot be used.
    """
    raise NotImplementedError


def to_worker(value: BalancerMessage) -> pb.ConnectResponse:
    """What the balancer sends."""
    raise NotImplementedError


def from_balancer(message: pb.ConnectResponse, *, hello: Hello) -> BalancerMessage:
    """What the worker that introduced itself by `hello` received from its balancer.

    Raises:
        InvalidMessageError: the message cannot be used.
    """
    raise NotImplementedError
