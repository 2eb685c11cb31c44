"""The balancer's gRPC server: its services, and how it starts and stops."""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from equipoise.balancer.clock import Clock, steady_clock
from equipoise.balancer.errors import BalancerError
from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming
from equipoise.balancer.leadership.register import ALONE, LeaseRegister, SoleRegister
from equipoise.balancer.planner.planning import Planner
from equipoise.balancer.policy_file import PolicyFile
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.seat import Seat
from equipoise.balancer.service.admin_service import AdminService
from equipoise.balancer.service.gateway_link import GatewayLinkService
from equipoise.balancer.service.status_service import StatusService
from equipoise.balancer.service.worker_link import WorkerLinkService
from equipoise.balancer.store.store import Store
from equipoise.balancer.telemetry.http_ports import open_http
from equipoise.policy.book import PolicyBook
from equipoise.settings.address import parse_address
from equipoise.telemetry.health import HealthChecks
from equipoise.telemetry.http import open_listener
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.credentials import ACCEPTED_PINGS, KEEPALIVE_OPTIONS, Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.guard import ANYBODY, Guard, Rights
from equipoise.trust.identity import Role
from equipoise.trust.tokens import BALANCER
from equipoise.wire.limits import MAX_HELLO_BYTES
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gateway_link_pb2,
    gateway_link_pb2_grpc,
    status_pb2,
    worker_link_pb2,
)

_WORKER_LINK = worker_link_pb2.DESCRIPTOR.services_by_name["WorkerLink"].full_name
_GATEWAY_LINK = gateway_link_pb2.DESCRIPTOR.services_by_name["GatewayLink"].full_name
_STATUS = status_pb2.DESCRIPTOR.services_by_name["Status"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

READY = "ready"
"""Health service that shows whether this balancer could accept workers if it led."""

_COMPILING = "compiling the planner, once after an installation: about half a minute"

_READERS = frozenset({Role.READER, Role.GATEWAY, Role.ADMIN})
_RIGHTS: Rights = {
    _WORKER_LINK: frozenset({Role.WORKER}),
    _GATEWAY_LINK: frozenset({Role.GATEWAY}),
    _STATUS: _READERS,
    _ADMIN: frozenset({Role.ADMIN}),
    # The API is no secret, but callers must authenticate.
    reflection.SERVICE_NAME: frozenset(Role),
    health.SERVICE_NAME: ANYBODY,
}

MAX_CALLS = 20_000
"""Concurrent calls, a stream for each of 10,000 workers and watchers; more are rejected."""

_OPTIONS = (
    # The longest message of a worker, its Hello; others are checked against that.
    ("grpc.max_receive_message_length", MAX_HELLO_BYTES),
    # A worker needs one stream; more streams on a connection wait.
    ("grpc.max_concurrent_streams", 64),
    # gRPC's asyncio server accepts one call in each iteration of the event loop. With the defaults,
    # it would reject most of a fleet that connects at once, and cancel calls after half a minute.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ("grpc.server_max_unrequested_time_in_server", 120),
    ("grpc.max_metadata_size", 16 * 1024),
    # Two balancers on one port would split its workers at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    *ACCEPTED_PINGS,
)

_log = logging.getLogger(__name__)


def _ignore(_: str) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerParts:
    """The parts of a balancer. The code that opened a part closes it."""

    store: Store
    """What outlives the balancer."""

    policies: PolicyBook
    """Policies in force."""

    planner: Planner
    """Makes plans."""

    tracer: Tracer
    """Makes the spans of plans and rollouts."""

    listen: str
    """host:port of the gRPC server; port 0 takes a free one."""

    term_offset: int
    """See `Candidate`."""

    drain_timeout_s: float
    """Seconds that open calls may take to end at the stop."""

    credentials: Credentials
    """Certificates of the gRPC port."""

    accepted_keys: str = ""
    """File of the public keys of callers; without it no tokens are required."""

    advertise: str = ""
    """host:port by which others reach this balancer; `listen` if empty."""

    metrics: MetricsPort = field(default_factory=MetricsPort)
    """The port of the metrics; none by default."""

    probes_listen: str = ""
    """host:port of HTTP probes; none if empty."""

    on_metrics: Callable[[str], None] = _ignore
    """Called with the host:port of the metrics."""

    web_listen: str = ""
    """host:port of the page, which may be that of the metrics; none if empty."""

    register: LeaseRegister | None = None
    """Where balancers elect a leader; without it this one leads."""

    timing: LeaseTiming = ALONE
    """Timing of the election."""

    policy_file: Path | None = None
    """Policy file to follow."""

    on_rejection: Callable[[str], Awaitable[None]] | None = None
    """Called with the reason when a policy file is rejected."""

    warm_up: Callable[[], Awaitable[None]] | None = None
    """Compiles the planner; until it ends the balancer is not ready."""


@asynccontextmanager
async def serving(parts: BalancerParts) -> AsyncIterator[int]:
    """Serve inside the block; gives the port.

    Of the balancers that share a register one leads at a time. When the block begins it is clear
    whether this one does, unless it is not ready then.

    It answers requests at once, but accepts no workers, and does not want to lead, before `warm_up`
    has ended and the policy file was good. Until then the health of `ready` is NOT_SERVING, and
    ListPools reports why.

    Raises:
        BalancerError: the port cannot be listened on.
        TrustError: the port would be open to other machines, or the accepted keys are not valid.
        TelemetryError: the port of the metrics, or of the page, cannot be listened on.
        StoreError: the store cannot be read.
    """
    clock, readiness = steady_clock(), Readiness()
    guard = Guard(
        parts.credentials.tls,
        accepted_keys=parts.accepted_keys,
        audience=BALANCER,
        rights=_RIGHTS,
    )
    server = grpc.aio.server(
        options=_OPTIONS, interceptors=[guard], maximum_concurrent_rpcs=MAX_CALLS
    )
    port = _bind(server, parts.listen, parts.credentials)
    address = f"{parse_address(parts.listen).host}:{port}"
    elector = await _elector(parts, address)
    seat = Seat(
        store=parts.store,
        policies=parts.policies,
        clock=clock,
        elector=elector,
        readiness=readiness,
        planner=parts.planner,
        tracer=parts.tracer,
    )
    checks = _add_services(server, seat, store=parts.store, clock=clock, guard=guard)
    await seat.open()
    async with AsyncExitStack() as running:
        await _prepare(running, parts, readiness=readiness, clock=clock)
        _run(running, _take_part(seat, elector))
        if not readiness.missing:
            await seat.until_settled()
        await server.start()
        try:
            await checks.set(_STATUS, health_pb2.HealthCheckResponse.SERVING)
            _log.info("listening on %s", address)
            _run(running, _show_readiness(readiness, checks))
            _run(running, _show_leadership(seat, checks))
            metrics_at = await open_http(
                running,
                seat,
                store=parts.store,
                clock=clock,
                readiness=readiness,
                credentials=parts.credentials,
                metrics=parts.metrics,
                probes_listen=parts.probes_listen,
                web_listen=parts.web_listen,
            )
            parts.on_metrics(metrics_at)
            yield port
        finally:
            # Shielded, because a second Ctrl-C must not leave the stop half done.
            await asyncio.shield(_stop(server, seat, checks, parts.drain_timeout_s))


async def _elector(parts: BalancerParts, address: str) -> Elector:
    """This process as a candidate, under a unique name."""
    return Elector(
        parts.register or SoleRegister(term=await parts.store.highest_term()),
        candidate=Candidate(
            name=f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}",
            address=parts.advertise or address,
            term_offset=parts.term_offset,
        ),
        timing=parts.timing,
    )


