"""The balancer's gRPC server: which services it has, and how it starts and stops."""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from equipoise.balancer.admin_service import AdminService
from equipoise.balancer.errors import BalancerError
from equipoise.balancer.leadership import Candidate, LeaseTiming
from equipoise.balancer.lease_elector import Elector
from equipoise.balancer.lease_register import ALONE, LeaseRegister, SoleRegister
from equipoise.balancer.metrics import BalancerCollector
from equipoise.balancer.runner import steady_clock
from equipoise.balancer.seat import Seat
from equipoise.balancer.status_service import StatusService
from equipoise.balancer.store import Store
from equipoise.balancer.worker_link import WorkerLinkService
from equipoise.planning.policy import Policy
from equipoise.telemetry.exposition import metrics_route, registry_of, serving_http
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_link_pb2,
    worker_link_pb2_grpc,
)

_WORKER_LINK = worker_link_pb2.DESCRIPTOR.services_by_name["WorkerLink"].full_name
_STATUS = status_pb2.DESCRIPTOR.services_by_name["Status"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

_OPTIONS = (
    # Two balancers on one port would share its workers by chance; the second must fail instead.
    ("grpc.so_reuseport", 0),
    # A peer whose machine vanished is noticed within 15 s although its stream is idle.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Workers may ping as often as every second; more often is refused as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

_HealthServicer = health.aio.HealthServicer  # type: ignore[attr-defined]  # not in its stubs

_log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(
    store: Store,
    *,
    listen: str,
    policy: Policy,
    stop_grace_s: float,
    advertise: str = "",
    metrics_listen: str = "",
    metrics_heard: Callable[[str], None] | None = None,
    register: LeaseRegister | None = None,
    timing: LeaseTiming = ALONE,
) -> AsyncIterator[int]:
    """Serve on `listen` (host:port) inside the block; gives the port, which is new for port 0.

    Among balancers that share `register` one leads at a time, which the others know by `advertise`
    (host:port, that of `listen` if empty). Without a register this one leads. When the block
    begins it is clear whether it does. Metrics are told at `metrics_listen`, if that is given;
    `metrics_heard` is told the host:port.

    Raises:
        BalancerError: the port cannot be listened on.
        TelemetryError: that of the metrics cannot.
        StoreError: the store cannot be read.
    """
    clock = steady_clock()
    server = grpc.aio.server(options=_OPTIONS)
    port = _bind(server, listen)
    host = listen.rpartition(":")[0]
    elector = Elector(
        register or SoleRegister(term=await store.highest_term()),
        candidate=Candidate(
            name=f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}",
            address=advertise or f"{host}:{port}",
        ),
        timing=timing,
    )
    seat = Seat(store=store, policy=policy, clock=clock, elector=elector)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLinkService(seat), server)
    status_pb2_grpc.add_StatusServicer_to_server(
        StatusService(seat, store=store, clock=clock), server
    )
    admin_pb2_grpc.add_AdminServicer_to_server(
        AdminService(seat, store=store, caller=lambda context: f"somebody at {context.peer()}"),
        server,
    )
    watched = _HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(watched, server)
    reflection.enable_server_reflection(
        (_WORKER_LINK, _STATUS, _ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    await seat.open()
    async with elector.running(), _background(seat.run()):
        await seat.until_settled()
        await server.start()
        await watched.set(_STATUS, health_pb2.HealthCheckResponse.SERVING)
        _log.info("listening on %s:%d", host, port)
        async with (
            _background(_show_leadership(elector, watched)),
            _metrics(BalancerCollector(seat, clock=clock), listen=metrics_listen) as metrics_at,
        ):
            if metrics_heard is not None:
                metrics_heard(metrics_at)
            try:
                yield port
            finally:
                # Shielded, because a second Ctrl-C must not leave the stop half done.
                await asyncio.shield(_stop(server, seat, watched, stop_grace_s))


def _metrics(collector: BalancerCollector, *, listen: str) -> AbstractAsyncContextManager[str]:
    """The HTTP server of metrics, if one is wanted."""
    if not listen:
        return nullcontext("")
    return serving_http([metrics_route(registry_of(collector))], listen=listen)


def _bind(server: grpc.aio.Server, listen: str) -> int:
    try:
        # Tried with a plain socket first: gRPC would say less, and in a log line of its own.
        _try_to_listen(listen)
        return server.add_insecure_port(listen)
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BalancerError(
            f"cannot listen on {listen}: {why}; choose another address with --listen"
        ) from error


def _try_to_listen(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    socket.create_server(address[:2], family=family).close()


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _show_leadership(elector: Elector, watched: Any) -> None:
    """Keep the health of WorkerLink true: only a leader takes workers."""
    while True:
        standing = elector.standing
        await watched.set(
            _WORKER_LINK,
            health_pb2.HealthCheckResponse.SERVING
            if elector.leads()
            else health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        await elector.until_changed(standing)


async def _stop(server: grpc.aio.Server, seat: Seat, watched: Any, grace_s: float) -> None:
    await watched.enter_graceful_shutdown()
    stopping = asyncio.create_task(server.stop(grace_s))
    await asyncio.sleep(0)  # From here on no new stream is taken.
    seat.close_streams()
    await stopping
