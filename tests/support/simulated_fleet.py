"""Simulated ranks that speak the real worker link: they serve, report, stage and switch.

Run as a process: `python -m tests.support.simulated_fleet '{...}'` with the fields of
`FleetSettings` as JSON.
Each rank has a stream of its own; a connection carries up to 50 of them, in place of one each, and
speaks gRPC as `grpc_streams` does: a rank's report with its heartbeat takes some 0.1 ms here.
Nothing is computed and no bytes are pulled: Staged is said after a while, and the ranks of a pool
switch as soon as all have staged. Events are printed as one JSON object per line; seconds are of
the machine's monotonic clock, which the processes of a machine share.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.planning.moves import checksums_digest
from equipoise.wire.messages import PROTOCOL_VERSION
from equipoise.wire.seal import seal
from equipoise_api.v1 import worker_link_pb2 as pb
from tests.support.grpc_streams import GrpcConnection, GrpcStream

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
    assignments_per_s: float = 3_000.0
    """Expert assignments of a layer and a rank."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a pool runs in one generation: tables over all its slots, made once for all ranks.

    `experts` is int32 [layers, slots], `assignments_per_s` float64 of the same shape; `checksums`
    is uint8 [layers, slots, 16].
    """

    experts: np.ndarray
    assignments_per_s: np.ndarray
    checksums: np.ndarray


class SimulatedPool:
    """What the ranks of one pool share: checksums, traffic, and the switch by agreement."""

    def __init__(self, number: int, settings: FleetSettings) -> None:
        self.name = f"pool-{number:04d}"
        self.settings = settings
        random = np.random.default_rng(number)
        shape = (settings.num_layers, settings.num_experts)
        self.checksums = random.integers(0, 256, (*shape, 16), dtype=np.uint8)
        load = random.gamma(0.7, size=shape)
        scale = settings.assignments_per_s * settings.num_ranks
        self._assignments_per_s = load / load.sum(axis=1, keepdims=True) * scale
        self.running: dict[int, Running] = {}
        """By generation, the latest two; all ranks of the pool share them."""
        self._staged: dict[int, list[Callable[[], None]]] = {}

    def start(self, layout: pb.Layout) -> int:
        """Take the layout of a JoinEpoch; gives its generation."""
        cells = np.frombuffer(layout.expert_of_slot, dtype="<i4")
        self._keep(layout.generation, cells.reshape(layout.num_layers, layout.num_slots))
        return layout.generation

    def stage(self, stage: pb.Stage) -> int:
        """Take the layout of a stage, whole or as a change; return its generation."""
        change = stage.change
        if not stage.HasField("change"):
            return self.start(stage.layout)
        if change.generation not in self.running:
            experts = self.running[stage.base_generation].experts.copy()
            changed = np.frombuffer(change.expert_of_cell, "<i4")
            experts.ravel()[np.frombuffer(change.cells, "<u4")] = changed
            self._keep(change.generation, experts)
        return change.generation

    def when_all_staged(self, generation: int, switch: Callable[[], None]) -> None:
        """One rank more has staged; when each of the pool has, all switch."""
        switches = self._staged.setdefault(generation, [])
        switches.append(switch)
        if len(switches) == self.settings.num_ranks:
            for each in self._staged.pop(generation):
                each()

    def _keep(self, generation: int, experts: np.ndarray) -> None:
        if generation in self.running:
            return
        keys = experts + np.arange(len(experts))[:, None] * self.settings.num_experts
        replicas = np.bincount(keys.ravel(), minlength=self._assignments_per_s.size)
        running = Running(
            experts=experts,
            assignments_per_s=self._assignments_per_s.ravel()[keys] / replicas[keys],
            checksums=self.checksums.reshape(-1, 16)[keys],
        )
        self.running = {**dict(list(self.running.items())[-1:]), generation: running}


class SimulatedRank:
    """One worker: its stream, its counters, and its answers."""

    def __init__(
        self, pool: SimulatedPool, number: int, *, fleet: "Fleet", connection: GrpcConnection
    ) -> None:
        self._pool, self._number, self._fleet = pool, number, fleet
        self._connection = connection
        self._stream: GrpcStream | None = None
        self._heard = asyncio.Event()
        self._ended = asyncio.Event()
        self._name = f"{pool.name}-{number:05d}"
        self._epoch = self._rank = self._generation = self._sequence = 0
        self._interval_s = self._began_s = self._first_step_s = 0.0
        self._sent_s: dict[int, float] = {}
        self._was_pushed_to = False

    async def run(self) -> None:
        """Live until cancelled."""
        while True:
            async with self._fleet.connecting:
                self._heard, self._ended = asyncio.Event(), asyncio.Event()
                self._stream = self._connection.open(heard=self._hear, ended=self._end)
                self._say(hello=self._hello())
                # Its answer shows that the stream is open; ranks are assigned once all have joined.
                self._say(heartbeat=pb.Heartbeat())
                await self._heard.wait()
            await self._ended.wait()
            # Like a worker: with a new stream, if the balancer had no time for this one.
            self._fleet.count("turned away")
            await asyncio.sleep(RETRY_S)

    def _say(self, **message: object) -> None:
        if self._stream is not None:
            self._stream.write(seal(pb.ConnectRequest(**message)).SerializeToString())

    def _end(self, why: str) -> None:
        self._stream = None
        self._heard.set()
        self._ended.set()
        if self._epoch:
            self._fleet.tell("ended", worker=self._name, why=why)

    def _hear(self, data: bytes) -> None:
        self._heard.set()
        message = pb.ConnectResponse.FromString(data)
        match message.WhichOneof("message"):
            case "join_epoch":
                self._serve(message.join_epoch)
            case "stage":
                self._stage(message.stage)
            case "heartbeat_ack" if message.heartbeat_ack.sequence:
                sent_s = self._sent_s.pop(message.heartbeat_ack.sequence)
                self._fleet.acknowledged.append((sent_s, time.monotonic() - sent_s))
            case "rejection":
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
            phase=pb.PHASE_DECODE,
            experts_digest=checksums_digest(self._pool.checksums),
            protocol_version=PROTOCOL_VERSION,
        )

    def _serve(self, join_epoch: pb.JoinEpoch) -> None:
        is_new = self._epoch != join_epoch.epoch
        if is_new:  # Otherwise it is repeated on a new stream, and its counters continue.
            self._epoch, self._rank = join_epoch.epoch, join_epoch.rank
            self._interval_s = join_epoch.report_interval_s
            self._first_step_s = time.monotonic()
            self._run(self._pool.start(join_epoch.layout))
        self._say(
            serving=pb.Serving(
                epoch=self._epoch,
                rank=self._rank,
                generation=self._generation,
                slot_checksums=self._slot_checksums(),
                expert_checksums=b"" if self._rank else self._pool.checksums.tobytes(),
            )
        )
        self._fleet.count("assigned")
        if is_new:
            # Each rank at a moment of its own.
            phase = (self._number * 0.618034) % 1.0
            self._later(phase * self._interval_s, self._report, time.monotonic())

    def _stage(self, stage: pb.Stage) -> None:
        if not self._was_pushed_to:
            self._was_pushed_to = True
            self._fleet.count("pushed to")
        self._later(STAGING_S, self._staged, self._pool.stage(stage))

    def _staged(self, generation: int) -> None:
        seat = {"epoch": self._epoch, "rank": self._rank, "generation": generation}
        self._say(staged=pb.Staged(**seat, peer_bytes=1, duration_us=1))
        self._pool.when_all_staged(generation, lambda: self._switch(seat))

    def _switch(self, seat: dict[str, int]) -> None:
        self._run(seat["generation"])
        self._say(
            switched=pb.Switched(
                **seat,
                step=1_000 * seat["generation"],
                stall_us=300,
                median_step_us=STEP_US,
                slot_checksums=self._slot_checksums(),
            )
        )
        self._fleet.count("switched")

    def _report(self, due_s: float) -> None:
        """A report and a heartbeat in every interval."""
        self._sequence += 1
        self._sent_s[self._sequence] = time.monotonic()
        report = self._counters()
        # Like a worker whose heartbeat is due. Its answer comes after the report was taken in.
        report.heartbeat.epoch, report.heartbeat.generation = self._epoch, self._generation
        report.heartbeat.sequence = self._sequence
        self._say(load_report=report)
        due_s = max(time.monotonic(), due_s + self._interval_s)
        self._later(due_s - time.monotonic(), self._report, due_s)

    def _later(self, delay_s: float, what: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, what, *arguments)

    def _run(self, generation: int) -> None:
        self._generation = generation
        self._began_s = time.monotonic()

    def _own(self, table: np.ndarray) -> np.ndarray:
        """Its slots' part of a table over all slots."""
        slots = self._pool.settings.slots_per_rank
        return table[:, self._rank * slots : (self._rank + 1) * slots]

    def _slot_checksums(self) -> bytes:
        return self._own(self._pool.running[self._generation].checksums).tobytes()

    def _counters(self) -> pb.LoadReport:
        now_s = time.monotonic()
        steps = int((now_s - self._first_step_s) * 1e6 / STEP_US)
        rates = self._own(self._pool.running[self._generation].assignments_per_s)
        assignments = (rates * (now_s - self._began_s)).astype("<u8")
        return pb.LoadReport(
            epoch=self._epoch,
            rank=self._rank,
            generation=self._generation,
            phase=pb.PHASE_DECODE,
            assignments=assignments.tobytes(),
            steps=steps,
            tokens_processed=steps,
            median_step_us=STEP_US,
            busy_us=steps * STEP_US // 2,
            step_us=steps * STEP_US,
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
        host, _, port = settings.address.rpartition(":")
        total = len(pools) * settings.num_ranks
        loop = asyncio.get_running_loop()
        connections = [
            (await loop.create_connection(lambda: GrpcConnection(CONNECT), host, int(port)))[1]
            for _ in range(-(-total // STREAMS_A_CONNECTION))
        ]
        ranks = [
            SimulatedRank(
                pool,
                number % settings.num_ranks,
                fleet=self,
                connection=connections[number // STREAMS_A_CONNECTION],
            )
            for number, pool in enumerate(pool for pool in pools for _ in range(settings.num_ranks))
        ]
        lives = [asyncio.create_task(rank.run()) for rank in ranks]
        telling = asyncio.create_task(self._tell_progress())
        await loop.run_in_executor(None, sys.stdin.read)
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
