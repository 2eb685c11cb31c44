"""`Worker`: one worker process from its first Hello to its last word.

Waits for a rank, serves as it, and stops in order. Before it has a rank it needs the balancer;
afterwards the balancer may be gone for good.
"""

import asyncio
import logging
import socket
import threading
import uuid
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from equipoise.wire.messages import (
    Abort,
    Assignment,
    BalancerMessage,
    Heartbeat,
    Hello,
    Refused,
    Rejection,
    Stage,
)
from equipoise.worker.agent import Agent
from equipoise.worker.core import ModelCore
from equipoise.worker.errors import RejectedError, WorkerError
from equipoise.worker.inference import InferenceService
from equipoise.worker.rank import Rank, join
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.transfer import ExpertTransferService
from equipoise_api.v1 import worker_link_pb2, worker_pb2, worker_pb2_grpc

STOP_GRACE_S = 0.5
"""Open calls get this long to hear their end."""

_SERVICES = ("", "equipoise_api.v1.ExpertTransfer", "equipoise_api.v1.Inference")
_SERVER_OPTIONS = (
    # A second worker on the same port must fail, not take half of the calls.
    ("grpc.so_reuseport", 0),
)

_log = logging.getLogger(__name__)


async def serve(settings: WorkerSettings, *, stop: asyncio.Event) -> None:
    """Run a worker until `stop` is set.

    Raises:
        WorkerError: it cannot start, is rejected, or its group is broken.
    """
    core = await asyncio.to_thread(ModelCore.load, settings)
    if stop.is_set():
        return
    await Worker(settings, core=core).run(stop)


