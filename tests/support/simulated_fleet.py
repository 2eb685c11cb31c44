"""Simulated ranks that speak the real worker link: they serve, report, stage and switch.

Run as a process: `python simulated_fleet.py '{...}'` with the fields of `FleetSettings` as JSON.
Each rank has a stream of its own; a connection carries up to 50 of them, in place of one each.
Nothing is computed and no bytes are pulled: Staged is said after a while, and the ranks of a pool
switch as soon as all have staged. What happens is told on stdout, an object a line; seconds are of
the machine's monotonic clock, which the processes of a machine share.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import grpc
import numpy as np

from equipoise.wire.messages import PROTOCOL_VERSION
from equipoise_api.v1 import worker_link_pb2 as pb

CONNECT = "/equipoise_api.v1.WorkerLink/Connect"
STREAMS_A_CONNECTION = 50
CONNECTING_AT_A_TIME = 64
RETRY_S = 2.0
EXPERT_BYTES = 44_000_000
STEP_US = 50_000
STAGING_S = 2.0
"""What pulling a wave of the default policy, 256 MiB, takes at a Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Which pools of how many ranks to play, and how often each rank reports."""

    address: str
    first_pool: int
    num_pools: int
    num_ranks: int
    num_layers: int = 58
    num_experts: int = 256
    slots_per_rank: int = 9
    tokens_per_s: float = 3_000.0
    """Expert assignments of a layer and a rank."""


class SimulatedPool:
    """What the ranks of one pool share: checksums, traffic, and the switch by agreement."""

    def __init__(self, number: int, settings: FleetSettings) -> None:
        self.name = f"pool-{number:04d}"
        self.settings = settings
        random = np.random.default_rng(number)
        shape = (settings.num_layers, settings.num_experts)
        self.checksums = random.integers(0, 256, (*shape, 16), dtype=np.uint8)
        load = random.gamma(0.7, size=shape)
        scale = settings.tokens_per_s * settings.num_ranks
        self.tokens_per_s = load / load.sum(axis=1, keepdims=True) * scale
        self.tables: dict[int, np.ndarray] = {}
        """int32 [layers, slots] by generation, the latest two; all ranks of the pool share them."""
        self._staged: dict[int, int] = {}
        self._all_staged: dict[int, asyncio.Event] = {}

    def start(self, layout: pb.Layout) -> int:
        """Take the layout of an assignment; gives its generation."""
        cells = np.frombuffer(layout.expert_of_slot, dtype="<i4")
        self._keep(layout.generation, cells, shape=(layout.num_layers, layout.num_slots))
        return layout.generation

    def stage(self, stage: pb.Stage) -> int:
        """Take the layout of a stage, told as a whole or as a change; gives its generation."""
        change = stage.change
        if not stage.HasField("change"):
            return self.start(stage.layout)
        base = self.tables[stage.base_generation]
        cells = base.ravel().copy()
        cells[np.frombuffer(change.cells, "<u4")] = np.frombuffer(change.expert_of_cell, "<i4")
        self._keep(change.generation, cells, shape=base.shape)
        return change.generation

    def _keep(self, generation: int, cells: np.ndarray, *, shape: tuple[int, int]) -> None:
        if generation not in self.tables:
            self.tables = dict(list(self.tables.items())[-1:])
            self.tables[generation] = cells.reshape(shape)

    async def until_all_staged(self, generation: int) -> None:
        """Wait until each rank of the pool came here."""
        event = self._all_staged.setdefault(generation, asyncio.Event())
        self._staged[generation] = self._staged.get(generation, 0) + 1
        if self._staged[generation] == self.settings.num_ranks:
            event.set()
        await event.wait()


class SimulatedRank:
    """One worker: its stream, its counters, and the answers to what it is told."""

    def __init__(self, pool: SimulatedPool, number: int, fleet: "Fleet") -> None:
        self._pool, self._number, self._fleet = pool, number, fleet
        self._name = f"{pool.name}-{number:05d}"
        self._epoch = self._rank = self._generation = self._sequence = 0
        self._interval_s = self._began_s = self._first_step_s = 0.0
        self._experts = self._rates = np.zeros((0, 0))
        self._sent_s: dict[int, float] = {}
        self._was_pushed_to = False

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Live until cancelled."""
        connect = channel.stream_stream(
            CONNECT,
            request_serializer=pb.ConnectRequest.SerializeToString,
            response_deserializer=pb.ConnectResponse.FromString,
        )
        while True:
            heard = asyncio.Event()
            async with self._fleet.connecting:
                life = asyncio.create_task(self._live(connect(), heard))
                await heard.wait()
            try:
                await life
            except* grpc.aio.AioRpcError:
                pass  # gRPC itself turns away calls that come faster than they are taken.
            # Like a worker: with a new stream, if the balancer had no time for this one.
            self._fleet.count("turned away")
            await asyncio.sleep(RETRY_S)

    async def _live(self, call, heard: asyncio.Event) -> None:
        try:
            await call.write(pb.ConnectRequest(hello=self._hello()))
            # Its answer says that the stream is there; ranks are told only when all have come.
            await call.write(pb.ConnectRequest(heartbeat=pb.Heartbeat()))
            async with asyncio.TaskGroup() as tasks:
                async for message in call:
                    heard.set()
                    await self._obey(call, message, tasks)
        finally:
            heard.set()
        if self._epoch:
            self._fleet.tell("ended", worker=self._name)

    async def _obey(self, call, message: pb.ConnectResponse, tasks: asyncio.TaskGroup) -> None:
        match message.WhichOneof("message"):
            case "assignment":
                await self._serve(call, message.assignment)
                tasks.create_task(self._report(call))
            case "stage":
                tasks.create_task(self._switch(call, message.stage))
            case "heartbeat_ack" if message.heartbeat_ack.sequence:
                sent_s = self._sent_s.pop(message.heartbeat_ack.sequence)
                self._fleet.acknowledged.append((sent_s, time.monotonic() - sent_s))
            case "rejection" if self._epoch:
                self._fleet.tell("rejected", reason=message.rejection.reason)

    def _hello(self) -> pb.Hello:
        settings = self._pool.settings
        return pb.Hello(
            pool=self._pool.name,
            worker=self._name,
            boot_id="boot",
            node=f"node-{self._number // 8:05d}",
            address=f"10.0.0.1:{10_000 + self._number}",
            rendezvous_address=f"10.0.0.1:{30_000 + self._number}",
            model=pb.ModelShape(
                num_layers=settings.num_layers,
                num_experts=settings.num_experts,
                num_groups=8,
                expert_bytes=EXPERT_BYTES,
            ),
            slots_per_rank=settings.slots_per_rank,
            num_ranks=settings.num_ranks,
            checkpoint_fingerprint="simulated",
            protocol_version=PROTOCOL_VERSION,
        )

    async def _serve(self, call, assignment: pb.Assignment) -> None:
        if self._epoch != assignment.epoch:  # Told again on a new stream: its counters go on.
            self._epoch, self._rank = assignment.epoch, assignment.rank
            self._interval_s = assignment.report_interval_s
            self._first_step_s = time.monotonic()
            self._run(self._pool.start(assignment.layout))
        await call.write(
            pb.ConnectRequest(
                serving=pb.Serving(
                    epoch=self._epoch,
                    rank=self._rank,
                    generation=self._generation,
                    slot_checksums=self._slot_checksums(),
                )
            )
        )
        self._fleet.count("assigned")

    async def _switch(self, call, stage: pb.Stage) -> None:
        if not self._was_pushed_to:
            self._was_pushed_to = True
            self._fleet.count("pushed to")
        await asyncio.sleep(STAGING_S)
        generation = self._pool.stage(stage)
        seat = {"epoch": self._epoch, "rank": self._rank, "generation": generation}
        await call.write(pb.ConnectRequest(staged=pb.Staged(**seat, peer_bytes=1, duration_us=1)))
        await self._pool.until_all_staged(generation)
        self._run(generation)
        await call.write(
            pb.ConnectRequest(
                switched=pb.Switched(
                    **seat,
                    step=1_000 * generation,
                    stall_us=300,
                    median_step_us=STEP_US,
                    slot_checksums=self._slot_checksums(),
                )
            )
        )
        self._fleet.count("switched")

    async def _report(self, call) -> None:
        """A report and a heartbeat in every interval, at a moment of the rank's own."""
        phase = (self._number * 0.618034) % 1.0
        await asyncio.sleep(phase * self._interval_s)
        while True:
            due_s = time.monotonic() + self._interval_s
            self._sequence += 1
            self._sent_s[self._sequence] = time.monotonic()
            await call.write(pb.ConnectRequest(load_report=self._counters()))
            # The stream is in order: the answer to this comes after the report was taken in.
            await call.write(
                pb.ConnectRequest(
                    heartbeat=pb.Heartbeat(
                        epoch=self._epoch, generation=self._generation, sequence=self._sequence
                    )
                )
            )
            await asyncio.sleep(due_s - time.monotonic())

    def _run(self, generation: int) -> None:
        table = self._pool.tables[generation]
        slots = self._pool.settings.slots_per_rank
        self._experts = table[:, self._rank * slots : (self._rank + 1) * slots]
        keys = table + np.arange(len(table))[:, None] * self._pool.settings.num_experts
        replicas = np.bincount(keys.ravel(), minlength=self._pool.tokens_per_s.size)
        rates = self._pool.tokens_per_s / replicas.reshape(self._pool.tokens_per_s.shape)
        self._rates = np.take_along_axis(rates, self._experts, axis=1)
        self._generation = generation
        self._began_s = time.monotonic()

    def _slot_checksums(self) -> bytes:
        layers = np.arange(len(self._experts))[:, None]
        return self._pool.checksums[layers, self._experts].tobytes()

    def _counters(self) -> pb.LoadReport:
        now_s = time.monotonic()
        steps = int((now_s - self._first_step_s) * 1e6 / STEP_US)
        tokens = (self._rates * (now_s - self._began_s)).astype("<u8")
        return pb.LoadReport(
            epoch=self._epoch,
            rank=self._rank,
            generation=self._generation,
            phase=pb.PHASE_DECODE,
            tokens=tokens.tobytes(),
            steps=steps,
            tokens_processed=steps,
            median_step_us=STEP_US,
            busy_us=steps * STEP_US // 2,
        )


