"""`Worker`: one worker process from its first Hello to its last word.

Starts its servers, listens to the balancer, and stops in order. Before it has a rank it needs the
balancer; afterwards the balancer may be gone for good, as long as the group of ranks holds.
"""

import asyncio
import logging
import socket
import uuid
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from equipoise.planning.layout import Layout
from equipoise.settings.address import parse_address
from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.probes import probe_routes
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.guard import ANYBODY, Guard, Rights
from equipoise.trust.identity import Role
from equipoise.wire.limits import max_request_bytes
from equipoise.wire.messages import (
    Abort,
    BalancerMessage,
    Heartbeat,
    Hello,
    JoinEpoch,
    Refused,
    Rejection,
    Stage,
    Wait,
)
from equipoise.worker.agent import Agent
from equipoise.worker.core import ModelCore
from equipoise.worker.epochs import Epochs
from equipoise.worker.errors import RejectedError, StepError, WorkerError
from equipoise.worker.group import Rendezvous
from equipoise.worker.inference import InferenceService
from equipoise.worker.metrics import WorkerCollector
from equipoise.worker.location import Location, find_location
from equipoise.worker.rank import Rank
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.transfer import ExpertTransferService
from equipoise.worker.waits import Waits
from equipoise_api.v1 import worker_link_pb2, worker_pb2, worker_pb2_grpc
from equipoise_model.device import name_of

STOP_GRACE_S = 0.5
"""Open calls get this long to hear their end."""

LIVE = "live"
"""Name under which health says that the worker runs, whether it has a rank or not."""

_SERVICES = ("", "equipoise_api.v1.ExpertTransfer", "equipoise_api.v1.Inference")
_RIGHTS: Rights = {
    "equipoise_api.v1.ExpertTransfer": frozenset({Role.WORKER}),
    "equipoise_api.v1.Inference": frozenset({Role.GATEWAY}),
    reflection.SERVICE_NAME: frozenset(Role),
    health.SERVICE_NAME: ANYBODY,
}

MAX_CALLS = 4096
"""Calls under way at a time; requests beyond a worker's own line are turned away long before."""

_SERVER_OPTIONS = (
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    # A second worker on the same port must fail, not take half of the calls.
    ("grpc.so_reuseport", 0),
)

_log = logging.getLogger(__name__)


async def serve(
    settings: WorkerSettings, *, stop: asyncio.Event, tracer: Tracer | None = None
) -> None:
    """Run a worker until `stop` is set; `tracer` makes the spans of stages and switches.

    Raises:
        WorkerError: it cannot start, is rejected, or cannot load its experts.
    """
    location = await find_location(settings)
    core = await asyncio.to_thread(ModelCore.load, settings)
    if stop.is_set():
        return
    await Worker(settings, core=core, location=location, tracer=tracer).run(stop)


