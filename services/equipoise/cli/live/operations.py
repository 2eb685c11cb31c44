"""`equipoise rebalance`, `pause`, `resume`, `rollback`, `pin`, `unpin`, `preview`: orders.

Owns asking and showing the answer; what can be done is the balancer's decision.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from equipoise.cli.live.access import BalancerRefusedError, explained
from equipoise.cli.live.operation_settings import (
    OrderSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
)
from equipoise.wire.plain import as_json
from equipoise_api.v1 import admin_pb2 as pb
from equipoise_api.v1 import admin_pb2_grpc as pb_grpc

_Answer = TypeVar("_Answer")
_Ask = Callable[[str, Message], Any]
"""Calls a method of the Admin service."""


class ExitStatus(IntEnum):
    """What a script learns without reading (1 is a fault, 2 a wrong option)."""

    DONE = 0
    REFUSED = 3


def rebalance(settings: RebalanceSettings) -> int:
    """Have a plan made now, in one pool or in all."""
    if settings.all_pools:
        return _rebalance_all(settings)
    request = pb.TriggerRebalanceRequest(
        pool=settings.pool, reason=settings.reason, force=settings.force
    )
    return give(settings, "TriggerRebalance", request)


def pause(settings: OrderSettings) -> int:
    """Have no plan adopted until it is resumed."""
    return give(settings, "Pause", pb.PauseRequest(pool=settings.pool, reason=settings.reason))


def resume(settings: OrderSettings) -> int:
    """Have plans adopted again."""
    return give(settings, "Resume", pb.ResumeRequest(pool=settings.pool, reason=settings.reason))


def rollback(settings: RollbackSettings) -> int:
    """Go back to what a generation was."""
    request = pb.RollbackRequest(
        pool=settings.pool,
        reason=settings.reason,
        generation=settings.generation,
        keep_planning=settings.keep_planning,
    )
    return give(settings, "Rollback", request)


def pin(settings: PinSettings) -> int:
    """Keep a placement."""
    request = pb.PinRequest(pool=settings.pool, reason=settings.reason)
    if settings.generation:
        request.generation = settings.generation
    return give(settings, "Pin", request)


def unpin(settings: OrderSettings) -> int:
    """Keep it no longer."""
    return give(settings, "Unpin", pb.UnpinRequest(pool=settings.pool, reason=settings.reason))


def preview(settings: PreviewSettings) -> int:
    """See what a plan would do."""
    request = pb.PreviewRequest(
        pool=settings.pool,
        reason=settings.reason,
        policy=settings.policy(),
        algorithm=settings.algorithm,
    )
    return give(settings, "Preview", request, more=_preview_words)


def give(
    settings: OrderSettings,
    method: str,
    request: Message,
    *,
    more: Callable[[Any], list[str]] = lambda _: [],
) -> int:
    """Give an order to the balancer that leads, and print what it answers.

    Raises:
        BalancerRefusedError: it cannot be asked, or the order makes no sense to it.
    """
    response = _of_leader(settings, lambda ask: ask(method, request))
    if settings.json:
        print(json.dumps(_shown(response), indent=2))
    else:
        for line in (_words(response.outcome), *more(response)):
            print(line)
    return ExitStatus.DONE if response.outcome.accepted else ExitStatus.REFUSED


def _rebalance_all(settings: RebalanceSettings) -> int:
    """Each pool's answer is shown when it comes; `no` from one of them is the exit status."""
    request = pb.RebalanceAllRequest(reason=settings.reason, force=settings.force)

    def shown(ask: _Ask) -> list[pb.RebalanceAllResponse]:
        answers = []
        for answer in ask("RebalanceAll", request):
            answers.append(answer)
            if not settings.json:
                words = (
                    f"unknown: {answer.unanswered}" if answer.unanswered else _words(answer.outcome)
                )
                print(f"{answer.pool}: {words}", flush=True)
        return answers

    answers = _of_leader(settings, shown)
    done = sum(answer.outcome.accepted for answer in answers)
    if settings.json:
        print(json.dumps([as_json(answer) for answer in answers], indent=2))
    else:
        print(f"{done} of {len(answers)} pools change")
    return ExitStatus.DONE if done == len(answers) else ExitStatus.REFUSED


def _of_leader(settings: OrderSettings, use: Callable[[_Ask], _Answer]) -> _Answer:
    """What `use` makes of the answers of the balancer at the address, or of the one it names."""
    try:
        return _called(settings, use)
    except BalancerRefusedError as error:
        if not error.leader_address or error.leader_address == settings.address:
            raise
        return _called(replace(settings, address=error.leader_address), use)


def _called(settings: OrderSettings, use: Callable[[_Ask], _Answer]) -> _Answer:
    credentials = settings.access.credentials()
    with (
        credentials.blocking_channel(settings.address) as channel,
        explained(settings.address, credentials),
    ):
        stub = pb_grpc.AdminStub(channel)

        def ask(method: str, request: Message) -> Any:
            return getattr(stub, method)(
                request, timeout=settings.timeout_s, metadata=credentials.metadata()
            )

        try:
            return use(ask)
        except grpc.RpcError as error:
            if "Deadline" not in (error.details() or ""):
                raise  # It was never reached, or refuses.
            raise BalancerRefusedError(
                f"the balancer at {settings.address} did not answer within {settings.timeout_s:g} "
                "s, and may do it all the same: ask for the status before you repeat it"
            ) from error


def _words(outcome: pb.Outcome) -> str:
    return f"{'done' if outcome.accepted else 'no'}: {outcome.reason}"


def _preview_words(response: pb.PreviewResponse) -> list[str]:
    if not response.HasField("decision"):
        return []
    decision = response.decision
    words = (
        f"{decision.algorithm} plan: balancedness {decision.balancedness_current:.3f} -> "
        f"{decision.balancedness_proposed:.3f}, {decision.moves} moves of "
        f"{decision.bytes / 2**20:.1f} MiB together in {response.num_waves} generations"
    )
    return [words]


def _shown(response: Any) -> dict[str, Any]:
    """The answer in plain values; a planned table is for programs that speak the protocol."""
    shown = as_json(response)
    shown.pop("layout", None)
    return shown
