"""`Worker`: one worker process, from its first Hello to its Leaving.

It starts the servers, handles the balancer's messages, and shuts down in order. Until it has a rank
it needs the balancer; afterwards it serves without one, as long as the group of ranks holds.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from equipoise.planning.layout import Layout
from equipoise.planning.moves import checksums_digest
from equipoise.rank.agent import Agent, Outbox
from equipoise.rank.errors import WorkerError
from equipoise.rank.transfer import ExpertTransferService
from equipoise.settings.address import parse_address
from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.probes import probes_at
from equipoise.trust.credentials import MAX_RANK_CALLS, RANK_PORT_OPTIONS, Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.guard import ANYBODY, Guard, Rights
from equipoise.trust.https import metrics_https
from equipoise.trust.identity import Role
from equipoise.trust.metrics import CertificateCollector
from equipoise.trust.tokens import worker_audience
from equipoise.wire.balancer_messages import Abort, BalancerMessage, JoinEpoch, Rejection, Stage
from equipoise.wire.limits import max_request_bytes
from equipoise.wire.messages import Heartbeat, Hello, LayoutRejected, Wait
from equipoise.worker.core import ModelCore
from equipoise.worker.epochs import Epochs
from equipoise.worker.errors import RejectedError, StepError
from equipoise.worker.grammar_compiler import GrammarCompiler
from equipoise.worker.group import Rendezvous
from equipoise.worker.health import WorkerHealth
from equipoise.worker.inference import InferenceService
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.latents.service import LatentTransferService
from equipoise.worker.latents.store import LatentStore
from equipoise.worker.loading import load_core
from equipoise.worker.location import Location, find_location
from equipoise.worker.metrics import WorkerCollector
from equipoise.worker.parts import WorkerParts
from equipoise.worker.profile import StepProfiler
from equipoise.worker.rank import Rank
from equipoise.worker.reading import CheckpointReader
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.waits import waits_of
from equipoise_api.v1 import worker_link_pb2, worker_pb2, worker_pb2_grpc
from equipoise_model.device import name_of

STOP_GRACE_S = 0.5
"""How long open calls get to deliver their last message."""

_LATENTS = "equipoise_api.v1.LatentTransfer"

_RIGHTS: Rights = {
    "equipoise_api.v1.ExpertTransfer": frozenset({Role.WORKER}),
    "equipoise_api.v1.Inference": frozenset({Role.GATEWAY}),
    _LATENTS: frozenset({Role.WORKER}),
    f"{_LATENTS}/Release": frozenset({Role.WORKER, Role.GATEWAY}),
    reflection.SERVICE_NAME: frozenset(Role),
    health.SERVICE_NAME: ANYBODY,
}

_log = logging.getLogger(__name__)


async def serve(
    settings: WorkerSettings,
    *,
    stop: asyncio.Event,
    tracer: Tracer | None = None,
    on_start: Callable[["Worker"], None] | None = None,
) -> None:
    """Run a worker until `stop` is set; `tracer` records stages and switches.

    `on_start` is called with the worker before it runs.

    Raises:
        WorkerError: it cannot start, is rejected, or cannot load its experts.
    """
    location = await find_location(settings)
    core = await load_core(settings, stop)
    if core is None:
        return
    worker = Worker(settings, core=core, location=location, tracer=tracer)
    if on_start is not None:
        on_start(worker)
    await worker.run(stop)


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
        self._guard = Guard(
            settings.tls,
            accepted_keys=settings.accepted_keys,
            audience=worker_audience(settings.pool, settings.worker),
            rights=_RIGHTS,
            pool=settings.pool,
            peer_pools=settings.peer_pools,
            for_peers=(_LATENTS,),
        )
        self.address = ""
        """Advertised host:port of this worker's services; empty before it listens."""
        listener = _listener(parse_address(settings.listen).host, settings.rendezvous_port)
        self._rendezvous_address = f"{settings.advertise_host}:{listener.getsockname()[1]}"
        self._rendezvous = Rendezvous(listener)
        self._rejected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox = Outbox()
        timings, waits, boot_id = Timings(), waits_of(settings), uuid.uuid4().hex
        credentials = Credentials(
            settings.tls,
            signing_key=settings.signing_key,
            worker_name=settings.tls_worker_name,
            balancer_name=settings.tls_balancer_name,
        )
        store = LatentStore(cache=core.cache, form=core.latent_form(settings), boot_id=boot_id)
        puller = LatentPuller(
            store,
            peer_pools=settings.peer_pools,
            credentials=credentials,
            waits=waits,
            bytes_per_s=settings.latent_mib_per_s * 2**20,
        )
        inference = InferenceService(
            vocab_size=core.checkpoint.config.vocab_size,
            context_length=settings.context_length,
            itl_s=timings.itl_s,
            boot_id=boot_id,
            latents=puller,
            grammars=GrammarCompiler(
                settings.checkpoint, vocab_size=core.checkpoint.config.vocab_size
            ),
        )
        self._parts = WorkerParts(
            settings=settings,
            boot_id=boot_id,
            core=core,
            scheduler=core.scheduler(settings),
            inference=inference,
            latents=LatentTransferService(store, visit=inference.visit, caller=self._guard.caller),
            latent_puller=puller,
            reader=CheckpointReader(core.checkpoint.read_expert, waits=waits),
            transfer=ExpertTransferService(caller=self._guard.caller),
            health=WorkerHealth(),
            credentials=credentials,
            send=self._outbox.send,
            waits=waits,
            timings=timings,
            spans=RankSpans(tracer, pool=settings.pool, worker=settings.worker),
            profiler=StepProfiler.of(settings, device=core.device),
        )
        self._epochs = Epochs(self._parts)
        self._agent = Agent(
            addresses=settings.balancer.split(","),
            handler=self,
            outbox=self._outbox,
            credentials=self._parts.credentials,
            waits=self._parts.waits,
        )

    @property
    def rank(self) -> Rank | None:
        """This worker's rank; None unless it serves."""
        return self._epochs.rank

    @property
    def runs(self) -> Mapping[str, int]:
        """Rank, epoch and generation, as fields of log lines; empty without a rank."""
        rank = self._epochs.rank
        if rank is None:
            return {}
        epoch = rank.join_epoch
        return {"rank": epoch.rank, "epoch": epoch.epoch, "generation": rank.engine.generation}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            WorkerError: the balancer rejects this worker, or it cannot load its experts.
        """
        try:
            collector = WorkerCollector(rank=lambda: self._epochs.rank, parts=self._parts)
            certificates = CertificateCollector(self._parts.credentials)
            async with (
                metrics_at(
                    self._settings.metrics,
                    collector,
                    certificates,
                    tls=metrics_https(self._parts.credentials, self._settings.metrics),
                ),
                probes_at(
                    self._settings.probes_listen, ready=lambda: self._parts.health.takes_requests
                ),
            ):
                await self._run(stop)
        finally:
            self._rendezvous.close()

    async def _run(self, stop: asyncio.Event) -> None:
        await self._parts.inference.prepare()
        server = await self._listen()
        agent = asyncio.create_task(self._agent.run())
        life = asyncio.create_task(self._epochs.run())
        stopped = asyncio.create_task(stop.wait())
        reason, failed = f"{self._settings.worker} is shutting down", False
        failed_step: StepError | None = None
        try:
            ends: set[asyncio.Future[Any]] = {agent, life, stopped, self._rejected}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if error := task.exception():
                    reason, failed = str(error), True
                    failed_step = error if isinstance(error, StepError) else None
                    raise error
            await self._parts.health.stop()
            self._parts.inference.draining = reason
            # Sent at once rather than at the next interval, so that gateways choose other ranks.
            self._outbox.send(self.heartbeat(0))
            await self._drain()
        finally:
            _log.info("stopping: %s", reason)
            stopped.cancel()
            self._rejected.cancel()
            await self._parts.health.stop()
            self._parts.inference.close(reason, failed_step=failed_step)
            self._epochs.end()
            await self._agent.leave(reason, failed=failed)
            agent.cancel()
            life.cancel()
            await asyncio.gather(agent, life, return_exceptions=True)
            await server.stop(STOP_GRACE_S)

    async def _drain(self) -> None:
        """Wait for open requests to end, then for latents to be fetched.

        A timeout of the former appears in the last report.
        """
        if not await self._parts.inference.drain(timeout_s=self._settings.drain_timeout_s):
            self._parts.waits.note(
                Wait.DRAIN, f"{self._settings.worker} returned its open requests to the gateways"
            )
            if self._epochs.rank is not None:
                self._epochs.rank.reporter.send_now()
        await self._parts.latents.drain(timeout_s=self._settings.hold_s)

    async def _listen(self) -> grpc.aio.Server:
        max_bytes = max_request_bytes(context_length=self._settings.context_length)
        server = grpc.aio.server(
            options=(*RANK_PORT_OPTIONS, ("grpc.max_receive_message_length", max_bytes)),
            interceptors=[self._guard],
            maximum_concurrent_rpcs=MAX_RANK_CALLS,
        )
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(self._parts.transfer, server)
        worker_pb2_grpc.add_LatentTransferServicer_to_server(self._parts.latents, server)
        worker_pb2_grpc.add_InferenceServicer_to_server(self._parts.inference, server)
        await self._parts.health.serve_on(server)
        names = [service.full_name for service in worker_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        try:
            port = self._parts.credentials.bind(server, self._settings.listen)
        except TrustError:
            raise
        except RuntimeError as error:
            raise WorkerError(
                f"cannot listen on {self._settings.listen}: is the port in use, or the address not "
                "local?"
            ) from error
        await server.start()
        self.address = f"{self._settings.advertise_host}:{port}"
        _log.info("%s listens on %s", self._settings.worker, self.address)
        return server

    # The LinkHandler of the agent.

    def receive(self, message: BalancerMessage) -> None:
        """Handle a message of the leading balancer."""
        rank = self._epochs.rank
        match message:
            case JoinEpoch():
                self._epochs.join(message)
            case Stage() if rank:
                rank.stager.stage(message)
            case Abort() if rank:
                _log.info("generation %d is aborted: %s", message.generation, message.reason)
                rank.stager.abort(message)
            case Rejection():
                self._receive_rejection(message)
            case _:
                _log.warning("ignored a %s: this worker has no rank", type(message).__name__)

    def running(self) -> Layout | None:
        """Return the layout in use."""
        rank = self._epochs.rank
        return None if rank is None else rank.held.contents.layout

    def message_dropped(self, message: worker_link_pb2.ConnectResponse, reason: str) -> None:
        """Reject a dropped Stage, so that its rollout need not wait for a timeout."""
        rank, stage = self._epochs.rank, message.stage
        if rank is not None and message.HasField("stage"):
            self._outbox.send(
                LayoutRejected(
                    epoch=rank.join_epoch.epoch,
                    rank=rank.join_epoch.rank,
                    generation=stage.change.generation or stage.layout.generation,
                    reason=reason,
                )
            )

    def hello(self) -> Hello:
        """Return this worker's state; a generation that is not staged yet is dropped."""
        rank = self._epochs.rank
        if rank is not None:
            rank.stager.drop_unfinished()
        return Hello(
            pool=self._settings.pool,
            worker=self._settings.worker,
            boot_id=self._parts.boot_id,
            node=self._location.node,
            host=self._location.host,
            zone=self._location.zone,
            device=name_of(self._core.device),
            kernels=self._core.operations.kernels,
            backends=self._core.operations.backends,
            cache_token_bytes=self._core.cache.bytes_per_token,
            phase=self._settings.phase,
            latent_form=self._core.latent_form(self._settings),
            block_tokens=self._core.cache.block_tokens,
            address=self.address,
            rendezvous_address=self._rendezvous_address,
            model=self._core.shape,
            slots_per_rank=self._settings.slots_per_rank,
            num_places=self._settings.places,
            num_ranks=self._settings.num_ranks,
            checkpoint_fingerprint=self._core.checkpoint.fingerprint,
            experts_digest=checksums_digest(self._core.payload_checksums),
            running=rank.state() if rank else None,
            group_lost=None if rank else self._epochs.state.lost,
            highest_epoch=self._epochs.state.highest_epoch,
            highest_generation=self._epochs.highest_generation,
        )

    def heartbeat(self, sequence: int) -> Heartbeat:
        """Return this worker's heartbeat."""
        beat = Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=sequence)
        if self._epochs.rank is not None:
            beat = self._epochs.rank.heartbeat(sequence)
        return replace(beat, draining=bool(self._parts.inference.draining))

    def _receive_rejection(self, rejection: Rejection) -> None:
        """Stop if rejected before the first epoch; a balancer cannot stop a rank that serves."""
        if rejection.fatal and not self._epochs.state.has_begun and not self._rejected.done():
            self._rejected.set_exception(
                RejectedError(f"the balancer rejects {self._settings.worker}: {rejection.reason}")
            )
        else:
            _log.warning("the balancer rejects this worker: %s", rejection.reason)


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise WorkerError(
            f"cannot open the rendezvous port {host}:{port}: is it in use, or the address not "
            "local?"
        ) from error