class Worker:
    """A worker process; used from the event loop only."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        core: ModelCore,
        location: Location,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._core = core
        self._location = location
        self._credentials = Credentials(
            settings.tls,
            token_file=settings.token_file,
            worker_name=settings.tls_worker_name,
            balancer_name=settings.tls_balancer_name,
        )
        self._guard = Guard(
            settings.tls, tokens=settings.tokens, rights=_RIGHTS, pool=settings.pool
        )
        self._boot_id = uuid.uuid4().hex
        self._address = ""
        listener = _listener(parse_address(settings.listen).host, settings.rendezvous_port)
        self._rendezvous_address = f"{settings.advertise_host}:{listener.getsockname()[1]}"
        self._rendezvous = Rendezvous(listener)
        self._rejected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._transfer = ExpertTransferService()
        self._waits = Waits.of(settings)
        self._takes_requests = False
        self._inference = InferenceService(
            vocab_size=core.checkpoint.config.vocab_size, context_length=settings.context_length
        )
        self._agent = Agent(
            addresses=settings.balancer.split(","),
            hello=self._hello,
            heartbeat=self._heartbeat,
            receive=self._receive,
            dropped=self._refuse_dropped,
            running=self._running,
            credentials=self._credentials,
            waits=self._waits,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._epochs = Epochs(
            core=core,
            settings=settings,
            boot_id=self._boot_id,
            transfer=self._transfer,
            inference=self._inference,
            say=self._agent.send,
            serves=self._serves,
            credentials=self._credentials,
            waits=self._waits,
            tracer=tracer,
        )
        self._inference.itl_s = self._epochs.timings.itl_s

    @property
    def address(self) -> str:
        """Announced host:port of this worker's services; empty before it listens."""
        return self._address

    @property
    def rank(self) -> Rank | None:
        """What this worker is in its pool; None before it is assigned and loaded."""
        return self._epochs.rank

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            WorkerError: the balancer rejects this worker, or it cannot load its experts.
        """
        try:
            probes = probe_routes(ready=lambda: self._takes_requests)
            listen = self._settings.metrics_listen
            async with metrics_at(listen, self.collector(), routes=probes):
                await self._run(stop)
        finally:
            self._rendezvous.close()

    def collector(self) -> WorkerCollector:
        """What it tells at /metrics."""
        return WorkerCollector(
            rank=lambda: self._epochs.rank,
            scheduler=self._epochs.scheduler,
            timings=self._epochs.timings,
            waits=self._waits,
        )

    async def _run(self, stop: asyncio.Event) -> None:
        server = await self._listen()
        agent = asyncio.create_task(self._agent.run())
        life = asyncio.create_task(self._epochs.run())
        stopped = asyncio.create_task(stop.wait())
        reason = f"{self._settings.worker} was asked to stop"
        failed_step: StepError | None = None
        try:
            ends: set[asyncio.Future[Any]] = {agent, life, stopped, self._rejected}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if error := task.exception():
                    reason = str(error)
                    failed_step = error if isinstance(error, StepError) else None
                    raise error
            await self._health.enter_graceful_shutdown()
            self._inference.turn_away(reason)
            self._takes_requests = False
            # Said at once, not at the next beat: gateways choose others from here on.
            self._agent.send(self._heartbeat(0))
            await self._drain()
        finally:
            _log.info("stopping: %s", reason)
            stopped.cancel()
            self._rejected.cancel()
            await self._health.enter_graceful_shutdown()
            self._inference.close(reason, failed_step=failed_step)
            self._epochs.end()
            await self._agent.leave(reason)
            agent.cancel()
            life.cancel()
            await asyncio.gather(agent, life, return_exceptions=True)
            await server.stop(STOP_GRACE_S)

    async def _drain(self) -> None:
        """Let the requests here end; if some do not, the last report says so."""
        if await self._inference.drain(timeout_s=self._settings.drain_timeout_s):
            return
        self._waits.note(Wait.DRAIN, f"{self._settings.worker} handed back what it still had")
        if self._epochs.rank is not None:
            self._epochs.rank.report()

    async def _listen(self) -> grpc.aio.Server:
        most_bytes = max_request_bytes(context_length=self._settings.context_length)
        server = grpc.aio.server(
            options=(*_SERVER_OPTIONS, ("grpc.max_receive_message_length", most_bytes)),
            interceptors=[self._guard],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(self._transfer, server)
        worker_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.full_name for service in worker_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        try:
            port = self._credentials.bind(server, self._settings.listen)
        except TrustError:
            raise
        except RuntimeError as error:
            raise WorkerError(
                f"cannot listen on {self._settings.listen}: is the port taken, the host ours?"
            ) from error
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._address = f"{self._settings.advertise_host}:{port}"
        _log.info("%s listens at %s", self._settings.worker, self._address)
        return server

    def _receive(self, message: BalancerMessage) -> None:
        rank = self._epochs.rank
        match message:
            case JoinEpoch():
                self._agent.heartbeat_interval_s = message.heartbeat_interval_s
                self._epochs.join(message)
            case Stage() if rank:
                rank.stager.stage(message)
            case Abort() if rank:
                _log.info("generation %d is dropped: %s", message.generation, message.reason)
                rank.stager.abort(message)
            case Rejection():
                self._receive_rejection(message)
            case _:
                _log.warning("no rank yet: a %s is ignored", type(message).__name__)

    def _running(self) -> Layout | None:
        rank = self._epochs.rank
        return None if rank is None else rank.held.contents.layout

    def _refuse_dropped(self, message: worker_link_pb2.ConnectResponse, reason: str) -> None:
        """Answer a stage that makes no sense, so that its rollout need not wait for a timeout."""
        rank, stage = self._epochs.rank, message.stage
        if rank is not None and message.HasField("stage"):
            self._agent.send(
                Refused(
                    epoch=rank.join_epoch.epoch,
                    rank=rank.join_epoch.rank,
                    generation=stage.change.generation or stage.layout.generation,
                    reason=reason,
                )
            )

    def _receive_rejection(self, rejection: Rejection) -> None:
        """A balancer may close its door at the start; it cannot stop a rank that serves."""
        if rejection.fatal and not self._epochs.has_begun and not self._rejected.done():
            self._rejected.set_exception(
                RejectedError(f"the balancer rejects {self._settings.worker}: {rejection.reason}")
            )
        else:
            _log.warning("the balancer rejects: %s", rejection.reason)

    def _hello(self) -> Hello:
        rank = self._epochs.rank
        if rank is not None:
            rank.stager.drop_unfinished()
        return Hello(
            pool=self._settings.pool,
            worker=self._settings.worker,
            boot_id=self._boot_id,
            node=self._location.node,
            host=self._location.host,
            zone=self._location.zone,
            device=name_of(self._core.device),
            kernels=self._core.operations.kernels,
            backends=self._core.operations.backends,
            cache_token_bytes=self._core.cache.bytes_per_token,
            address=self._address,
            rendezvous_address=self._rendezvous_address,
            model=self._core.shape,
            slots_per_rank=self._settings.slots_per_rank,
            num_ranks=self._settings.num_ranks,
            checkpoint_fingerprint=self._core.checkpoint.fingerprint,
            running=rank.state() if rank else None,
            group_lost=None if rank else self._epochs.lost,
        )

    def _heartbeat(self, sequence: int) -> Heartbeat:
        beat = Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=sequence)
        if self._epochs.rank is not None:
            beat = self._epochs.rank.heartbeat(sequence)
        return replace(beat, draining=self._inference.draining)

    def _serves(self, takes_requests: bool) -> None:
        self._takes_requests = takes_requests and not self._inference.draining
        status = health_pb2.HealthCheckResponse
        serving = status.SERVING if takes_requests else status.NOT_SERVING
        task = asyncio.create_task(self._set_health(serving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in _SERVICES:
            await self._health.set(service, status)


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise WorkerError(
            f"cannot meet ranks at {host}:{port}: is the port taken, the host ours?"
        ) from error
