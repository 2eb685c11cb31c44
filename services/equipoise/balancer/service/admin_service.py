"""The Admin service: checks operators' requests, hands them to their pool, and answers them.

The pool decides what can be carried out.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

import grpc

from equipoise.balancer.errors import UnansweredError, UnknownPoolError
from equipoise.balancer.pools import MAX_POOLS, Pools
from equipoise.balancer.runner import PoolRunner
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.status import audit_to_proto, decision_to_proto
from equipoise.balancer.service.status_service import LEADER_METADATA
from equipoise.balancer.store.store import (
    MAX_AUDIT_ENTRIES,
    MAX_DECISIONS,
    Store,
    StoreError,
    UnreadablePoolError,
)
from equipoise.planning.errors import InvalidPolicyError
from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal
from equipoise.pool.records import DecisionRecord
from equipoise.pool.requests import (
    Answer,
    Operation,
    Pause,
    Pin,
    Preview,
    Rebalance,
    Resume,
    RollBack,
    Unpin,
)
from equipoise.settings.fields import ranges_of
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.layouts import fields_of, layout_from_proto, layout_to_proto
from equipoise_api.v1 import admin_pb2 as pb
from equipoise_api.v1 import admin_pb2_grpc as pb_grpc

DEFAULT_AUDIT = 20
"""Audit records listed without a limit."""

MAX_REQUESTS_AT_ONCE = 32
"""Requests of one call that wait for their plans: each holds a pool's loads."""

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(pb_grpc.AdminServicer):
    """Only the balancer that leads accepts requests; `caller` authenticates a call."""

    def __init__(self, seat: Seat, *, store: Store, caller: Callable[[_Context], str]) -> None:
        self._seat = seat
        self._store = store
        self._caller = caller

    async def TriggerRebalance(  # noqa: N802 - the contract's name
        self, request: pb.TriggerRebalanceRequest, context: _Context
    ) -> pb.TriggerRebalanceResponse:
        """Plan now, and roll out the plan if it is worth it."""
        runner = await self._find(request.pool, context)
        outcome = await self._ask(runner, *_rebalance(request), request, context)
        return pb.TriggerRebalanceResponse(outcome=_outcome(outcome))

    # A coroutine that writes, not a generator: its cleanup runs as soon as it is cancelled.
    async def RebalanceAll(  # type: ignore[override]  # noqa: N802
        self, request: pb.RebalanceAllRequest, context: _Context
    ) -> None:
        """Plan now in many pools: one call, a request to each."""
        names = dict.fromkeys(request.pools) or (await self._led(context)).names()
        if len(names) > MAX_POOLS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"pools: {len(names)} names, but a balancer has at most {MAX_POOLS} pools",
            )
        runners = [await self._find(name, context) for name in names]
        who, at_once = self._caller(context), asyncio.Semaphore(MAX_REQUESTS_AT_ONCE)

        async def rebalance(runner: PoolRunner) -> pb.RebalanceAllResponse:
            async with at_once:
                try:
                    given = await _administer(runner, *_rebalance(request), request, who=who)
                except UnansweredError as error:
                    return pb.RebalanceAllResponse(pool=runner.pool.name, unanswered=str(error))
            return pb.RebalanceAllResponse(pool=runner.pool.name, outcome=_outcome(given))

        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(rebalance(runner)) for runner in runners]
            for answered in asyncio.as_completed(answers):
                await context.write(await answered)

    async def Pause(  # noqa: N802
        self, request: pb.PauseRequest, context: _Context
    ) -> pb.PauseResponse:
        """Adopt no plans."""
        runner = await self._find(request.pool, context)
        outcome = await self._ask(runner, Pause(), "pause", request, context)
        return pb.PauseResponse(outcome=_outcome(outcome))

    async def Resume(  # noqa: N802
        self, request: pb.ResumeRequest, context: _Context
    ) -> pb.ResumeResponse:
        """Resume planning."""
        runner = await self._find(request.pool, context)
        outcome = await self._ask(runner, Resume(), "resume", request, context)
        return pb.ResumeResponse(outcome=_outcome(outcome))

    async def Rollback(  # noqa: N802
        self, request: pb.RollbackRequest, context: _Context
    ) -> pb.RollbackResponse:
        """Go back to the placement of a generation."""
        runner = await self._find(request.pool, context)
        generation = request.generation or await self._before_latest_plan(runner, context)
        layout = await self._committed(runner, generation, context)
        operation = RollBack(layout=layout, keep_planning=request.keep_planning)
        what = f"roll back to generation {generation}"
        what += " and keep planning" if request.keep_planning else ""
        outcome = await self._ask(runner, operation, what, request, context)
        return pb.RollbackResponse(outcome=_outcome(outcome))

    async def Pin(  # noqa: N802
        self, request: pb.PinRequest, context: _Context
    ) -> pb.PinResponse:
        """Keep a placement."""
        runner = await self._find(request.pool, context)
        operation, what = Pin(), "pin the current layout"
        if request.WhichOneof("target") == "layout":
            try:
                operation = Pin(layout=layout_from_proto(request.layout, kind="pin"))
            except InvalidMessageError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            what = "pin a layout from a file"
        elif request.generation:
            layout = await self._committed(runner, request.generation, context)
            operation = Pin(layout=layout, generation=request.generation)
            what = f"pin generation {request.generation}"
        outcome = await self._ask(runner, operation, what, request, context)
        return pb.PinResponse(outcome=_outcome(outcome))

    async def Unpin(  # noqa: N802
        self, request: pb.UnpinRequest, context: _Context
    ) -> pb.UnpinResponse:
        """End a pin."""
        runner = await self._find(request.pool, context)
        outcome = await self._ask(runner, Unpin(), "unpin", request, context)
        return pb.UnpinResponse(outcome=_outcome(outcome))

    async def Preview(  # noqa: N802
        self, request: pb.PreviewRequest, context: _Context
    ) -> pb.PreviewResponse:
        """Plan, and show the verdict without adopting the plan."""
        runner = await self._find(request.pool, context)
        try:
            policy = changed_policy(runner.pool.policy.values, request.policy, request.algorithm)
        except InvalidPolicyError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        changes = [f"{name} {value:g}" for name, value in sorted(request.policy.items())]
        changes += [f"algorithm {request.algorithm}"] if request.algorithm else []
        what = f"preview with {', '.join(changes)}" if changes else "preview"
        outcome = await self._ask(runner, Preview(policy=policy), what, request, context)
        response = pb.PreviewResponse(outcome=_outcome(outcome))
        if outcome.proposal is not None:
            response.MergeFrom(_preview(outcome.proposal))
        return response

    async def ListAudit(  # noqa: N802
        self, request: pb.ListAuditRequest, context: _Context
    ) -> pb.ListAuditResponse:
        """Audit records, newest first; followers answer too."""
        if request.limit > MAX_AUDIT_ENTRIES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"limit must be at most {MAX_AUDIT_ENTRIES}, not {request.limit}",
            )
        try:
            pool = self._seat.pools.find(request.pool).pool
            entries = await self._store.audit(pool.name, limit=request.limit or DEFAULT_AUDIT)
        except UnknownPoolError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except UnreadablePoolError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.ListAuditResponse(entries=[audit_to_proto(entry) for entry in entries])

    async def _find(self, name: str, context: _Context) -> PoolRunner:
        """The pool; aborts unless this balancer leads."""
        pools = await self._led(context)
        try:
            return pools.find(name)
        except UnknownPoolError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except UnreadablePoolError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))

    async def _led(self, context: _Context) -> Pools:
        """All pools; aborts unless this balancer leads."""
        pools: Pools | None = self._seat.led
        if pools is None:
            if self._seat.leader_address:
                leader = ((LEADER_METADATA, self._seat.leader_address),)
                context.set_trailing_metadata(leader)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._seat.elsewhere)
        return pools

    async def _ask(
        self, runner: PoolRunner, operation: Operation, what: str, request: Any, context: _Context
    ) -> Answer:
        try:
            return await _administer(runner, operation, what, request, who=self._caller(context))
        except UnansweredError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _committed(self, runner: PoolRunner, generation: int, context: _Context) -> Layout:
        """A layout that was committed; aborts if it is not kept."""
        pool = runner.pool.name
        try:
            commits = await self._store.commits(pool)
            layout = await self._store.layout(pool, generation) if generation in commits else None
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if layout is None:
            kept = ", ".join(map(str, commits)) or "none"
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"pool {pool} has no committed generation {generation}; those kept are: {kept}",
            )
        return layout

    async def _before_latest_plan(self, runner: PoolRunner, context: _Context) -> int:
        """The generation from which the latest adopted plan started; aborts without one."""
        pool = runner.pool
        try:
            decisions = await self._store.decisions(pool.name, limit=MAX_DECISIONS)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        now = pool.layouts.stored_generation
        adopted = (decision.base_generation for decision in decisions if decision.accepted)
        before = next((generation for generation in adopted if generation != now), None)
        if before is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"pool {pool.name} has adopted no plan yet: there is nothing to roll back to",
            )
        return before


