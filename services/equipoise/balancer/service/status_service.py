"""The Status service: read-only, and never waits for a worker."""

import asyncio
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from equipoise.balancer.clock import Clock
from equipoise.balancer.errors import UnknownPoolError
from equipoise.balancer.failures import Failures
from equipoise.balancer.pools import PoolView
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.status import (
    decision_to_proto,
    layout_response,
    loads_response,
    pool_status,
    pool_summaries,
)
from equipoise.balancer.service.watchers import MAX_WATCHERS, Watchers
from equipoise.balancer.store.store import (
    MAX_DECISIONS,
    Store,
    StoreError,
    UnreadablePoolError,
)
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise_api.v1 import status_pb2 as pb
from equipoise_api.v1 import status_pb2_grpc as pb_grpc

DEFAULT_WATCH_INTERVAL_S = 0.5
"""Default least time between two messages of a watch."""

WATCH_WRITE_TIMEOUT_S = 30.0
"""A watcher that reads nothing for this long is dropped."""

DEFAULT_DECISIONS = 20
"""Decisions listed without a limit."""

LEADER_METADATA = "equipoise-leader"
"""Trailing metadata of a follower's answers: host:port of the balancer that leads."""

_SERVICE = pb.DESCRIPTOR.services_by_name["Status"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class StatusService(pb_grpc.StatusServicer):
    """Answers from memory; older layouts and decisions come from the store."""

    def __init__(self, seat: Seat, *, store: Store, clock: Clock) -> None:
        self._seat = seat
        self._store = store
        self._clock = clock
        self._watchers = Watchers(self._status)
        self._failures = Failures("the summary")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service; responses of WatchStatus are bytes, encoded once for all."""
        pb_grpc.add_StatusServicer_to_server(self, server)
        watch = grpc.unary_stream_rpc_method_handler(
            self.WatchStatus, request_deserializer=pb.WatchStatusRequest.FromString
        )
        server.add_registered_method_handlers(  # type: ignore[attr-defined]  # not in its stubs
            _SERVICE, {"WatchStatus": watch}
        )

    async def ListPools(  # noqa: N802 - the contract's name
        self, request: pb.ListPoolsRequest, context: _Context
    ) -> pb.ListPoolsResponse:
        """All pools, sorted by name."""
        del request
        self._name_leader(context)
        return pb.ListPoolsResponse(
            pools=pool_summaries(self._seat.pools, self._failures), not_ready=self._seat.not_ready
        )

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: _Context
    ) -> pb.GetStatusResponse:
        """The whole state of one pool."""
        runner = await self._find(request.pool, context)
        return pb.GetStatusResponse(status=self._status(runner))

    async def WatchStatus(  # type: ignore[override]  # noqa: N802
        self, request: pb.WatchStatusRequest, context: _Context
    ) -> None:
        """The state now, and again after each change, at the watcher's own pace."""
        runner = await self._find(request.pool, context)
        interval_s = request.min_interval_s or DEFAULT_WATCH_INTERVAL_S
        try:
            checks.duration_s("watch", "min_interval_s", interval_s)
        except InvalidMessageError as error:
            await _reject(context, str(error))
        if self._watchers.are_full:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this balancer has {MAX_WATCHERS} watchers, its maximum: call GetStatus, or watch "
                "later",
            )
        with self._watchers.joined(runner) as audience, suppress(TimeoutError):
            revision = -1
            while True:
                await audience.newer(revision)
                if runner.closed:
                    return
                revision = audience.revision
                async with asyncio.timeout(WATCH_WRITE_TIMEOUT_S):
                    await context.write(audience.message)
                await asyncio.sleep(interval_s)

    async def GetLayout(  # noqa: N802
        self, request: pb.GetLayoutRequest, context: _Context
    ) -> pb.GetLayoutResponse:
        """The committed layout, or another one that the store still keeps."""
        runner = await self._find(request.pool, context)
        pool = runner.pool
        if request.generation == 0:
            layout = pool.layouts.committed
        else:
            try:
                generation = checks.count("layout", "generation", request.generation)
                layout = await self._store.layout(pool.name, generation)
            except InvalidMessageError as error:
                await _reject(context, str(error))
            except StoreError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if layout is None:
            wanted = f"generation {request.generation}" if request.generation else "layout yet"
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"pool {pool.name} has no {wanted}; its next is {pool.layouts.next_generation}",
            )
        return layout_response(pool, layout)

    async def GetLoads(  # noqa: N802
        self, request: pb.GetLoadsRequest, context: _Context
    ) -> pb.GetLoadsResponse:
        """Both averages and the latest window, by logical expert."""
        runner = await self._find(request.pool, context)
        response = loads_response(runner.pool)
        if response is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"pool {runner.pool.name} has no loads yet: {runner.pool.diagnosis().reason}",
            )
        return response

    async def ListDecisions(  # noqa: N802
        self, request: pb.ListDecisionsRequest, context: _Context
    ) -> pb.ListDecisionsResponse:
        """Decisions, newest first."""
        runner = await self._find(request.pool, context)
        if request.limit > MAX_DECISIONS:
            await _reject(context, f"limit must be at most {MAX_DECISIONS}, not {request.limit}")
        try:
            decisions = await self._store.decisions(
                runner.pool.name, limit=request.limit or DEFAULT_DECISIONS
            )
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.ListDecisionsResponse(
            decisions=[decision_to_proto(decision) for decision in decisions]
        )

    def _status(self, runner: PoolView) -> pb.PoolStatus:
        return pool_status(
            runner.pool,
            now=self._clock(),
            election=self._seat.timeouts,
            redundancy=runner.redundancy,
        )

    async def _find(self, name: str, context: _Context) -> PoolView:
        self._name_leader(context)
        try:
            return self._seat.pools.find(name)
        except UnknownPoolError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except UnreadablePoolError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))

    def _name_leader(self, context: _Context) -> None:
        """Name the leader in every answer of a follower."""
        if self._seat.leader_address:
            context.set_trailing_metadata(((LEADER_METADATA, self._seat.leader_address),))


async def _reject(context: _Context, reason: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
