"""`equipoise rebalance`, `pause`, `resume`, `rollback`, `pin`, `unpin` and `preview`.

Sends the request and prints the answer. The balancer decides whether to carry it out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from equipoise.cli.display import format_count, print_json
from equipoise.cli.live.client import (
    BalancerRejectedError,
    credentials_of,
    explained,
    is_unsent,
    open_channel,
)
from equipoise.cli.live.settings import (
    OperationSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
)
from equipoise.settings.numbers import format_bytes
from equipoise.trust.tokens import BALANCER
from equipoise.wire.plain import as_json
from equipoise_api.v1 import admin_pb2 as pb
from equipoise_api.v1 import admin_pb2_grpc

EXIT_REJECTED = 3

_MAY_BE_DONE = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
}
"""Also how a broken connection is reported, whether or not the request arrived."""

_NOTHING_DONE = "nothing was done"
"""How balancers begin what they say of a request whose record could not be written."""

_Method = Callable[[admin_pb2_grpc.AdminStub], Callable[..., Any]]


def rebalance(settings: RebalanceSettings) -> int:
    """Plan now, in one pool or in all."""
    if settings.all_pools:
        return _rebalance_all(settings)
    return operate(
        settings,
        lambda stub: stub.TriggerRebalance,
        pb.TriggerRebalanceRequest,
        force=settings.force,
    )


def pause(settings: OperationSettings) -> int:
    """Stop adopting plans."""
    return operate(settings, lambda stub: stub.Pause, pb.PauseRequest)


def resume(settings: OperationSettings) -> int:
    """Adopt plans again."""
    return operate(settings, lambda stub: stub.Resume, pb.ResumeRequest)


def rollback(settings: RollbackSettings) -> int:
    """Restore an earlier generation's placement."""
    return operate(
        settings,
        lambda stub: stub.Rollback,
        pb.RollbackRequest,
        generation=settings.generation,
        keep_planning=settings.keep_planning,
    )


def pin(settings: PinSettings) -> int:
    """Keep a generation's placement."""
    generation = settings.generation or None
    return operate(settings, lambda stub: stub.Pin, pb.PinRequest, generation=generation)


def unpin(settings: OperationSettings) -> int:
    """Release the pinned placement."""
    return operate(settings, lambda stub: stub.Unpin, pb.UnpinRequest)


def operate(
    settings: OperationSettings, method: _Method, request: Callable[..., object], **values: Any
) -> int:
    """Call a method of the Admin service and print the answer; return the exit status.

    `values` are fields of its `request` other than the pool and the reason.

    Raises:
        BalancerRejectedError: the balancer is unreachable or rejects the request.
    """
    values = {"pool": settings.pool, "reason": settings.reason, **values}
    return _report(settings, _send(settings, method, request(**values)))


def preview(settings: PreviewSettings) -> int:
    """Show what a plan would do."""
    request = pb.PreviewRequest(
        pool=settings.pool,
        reason=settings.reason,
        policy=settings.policy(),
        algorithm=settings.algorithm or "",
    )
    response: pb.PreviewResponse = _send(settings, lambda stub: stub.Preview, request)
    status = _report(settings, response)
    if response.HasField("decision") and not settings.json:
        decision = response.decision
        print(
            f"{decision.algorithm} plan: balancedness {decision.balancedness_current:.3f} -> "
            f"{decision.balancedness_proposed:.3f}, "
            f"{format_count(decision.moves, 'move')} ({format_bytes(decision.bytes)})"
            # A plan that would be rejected has none.
            + (
                f" in {format_count(response.num_waves, 'generation')}"
                if response.num_waves
                else ""
            )
        )
    return status


def _report(settings: OperationSettings, response: Any) -> int:
    """Print an answer; return the exit status."""
    if settings.json:
        document = as_json(response)
        document.pop("layout", None)  # A table for programs that speak the protocol.
        print_json(document)
    else:
        is_preview = isinstance(response, pb.PreviewResponse)
        print(response.outcome.reason if is_preview else _line(response.outcome))
    return 0 if response.outcome.accepted else EXIT_REJECTED


def _rebalance_all(settings: RebalanceSettings) -> int:
    """Plan in every pool; print each pool's answer as it arrives."""
    request = pb.RebalanceAllRequest(reason=settings.reason, force=settings.force)

    answers = []

    def collect(stream: Iterable[pb.RebalanceAllResponse]) -> None:
        for answer in stream:
            answers.append(answer)
            if not settings.json:
                unknown = f"unknown: {answer.unanswered}" if answer.unanswered else ""
                print(f"{answer.pool}: {unknown or _line(answer.outcome)}", flush=True)

    is_whole = False
    try:
        _send(settings, lambda stub: stub.RebalanceAll, request, read=collect)
        is_whole = True
    finally:
        # The pools that have answered are not asked again, whatever ends the call.
        if settings.json and (answers or is_whole):
            print_json({"pools": [as_json(answer) for answer in answers]})
    accepted = sum(answer.outcome.accepted for answer in answers)
    if not settings.json:
        print(f"{accepted} of {len(answers)} pools accepted")
    return 0 if accepted == len(answers) else EXIT_REJECTED


def _send(
    settings: OperationSettings,
    method: _Method,
    request: object,
    *,
    read: Callable[[Any], Any] = lambda response: response,
) -> Any:
    """Send a request to the balancer at the address, or to the leader that it names.

    Returns what `read` makes of the response, which is an iterator if the method streams.
    """
    try:
        return _send_once(settings, method, request, read)
    except BalancerRejectedError as error:
        if not error.leader_address or error.leader_address == settings.address:
            raise
        return _send_once(replace(settings, address=error.leader_address), method, request, read)


def _send_once(
    settings: OperationSettings, method: _Method, request: object, read: Callable[[Any], Any]
) -> Any:
    credentials = credentials_of(settings.access)
    with (
        open_channel(settings.address, credentials) as channel,
        explained(settings.address, credentials),
    ):
        call = method(admin_pb2_grpc.AdminStub(channel))
        try:
            return read(
                call(
                    request,
                    timeout=settings.timeout_s,
                    metadata=credentials.metadata(audience=BALANCER),
                )
            )
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)  # noqa: PT017 - no test
            if (
                isinstance(request, pb.PreviewRequest)  # It changes nothing.
                or error.code() not in _MAY_BE_DONE
                or (error.details() or "").startswith(_NOTHING_DONE)
                or is_unsent(error, credentials)
            ):
                raise
            fault = (
                f"did not answer within {settings.timeout_s:g} s"
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                else f"gave no answer ({credentials.explain(error.details())})"
            )
            raise BalancerRejectedError(
                f"the balancer at {settings.address} {fault}; the request may still be carried "
                "out: check `equipoise audit` before you repeat it"
            ) from error


def _line(outcome: pb.Outcome) -> str:
    return f"{'done' if outcome.accepted else 'rejected'}: {outcome.reason}"