async def _prepare(
    running: AsyncExitStack, parts: BalancerParts, *, readiness: Readiness, clock: Clock
) -> None:
    """Read the policy file and follow it, and begin to compile the planner."""
    if parts.policy_file is not None:
        file = PolicyFile(
            parts.policy_file,
            book=parts.policies,
            readiness=readiness,
            clock=clock,
            on_rejection=parts.on_rejection,
        )
        await file.look()
        _run(running, file.run())
    if parts.warm_up is not None:
        readiness.note("planner", _COMPILING)
        _run(running, _compile(parts.warm_up, readiness))


def _add_services(
    server: grpc.aio.Server, seat: Seat, *, store: Store, clock: Clock, guard: Guard
) -> HealthChecks:
    """Add the services; returns the health service."""
    server.add_generic_rpc_handlers((WorkerLinkService(seat, caller=guard.caller).handler(),))
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLinkService(seat), server)
    StatusService(seat, store=store, clock=clock).add_to(server)
    admin_pb2_grpc.add_AdminServicer_to_server(
        AdminService(seat, store=store, caller=lambda context: str(guard.caller(context))),
        server,
    )
    checks = HealthChecks()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection(
        (
            _WORKER_LINK,
            _GATEWAY_LINK,
            _STATUS,
            _ADMIN,
            health.SERVICE_NAME,
            reflection.SERVICE_NAME,
        ),
        server,
    )
    return checks


def _bind(server: grpc.aio.Server, listen: str, credentials: Credentials) -> int:
    try:
        # Tried with a plain socket first: gRPC reports less, and in a log line of its own.
        open_listener(listen).close()
        return credentials.bind(server, listen)
    except TrustError:
        raise
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BalancerError(
            f"cannot listen on {listen}: {why}; choose another address with --listen"
        ) from error


def _run(running: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run a task until the stack closes."""
    running.push_async_callback(_cancel, asyncio.create_task(work))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _take_part(seat: Seat, elector: Elector) -> None:
    await seat.look_on()
    async with elector.running():
        await seat.run()


async def _compile(warm_up: Callable[[], Awaitable[None]], readiness: Readiness) -> None:
    """Compile the planner, or load it from the cache, before workers depend on it.

    The compiler holds a lock that the event loop would wait for while serving.
    """
    try:
        await warm_up()
    except Exception:  # noqa: BLE001 - each plan reports it again
        _log.exception("the planner could not be compiled")
    readiness.note("planner", "")


async def _show_readiness(readiness: Readiness, checks: HealthChecks) -> None:
    """Keep the health of `ready` current."""
    status = health_pb2.HealthCheckResponse
    if readiness.missing:
        _log.info("not ready: %s", readiness.missing)
        await checks.set(READY, status.NOT_SERVING)
        await readiness.until_ready()
        _log.info("ready")
    await checks.set(READY, status.SERVING)


async def _show_leadership(seat: Seat, checks: HealthChecks) -> None:
    """Keep the health of WorkerLink current: only a leader that has its pools accepts workers."""
    status = health_pb2.HealthCheckResponse
    while True:
        led = seat.led
        shown = status.NOT_SERVING if led is None else status.SERVING
        await checks.set(_WORKER_LINK, shown)
        await seat.until_led_differs(led)


async def _stop(server: grpc.aio.Server, seat: Seat, checks: HealthChecks, grace_s: float) -> None:
    await checks.enter_graceful_shutdown()
    stopping = asyncio.create_task(server.stop(grace_s))
    await asyncio.sleep(0)  # From here on no new stream is accepted.
    seat.close_streams()
    await stopping