class Fleet:
    """All pools of this process. Tells how many ranks came how far, and how long answers took."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.connecting = asyncio.Semaphore(CONNECTING_AT_A_TIME)
        self.acknowledged: list[tuple[float, float]] = []
        self._counts: dict[str, int] = {}
        self._last_s: dict[str, float] = {}

    def count(self, what: str) -> None:
        """One more rank came that far."""
        self._counts[what] = self._counts.get(what, 0) + 1
        self._last_s[what] = time.monotonic()

    def tell(self, what: str, **fields: object) -> None:
        """A line for who started this process."""
        print(json.dumps({"what": what, **fields}), flush=True)

    async def run(self) -> None:
        """Play all ranks until stdin ends."""
        settings = self.settings
        numbers = range(settings.first_pool, settings.first_pool + settings.num_pools)
        pools = [SimulatedPool(number, settings) for number in numbers]
        ranks = [
            SimulatedRank(pool, number, self)
            for pool in pools
            for number in range(settings.num_ranks)
        ]
        channels = [
            # A pool of subchannels of its own, or all channels would share one connection.
            grpc.aio.insecure_channel(
                settings.address,
                options=(
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.max_receive_message_length", -1),
                    ("grpc.channel_id", number),
                ),
            )
            for number in range(-(-len(ranks) // STREAMS_A_CONNECTION))
        ]
        lives = [
            asyncio.create_task(rank.run(channels[number // STREAMS_A_CONNECTION]))
            for number, rank in enumerate(ranks)
        ]
        telling = asyncio.create_task(self._tell_progress())
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in (telling, *lives):
            task.cancel()
        await asyncio.gather(telling, *lives, return_exceptions=True)

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            answered, self.acknowledged = self.acknowledged, []
            self.tell("progress", counts=self._counts, last_s=self._last_s, acknowledged=answered)


if __name__ == "__main__":
    asyncio.run(Fleet(FleetSettings(**json.loads(sys.argv[1]))).run())
