"""`SimWorker`: the real `Worker` on simulated experts, slots, steps, group and network.

Agent, epochs, joining, staging, transfer, headers, switching and reporting are the product's code.
Only the model's computation, torch.distributed, gRPC's sockets and real time are replaced.
"""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from equipoise.rank.agent import Agent, Outbox
from equipoise.rank.transfer import ExpertTransferService
from equipoise.wire.messages import Heartbeat, Hello, Report, Switched, WorkerMessage
from equipoise.worker.epochs import Epochs
from equipoise.worker.lifecycle import Worker
from equipoise.worker.location import Location
from equipoise.worker.parts import WorkerParts
from equipoise.worker.reading import CheckpointReader
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.waits import waits_of
from equipoise_api.v1 import worker_pb2
from tests.simulation.channel import Channel
from tests.simulation.engine import SimScheduler
from tests.simulation.experts import CPU, SimCheckpoint, SimSlots
from tests.simulation.loop import Process


class SimLatents:
    """In place of the exchange of latents with other pools: requests are not simulated."""

    async def drain(self, *, timeout_s: float) -> None:
        pass


class SimInference:
    """In place of the requests of clients."""

    draining = ""

    async def prepare(self) -> None:
        pass

    def open(self, _engine: Any) -> None:
        pass

    def close(self, _reason: str, *, failed_step: Any = None) -> None:
        pass

    def deliver(self, _result: Any) -> None:
        pass

    async def drain(self, *, timeout_s: float) -> bool:
        await asyncio.sleep(0.2)
        return True


class SimHealth:
    """In place of gRPC health."""

    takes_requests = False

    def set_serving(self, serving: bool) -> None:
        self.takes_requests = serving

    async def stop(self) -> None:
        self.takes_requests = False


class SimCredentials:
    """Channels of the simulated network."""

    def __init__(self, network: Any, process: Process, identity: Any) -> None:
        self._network, self._process, self._identity = network, process, identity

    def worker_channel(self, address: str, **_options: Any) -> Any:
        channel = Channel(self._network, self._process, address)
        channel.identity = self._identity
        return channel

    balancer_channel = worker_channel

    def version(self) -> int:
        return 0

    def metadata(self, **_about: Any) -> tuple[()]:
        return ()

    def explain(self, details: str | None) -> str:
        return details or ""


class SimOperations:
    """Kernels that every worker shares."""

    device = CPU
    kernels = "simulated"
    backends = ()
    announcement = "simulated"
    fp8 = None
    sums_on_nodes = False

    def agree(self, _announcements: Any) -> None:
        pass

    def steps(self, _exchange: Any) -> str:
        return "simulated"


class SimCore:
    """The model of one worker: its slots, and the checkpoint on its disk."""

    device = CPU
    operations = SimOperations()
    model = None
    parity_tokens = 1

    def __init__(self, world: Any, checkpoint: SimCheckpoint, *, slots_per_rank: int) -> None:
        self.world = world
        self.checkpoint = checkpoint
        self.shape = world.shape
        self.payload_checksums = checkpoint.payload_checksums
        filled = partial(world.rot.filled, checkpoint)
        self.slots = [
            SimSlots(slots_per_rank, on_fill=filled) for _ in range(self.shape.num_layers)
        ]
        self.cache = SimpleNamespace(bytes_per_token=1, block_tokens=16)

    def drafter(self, _settings: Any) -> None:
        return None

    def latent_form(self, _settings: Any) -> str:
        return ""

    def scheduler(self, _settings: Any) -> SimScheduler:
        return SimScheduler(self.world)


class _Served:
    """A started server."""

    async def stop(self, _grace_s: float) -> None:
        pass


class SimWorker(Worker):
    """A worker process. Only construction differs, and what it listens with."""

    def __init__(
        self,
        world: Any,
        process: Process,
        settings: WorkerSettings,
        *,
        boot_id: str,
        checkpoint: SimCheckpoint,
    ) -> None:
        self.world, self.process, process.worker = world, process, self
        self._settings = settings
        self._core = SimCore(world, checkpoint, slots_per_rank=settings.slots_per_rank)
        self._location = Location(node=settings.node, host=settings.node, zone="")
        self.address = f"{settings.worker}:{world.port()}"
        self._rendezvous_address = f"{settings.worker}:{world.port()}"
        world.rendezvous.host(process, self._rendezvous_address)
        self._rejected = asyncio.get_running_loop().create_future()
        self._outbox = Outbox()
        credentials = SimCredentials(world.network, process, world.identity(settings))
        waits = waits_of(settings)
        self._parts = WorkerParts(
            settings=settings,
            boot_id=boot_id,
            core=self._core,
            scheduler=self._core.scheduler(settings),
            inference=SimInference(),
            latents=SimLatents(),
            latent_puller=SimLatents(),
            transfer=ExpertTransferService(),
            reader=CheckpointReader(checkpoint.read_expert, waits=waits),
            health=SimHealth(),
            credentials=credentials,
            send=self._send,
            waits=waits,
            timings=Timings(),
            spans=RankSpans(None, pool=settings.pool, worker=settings.worker),
        )
        self._epochs = Epochs(self._parts)
        self._agent = Agent(
            addresses=world.balancer_addresses,
            handler=self,
            outbox=self._outbox,
            credentials=credentials,
            waits=self._parts.waits,
            uniform=world.rng.uniform,
        )

    @property
    def core(self) -> SimCore:
        return self._core

    @property
    def places(self) -> int:
        return self._settings.places

    @property
    def agent(self) -> Agent:
        return self._agent

    @property
    def epochs(self) -> Epochs:
        return self._epochs

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    @property
    def is_answered(self) -> bool:
        """Whether a balancer has answered in the stream that is open."""
        return self._outbox._queue is not None and self._agent._received_s > self._opened_s

    def hello(self) -> Hello:
        self._opened_s = self.world.loop.time()
        return self.world.reports.hello(self, super().hello())

    def heartbeat(self, sequence: int) -> Heartbeat:
        return self.world.reports.heartbeat(self, super().heartbeat(sequence))

    def _send(self, message: WorkerMessage) -> bool:
        if isinstance(message, Report) and self.world.gaps.loses(self.process.name):
            return True
        if isinstance(message, Switched):
            message = self.world.reports.switched(self, message)
        return self._outbox.send(message)

    async def _listen(self) -> Any:
        async def fetch(requests: Any, context: Any) -> None:
            try:
                request = worker_pb2.FetchRequest.FromString(await requests.get())
            except StopAsyncIteration:
                return  # The caller is gone: gRPC starts no handler without its request.
            await self._parts.transfer.Fetch(request, _Serializing(context, self.world))

        self.world.network.listen(self.process, self.address, {"Fetch": fetch})
        return _Served()


class _Serializing:
    def __init__(self, context: Any, world: Any) -> None:
        self._context, self._world = context, world
        self.abort, self.peer = context.abort, context.peer

    async def write(self, message: Any) -> None:
        if self._world.corrupts_transfers:
            self._world.effects.add("corrupt_transfers")
            message.data = bytes((message.data[0] ^ 4,)) + message.data[1:]
        await self._context.write(message.SerializeToString())
