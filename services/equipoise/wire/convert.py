"""Conversion of `messages` to protobuf and back: the four entry points of the WorkerLink.

`to_*` trusts its input. `from_*` checks it: the result has valid shapes and ranges and finite
numbers, and any other input raises `InvalidMessageError`. Shapes come from the worker's `Hello`,
which both sides keep for the life of the stream.
"""

from typing import assert_never

from equipoise.planning.layout import Layout
from equipoise.wire import reports, requests, responses
from equipoise.wire.balancer_messages import (
    Abort,
    BalancerMessage,
    HeartbeatAck,
    JoinEpoch,
    Rejection,
    Stage,
    TermConfirmed,
)
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.layouts import fields_of
from equipoise.wire.messages import (
    GroupLost,
    Heartbeat,
    Hello,
    LayoutRejected,
    Leaving,
    Report,
    Serving,
    Staged,
    Switched,
    WorkerMessage,
)
from equipoise.wire.seal import seal
from equipoise_api.v1 import worker_link_pb2 as pb


def to_balancer(value: WorkerMessage) -> pb.ConnectRequest:
    """Convert a worker's message, with its digest."""
    return seal(_request_of(value))


def _request_of(value: WorkerMessage) -> pb.ConnectRequest:  # noqa: PLR0911 - a case per message
    match value:
        case Hello():
            return pb.ConnectRequest(hello=requests.hello_to_proto(value))
        case Serving():
            return pb.ConnectRequest(serving=requests.serving_to_proto(value))
        case Report():
            return pb.ConnectRequest(load_report=reports.report_to_proto(value))
        case Staged():
            return pb.ConnectRequest(staged=pb.Staged(**fields_of(value)))
        case LayoutRejected():
            return pb.ConnectRequest(layout_rejected=pb.LayoutRejected(**fields_of(value)))
        case Switched():
            return pb.ConnectRequest(switched=requests.switched_to_proto(value))
        case Heartbeat():
            return pb.ConnectRequest(heartbeat=pb.Heartbeat(**fields_of(value)))
        case Leaving():
            return pb.ConnectRequest(leaving=pb.Leaving(**fields_of(value)))
        case GroupLost():
            return pb.ConnectRequest(group_lost=requests.group_lost_to_proto(value))
        case _:
            assert_never(value)


def from_worker(  # noqa: C901, PLR0911, PLR0912 - a case per message
    message: pb.ConnectRequest, *, hello: Hello | None
) -> WorkerMessage:
    """Check and convert a message from the worker that sent `hello`.

    `hello` is None for the first message of a stream, which must be a Hello.

    Raises:
        InvalidMessageError: the message is invalid.
    """
    kind = message.WhichOneof("message")
    if kind == "hello":
        if hello is not None:
            raise InvalidMessageError(
                "hello_repeated", f"hello: {hello.worker} already sent a Hello on this stream"
            )
        return requests.hello_from_proto(message.hello)
    if hello is None:
        raise InvalidMessageError(
            "hello_missing", f"the first message of a stream must be Hello, not {kind or 'nothing'}"
        )
    match kind:
        case "serving":
            return requests.serving_from_proto(message.serving, hello=hello)
        case "load_report":
            return reports.report_from_proto(
                message.load_report,
                model=hello.model,
                slots_per_rank=hello.slots_per_rank,
                boot_id=hello.boot_id,
            )
        case "staged":
            return requests.staged_from_proto(message.staged)
        case "layout_rejected":
            return requests.layout_rejected_from_proto(message.layout_rejected)
        case "switched":
            return requests.switched_from_proto(message.switched, hello=hello)
        case "heartbeat":
            return reports.heartbeat_from_proto(message.heartbeat)
        case "leaving":
            return requests.leaving_from_proto(message.leaving)
        case "group_lost":
            return requests.group_lost_from_proto(message.group_lost, hello=hello)
        case None:
            raise InvalidMessageError(
                "message_empty", f"{hello.worker} sent a message of an unknown kind"
            )
        case _:
            assert_never(kind)


def to_worker(value: BalancerMessage) -> pb.ConnectResponse:
    """Convert a balancer's message."""
    match value:
        case JoinEpoch():
            return pb.ConnectResponse(join_epoch=responses.join_epoch_to_proto(value))
        case Stage():
            return pb.ConnectResponse(stage=responses.stage_to_proto(value))
        case Abort():
            return pb.ConnectResponse(abort=pb.Abort(**fields_of(value)))
        case TermConfirmed():
            return pb.ConnectResponse(term_confirmed=pb.TermConfirmed(**fields_of(value)))
        case HeartbeatAck():
            return pb.ConnectResponse(heartbeat_ack=pb.HeartbeatAck(**fields_of(value)))
        case Rejection():
            return pb.ConnectResponse(rejection=pb.Rejection(**fields_of(value)))
        case _:
            assert_never(value)


def from_balancer(
    message: pb.ConnectResponse, *, hello: Hello, running: Layout | None = None
) -> BalancerMessage:
    """Check and convert a message from the balancer to the worker that sent `hello`.

    `running` is the layout that the worker runs, from which the balancer may send a change only.

    Raises:
        InvalidMessageError: the message is invalid.
    """
    kind = message.WhichOneof("message")
    match kind:
        case "join_epoch":
            return responses.join_epoch_from_proto(message.join_epoch, hello=hello)
        case "stage":
            return responses.stage_from_proto(message.stage, hello=hello, running=running)
        case "abort":
            return responses.abort_from_proto(message.abort)
        case "term_confirmed":
            return responses.term_confirmed_from_proto(message.term_confirmed)
        case "heartbeat_ack":
            return responses.heartbeat_ack_from_proto(message.heartbeat_ack)
        case "rejection":
            return responses.rejection_from_proto(message.rejection)
        case None:
            raise InvalidMessageError(
                "message_empty", "the balancer sent a message of an unknown kind"
            )
        case _:
            assert_never(kind)