def changed_policy(policy: Policy, changes: Mapping[str, float], algorithm: str) -> Policy:
    """Return the policy with some numbers changed, and another algorithm unless that is empty.

    Raises:
        InvalidPolicyError: there is no such number, or it is out of range.
    """
    numbers = list(ranges_of(Policy))
    unknown = sorted(set(changes) - set(numbers))
    if unknown:
        raise InvalidPolicyError(
            f"a policy has no number {checks.shorten(unknown[0])}; known numbers: "
            f"{', '.join(numbers)}"
        )
    values: dict[str, Any] = {
        name: round(value) if isinstance(getattr(policy, name), int) and isfinite(value) else value
        for name, value in changes.items()
    }
    if algorithm:
        values["algorithm"] = algorithm
    return replace(policy, **values)


async def _administer(
    runner: PoolRunner, operation: Operation, what: str, request: Any, *, who: str
) -> Answer:
    """Hand a request to its pool.

    Raises:
        UnansweredError: the outcome is unknown.
    """
    reason = checks.reason(request.reason) if request.reason else ""
    return await runner.administer(
        operation, who=who, reason=reason, what=f"{what} ({reason})" if reason else what
    )


def _rebalance(
    request: pb.TriggerRebalanceRequest | pb.RebalanceAllRequest,
) -> tuple[Rebalance, str]:
    """The operation and its description."""
    what = "rebalance with force" if request.force else "rebalance"
    return Rebalance(force=request.force), what


def _outcome(answer: Answer) -> pb.Outcome:
    return pb.Outcome(**fields_of(answer, but=("proposal",)))


def _preview(proposal: Proposal) -> pb.PreviewResponse:
    """The plan of a preview, without the outcome."""
    request, plan = proposal.request, proposal.plan
    last = request.first_generation + max(0, len(proposal.waves) - 1)
    layout = request.current.with_placement(
        plan.expert_of_slot, generation=last, share_of_slot=plan.share_of_slot
    )
    return pb.PreviewResponse(
        decision=decision_to_proto(DecisionRecord.of_proposal(proposal, now=request.now)),
        layout=layout_to_proto(layout),
        num_waves=len(proposal.waves),
    )