class Worker:
    """A worker process; used from the event loop only."""

    def __init__(self, settings: WorkerSettings, *, core: ModelCore) -> None:
        self._settings = settings
        self._core = core
        self._boot_id = uuid.uuid4().hex
        self._address = ""
        self._rendezvous = socket.create_server((_host(settings.listen), 0))
        port = self._rendezvous.getsockname()[1]
        self._rendezvous_address = f"{settings.advertise_host}:{port}"
        self._given_up = threading.Event()
        self._assigned: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._rank: Rank | None = None
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._transfer = ExpertTransferService()
        self._inference = InferenceService(
            vocab_size=core.checkpoint.config.vocab_size, context_length=settings.context_length
        )
        self._agent = Agent(
            addresses=settings.balancer.split(","),
            hello=self._hello,
            heartbeat=self._heartbeat,
            receive=self._receive,
            dropped=self._refuse_dropped,
        )

    @property
    def address(self) -> str:
        """Announced host:port of this worker's services; empty before it listens."""
        return self._address

    @property
    def rank(self) -> Rank | None:
        """What this worker is in its pool; None before it is assigned and loaded."""
        return self._rank

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            WorkerError: the balancer rejects this worker, or its group is broken.
        """
        with self._rendezvous:
            await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> None:
        server = await self._listen()
        agent = asyncio.create_task(self._agent.run())
        life = asyncio.create_task(self._live())
        stopped = asyncio.create_task(stop.wait())
        reason = f"{self._settings.worker} was asked to stop"
        try:
            done, _ = await asyncio.wait(
                {agent, life, stopped}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if error := task.exception():
                    reason = str(error)
                    raise error
        finally:
            _log.info("stopping: %s", reason)
            stopped.cancel()
            await self._health.enter_graceful_shutdown()
            self._inference.close(reason)
            self._given_up.set()
            if self._rank is not None:
                self._rank.leave()
            await self._agent.leave(reason)
            agent.cancel()
            life.cancel()
            await asyncio.gather(agent, life, return_exceptions=True)
            await server.stop(STOP_GRACE_S)

    async def _listen(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(self._transfer, server)
        worker_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.full_name for service in worker_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        try:
            port = server.add_insecure_port(self._settings.listen)
        except RuntimeError as error:
            raise WorkerError(
                f"cannot listen on {self._settings.listen}: is the port taken, the host ours?"
            ) from error
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self._address = f"{self._settings.advertise_host}:{port}"
        _log.info("%s listens at %s", self._settings.worker, self._address)
        return server

    async def _live(self) -> None:
        """Get a rank and serve as it until told to leave."""
        assignment = await self._assigned
        self._agent.heartbeat_interval_s = assignment.heartbeat_interval_s
        joined = await asyncio.to_thread(
            join,
            assignment,
            core=self._core,
            settings=self._settings,
            listener=self._rendezvous,
            given_up=self._given_up,
        )
        rank = Rank(
            joined,
            core=self._core,
            settings=self._settings,
            boot_id=self._boot_id,
            say=self._agent.send,
            deliver=self._inference.deliver,
        )
        self._rank = rank
        self._transfer.open(joined.held, epoch=assignment.epoch)
        self._inference.open(rank.engine)
        self._agent.send(rank.serving())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _log.info(
            "rank %d of %d in epoch %d, generation %d",
            assignment.rank,
            len(assignment.peers),
            assignment.epoch,
            assignment.layout.generation,
        )
        await rank.run()

    def _receive(self, message: BalancerMessage) -> None:
        match message:
            case Assignment():
                self._receive_assignment(message)
            case Stage() if self._rank:
                self._rank.applier.stage(message)
            case Abort() if self._rank:
                _log.info("generation %d is dropped: %s", message.generation, message.reason)
                self._rank.applier.abort(message)
            case Rejection():
                self._receive_rejection(message)
            case _:
                _log.warning("no rank yet: a %s is ignored", type(message).__name__)

    def _receive_assignment(self, assignment: Assignment) -> None:
        rank = self._rank
        if not self._assigned.done():
            self._assigned.set_result(assignment)
        elif rank is None:
            _log.info("already joining epoch %d", self._assigned.result().epoch)
        elif rank.same_as(assignment):
            # Said again, because the stream may have broken before the balancer heard it.
            self._agent.send(rank.serving())
            if rank.last_switch is not None:
                self._agent.send(rank.last_switch)
        else:
            state = rank.state()
            reason = (
                f"{self._settings.worker} serves as rank {state.rank} of epoch {state.epoch}: "
                f"restart it to make it rank {assignment.rank} of epoch {assignment.epoch}"
            )
            _log.warning("%s", reason)
            self._agent.send(
                Refused(
                    epoch=assignment.epoch,
                    rank=assignment.rank,
                    generation=assignment.layout.generation,
                    reason=reason,
                )
            )

    def _refuse_dropped(self, message: worker_link_pb2.ConnectResponse, reason: str) -> None:
        """Answer a stage that makes no sense, so that its rollout need not wait for a timeout."""
        if self._rank is not None and message.HasField("stage"):
            self._agent.send(
                Refused(
                    epoch=self._rank.assignment.epoch,
                    rank=self._rank.assignment.rank,
                    generation=message.stage.layout.generation,
                    reason=reason,
                )
            )

    def _receive_rejection(self, rejection: Rejection) -> None:
        """A balancer may close its door at the start; it cannot stop a rank that serves."""
        if rejection.fatal and not self._assigned.done():
            self._assigned.set_exception(
                RejectedError(f"the balancer rejects {self._settings.worker}: {rejection.reason}")
            )
        else:
            _log.warning("the balancer rejects: %s", rejection.reason)

    def _hello(self) -> Hello:
        rank = self._rank
        if rank is not None:
            rank.applier.drop_unfinished()
        return Hello(
            pool=self._settings.pool,
            worker=self._settings.worker,
            boot_id=self._boot_id,
            node=self._settings.node,
            address=self._address,
            rendezvous_address=self._rendezvous_address,
            model=self._core.shape,
            slots_per_rank=self._settings.slots_per_rank,
            num_ranks=self._settings.num_ranks,
            checkpoint_fingerprint=self._core.checkpoint.fingerprint,
            running=rank.state() if rank else None,
        )

    def _heartbeat(self, sequence: int) -> Heartbeat:
        if self._rank is not None:
            return self._rank.heartbeat(sequence)
        return Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=sequence)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in _SERVICES:
            await self._health.set(service, status)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
