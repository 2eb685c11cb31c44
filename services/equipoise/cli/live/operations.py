"""`equipoise rebalance`, `pause`, `resume`, `rollback`, `pin`, `unpin` and `preview`.

Sends the request and prints the answer. The balancer decides whether to carry it out.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from equipoise.cli.display import format_bytes, format_count
from equipoise.cli.live.client import BalancerRefusedError, credentials_of, explained
from equipoise.cli.live.settings import (
    OperationSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
)
from equipoise.wire.plain import as_json
from equipoise_api.v1 import admin_pb2 as pb
from equipoise_api.v1 import admin_pb2_grpc

EXIT_REFUSED = 3

_R = TypeVar("_R")


def rebalance(settings: RebalanceSettings) -> int:
    """Plan now, in one pool or in all."""
    if settings.all_pools:
        return _rebalance_all(settings)
    request = pb.TriggerRebalanceRequest(
        pool=settings.pool, reason=settings.reason, force=settings.force
    )
    return _report(settings, _send(settings, lambda stub: stub.TriggerRebalance, request))


def pause(settings: OperationSettings) -> int:
    """Stop adopting plans."""
    request = pb.PauseRequest(pool=settings.pool, reason=settings.reason)
    return _report(settings, _send(settings, lambda stub: stub.Pause, request))


def resume(settings: OperationSettings) -> int:
    """Adopt plans again."""
    request = pb.ResumeRequest(pool=settings.pool, reason=settings.reason)
    return _report(settings, _send(settings, lambda stub: stub.Resume, request))


def rollback(settings: RollbackSettings) -> int:
    """Restore an earlier generation's placement."""
    request = pb.RollbackRequest(
        pool=settings.pool,
        reason=settings.reason,
        generation=settings.generation,
        keep_planning=settings.keep_planning,
    )
    return _report(settings, _send(settings, lambda stub: stub.Rollback, request))


def pin(settings: PinSettings) -> int:
    """Keep a generation's placement."""
    request = pb.PinRequest(pool=settings.pool, reason=settings.reason)
    if settings.generation:
        request.generation = settings.generation
    return send_pin(settings, request)


def send_pin(settings: OperationSettings, request: pb.PinRequest) -> int:
    """Keep the placement that `request` names or contains.

    Raises:
        BalancerRefusedError: the balancer is unreachable or rejects the request.
    """
    return _report(settings, _send(settings, lambda stub: stub.Pin, request))


def unpin(settings: OperationSettings) -> int:
    """Release the pinned placement."""
    request = pb.UnpinRequest(pool=settings.pool, reason=settings.reason)
    return _report(settings, _send(settings, lambda stub: stub.Unpin, request))


def preview(settings: PreviewSettings) -> int:
    """Show what a plan would do."""
    request = pb.PreviewRequest(
        pool=settings.pool,
        reason=settings.reason,
        policy=settings.policy(),
        algorithm=settings.algorithm or "",
    )
    response = _send(settings, lambda stub: stub.Preview, request)
    status = _report(settings, response)
    if response.HasField("decision") and not settings.json:
        decision = response.decision
        print(
            f"{decision.algorithm} plan: balancedness {decision.balancedness_current:.3f} -> "
            f"{decision.balancedness_proposed:.3f}, "
            f"{format_count(decision.moves, 'move')} ({format_bytes(decision.bytes)}) in "
            f"{format_count(response.num_waves, 'generation')}"
        )
    return status


def _report(settings: OperationSettings, response: Any) -> int:
    """Print an answer; return the exit status."""
    if settings.json:
        document = as_json(response)
        document.pop("layout", None)  # A table for programs that speak the protocol.
        print(json.dumps(document, indent=2))
    else:
        is_preview = isinstance(response, pb.PreviewResponse)
        print(response.outcome.reason if is_preview else _line(response.outcome))
    return 0 if response.outcome.accepted else EXIT_REFUSED


def _rebalance_all(settings: RebalanceSettings) -> int:
    """Plan in every pool; print each pool's answer as it arrives."""
    request = pb.RebalanceAllRequest(reason=settings.reason, force=settings.force)

    def collected(stub: admin_pb2_grpc.AdminStub) -> Callable[..., list[pb.RebalanceAllResponse]]:
        def call(*arguments: Any, **options: Any) -> list[pb.RebalanceAllResponse]:
            answers = []
            for answer in stub.RebalanceAll(*arguments, **options):
                answers.append(answer)
                if not settings.json:
                    unknown = f"unknown: {answer.unanswered}" if answer.unanswered else ""
                    print(f"{answer.pool}: {unknown or _line(answer.outcome)}", flush=True)
            return answers

        return call

    answers = _send(settings, collected, request)
    accepted = sum(answer.outcome.accepted for answer in answers)
    if settings.json:
        print(json.dumps([as_json(answer) for answer in answers], indent=2))
    else:
        print(f"{accepted} of {len(answers)} pools accepted")
    return 0 if accepted == len(answers) else EXIT_REFUSED


def _send(
    settings: OperationSettings,
    method: Callable[[admin_pb2_grpc.AdminStub], Callable[..., _R]],
    request: object,
) -> _R:
    """Send a request to the balancer at the address, or to the leader that it names."""
    try:
        return _send_once(settings, method, request)
    except BalancerRefusedError as error:
        if not error.leader_address or error.leader_address == settings.address:
            raise
        return _send_once(replace(settings, address=error.leader_address), method, request)


def _send_once(
    settings: OperationSettings,
    method: Callable[[admin_pb2_grpc.AdminStub], Callable[..., _R]],
    request: object,
) -> _R:
    credentials = credentials_of(settings.access)
    with (
        credentials.blocking_channel(settings.address) as channel,
        explained(settings.address, credentials),
    ):
        call = method(admin_pb2_grpc.AdminStub(channel))
        try:
            return call(request, timeout=settings.timeout_s, metadata=credentials.metadata())
        except grpc.RpcError as error:
            if "Deadline" not in (error.details() or ""):
                raise  # The balancer was unreachable, or refused.
            raise BalancerRefusedError(
                f"the balancer at {settings.address} did not answer within {settings.timeout_s:g} "
                "s and may still carry the request out: check `equipoise status` before you "
                "repeat it"
            ) from error


def _line(outcome: pb.Outcome) -> str:
    return f"{'done' if outcome.accepted else 'refused'}: {outcome.reason}"
