"""`Arena`: the whole fleet as processes on this machine, with a relay in front of each.

Redis or a file, one or two balancers, four workers of the tiny model in one or two pools, a
gateway. Workers and balancers are known to each other by 127.0.0.2 only, where the relays listen;
what checks the fleet asks at 127.0.0.1, where the processes do.
"""

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import psutil
from prometheus_client import Metric

from equipoise.cli.demo.fleet import FleetError, free_address
from equipoise.cli.demo.traffic import Prompt
from equipoise.formats.packaged import packaged_checkpoint
from equipoise_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    status_pb2_grpc,
    worker_link_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from equipoise_api.v1 import status_pb2 as pb
from equipoise_model.checkpoint import Checkpoint
from equipoise_model.experts import checksum
from tests.support.chaos import with_clock
from tests.support.chaos.clients import Clients
from tests.support.chaos.gate import Gate, Stage
from tests.support.chaos.history import History, StepSeen
from tests.support.chaos.plan import NUM_WORKERS, Ground
from tests.support.chaos.relay import PROMPT, Relay, forwarding
from tests.support.forked_commands import ForkedFleet
from tests.support.redis_server import RedisServer
from tests.support.scrapes import scrape, value_of

WORKERS = tuple(f"worker-{number}" for number in range(NUM_WORKERS))
DEFAULT, READERS, WRITERS = "default", "readers", "writers"
WORKERS_OF: Mapping[str, tuple[str, ...]] = {
    DEFAULT: WORKERS,
    READERS: WORKERS[:2],
    WRITERS: WORKERS[2:],
}
"""The workers of each pool that an arena may have."""

SLOTS_PER_RANK = 12
SLOTS_PER_RANK_OF_TWO = 32
"""Every expert, so that the other rank serves alone when one is gone."""

CACHE_TOKENS = 640
"""Of a rank in one of two pools: few, so that most prompts have to be handed over again."""

HOLD_S = 5.0
NUM_CLIENTS = 6
START_BOUND_S = 180.0
ORDER_BOUND_S = 30.0

_NEAR, _FAR = "127.0.0.1", "127.0.0.2"
_POLL_S = 0.1
_MAX_VERIFICATIONS = 10

Condition = Callable[[pb.PoolStatus], bool]


class Arena:
    """A fleet that serves clients while the block runs; faults are done to its parts."""

    def __init__(
        self,
        folder: Path,
        *,
        ground: Ground,
        answers: Mapping[Prompt, Sequence[int]],
        clock_library: Path | None = None,
    ) -> None:
        self.ground = ground
        self.history = History()
        self.fleet = ForkedFleet(folder)
        self.pools = (READERS, WRITERS) if ground is Ground.POOLS else (DEFAULT,)
        self.redis = RedisServer(folder / "redis") if ground is Ground.REDIS else None
        self.balancers = ("balancer-0", "balancer-1") if self.redis else ("balancer-0",)
        self.clock_file = folder / "clock"
        self.relays: dict[str, Relay] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._folder = folder
        self._clock_library = clock_library
        others = (of(worker) for of in (_rendezvous, _metrics) for worker in WORKERS)
        names = (*self.balancers, *WORKERS, "gateway", *others)
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.clients = Clients(self._near("gateway"), answers=answers, history=self.history)
        self._checksums = _checksums()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        self.clock_file.write_text("+0")
        if self.redis is not None:
            self._stack.callback(self.redis.kill)
            await asyncio.to_thread(self.redis.start)
        for name in (*self.balancers, *WORKERS):
            relay = Relay(self._far(name), target=self._near(name), observer=self._observer(name))
            self.relays[name] = await self._stack.enter_async_context(relay)
            self._channels[name] = grpc.aio.insecure_channel(self._near(name), options=PROMPT)
            self._stack.push_async_callback(self._channels[name].close)
        for name in map(_rendezvous, WORKERS):
            await self._stack.enter_async_context(
                forwarding(self._far(name), target=self._near(name))
            )
        await self._stack.enter_async_context(self.fleet)
        for name in self.balancers:
            await self.start(name)
        for name in WORKERS:
            await self.start(name)
        await self.start("gateway")
        await self.until(whole, bound_s=START_BOUND_S)
        serving = asyncio.create_task(self.clients.run(NUM_CLIENTS))
        self._stack.push_async_callback(_ended, serving)

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str) -> None:
        """Start a process that does not run, with the arguments it always has."""
        if name.startswith("balancer") and self._clock_library is not None:
            wrapped = (
                with_clock.__file__, str(self._clock_library), str(self.clock_file),
                "-m", "equipoise.cli.main",
            )  # fmt: skip
            await self.fleet.start(name, self._arguments(name), program=wrapped)
        else:
            await self.fleet.start(name, self._arguments(name))

    def running(self, name: str) -> bool:
        """Whether the process lives."""
        with suppress(KeyError, psutil.NoSuchProcess):
            process = psutil.Process(self.fleet.pid(name))
            return process.status() != psutil.STATUS_ZOMBIE
        return False

    async def leader(self) -> str:
        """The balancer that leads as it says itself; the first one if none does."""
        for name in self.balancers:
            if await self._status(name, self.pools[0]) is not None:
                return name
        return self.balancers[0]

    def pool_of(self, worker: str) -> str:
        """The pool of a worker."""
        return next(pool for pool in self.pools if worker in WORKERS_OF[pool])

    def gate(self, stage: Stage) -> Gate:
        """Hold up the next handover at a stage, while the block runs."""
        prefill, decode = (
            {worker: self.relays[worker] for worker in WORKERS_OF[pool]}
            for pool in (READERS, WRITERS)
        )
        return Gate(stage, prefill=prefill, decode=decode)

    @property
    def num_latents(self) -> int:
        """Messages with latents that ranks have fetched from each other."""
        return sum(relay.num_latents for relay in self.relays.values())

    async def statuses(self) -> list[pb.PoolStatus]:
        """Return each pool's status from the leader; none without a leader or one of the pools."""
        for name in self.balancers:
            found = [await self._status(name, pool) for pool in self.pools]
            if all(status is not None for status in found):
                return [status for status in found if status is not None]
        return []

    async def until_unused(self, *, bound_s: float) -> None:
        """Wait until no worker has a request, or a block of its cache in use, and all holds ended.

        Raises:
            TimeoutError: some had within the bound; says which.
        """
        deadline_s = time.monotonic() + bound_s
        while in_use := [text for worker in WORKERS if (text := await self._in_use(worker))]:
            if time.monotonic() > deadline_s:
                raise TimeoutError("; ".join(in_use))
            await asyncio.sleep(_POLL_S)

    async def _in_use(self, worker: str) -> str:
        """What a worker has in use by its metrics; unlike the status, they are as of now."""
        try:
            text = in_use(await scrape(self._near(_metrics(worker))))
        except OSError as error:
            text = str(error)
        return f"{worker}: {text}" if text else ""

    async def until(self, condition: Condition, *, bound_s: float) -> list[pb.PoolStatus]:
        """The first statuses of a leader for which the condition holds in every pool.

        Raises:
            TimeoutError: there was none within the bound; says what there was.
            FleetError: a process ended by itself.
        """
        deadline_s = time.monotonic() + bound_s
        found: list[pb.PoolStatus] = []
        while time.monotonic() < deadline_s:
            found = await self.statuses()
            if found and all(condition(status) for status in found):
                return found
            self.check_alive()
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(_describe(found))

    def check_alive(self) -> None:
        """Raise FleetError if a process exited unexpectedly."""
        self.fleet.check()

    async def note_layouts(self) -> None:
        """Tell the history which layouts are committed."""
        for pool in self.pools:
            layout = (await self._committed(pool)).layout
            digest = hash((layout.expert_of_slot, layout.share_of_slot))
            self.history.layouts.setdefault((pool, layout.generation), set()).add(digest)

    async def verify_experts(self) -> None:
        """Fetch what every slot of the committed layouts holds, and note what is wrong.

        A pool is paused meanwhile: it would balance faster than a busy machine checks.
        """
        for pool in self.pools:
            pause = admin_pb2.PauseRequest(pool=pool, reason="experts are looked at")
            await self._order("Pause", pause)
            try:
                await self._verify(pool)
            finally:
                resume = admin_pb2.ResumeRequest(pool=pool, reason="experts were looked at")
                await self._order("Resume", resume)

    async def _verify(self, pool: str) -> None:
        for _ in range(_MAX_VERIFICATIONS):
            found = await self.until(whole, bound_s=START_BOUND_S)
            status = next(one for one in found if one.pool == pool)
            try:
                layout = (await self._committed(pool)).layout
                unverified = [one async for one in self._unverified(layout, status)]
                await self.until(whole, bound_s=START_BOUND_S)
                stayed = (await self._committed(pool)).layout.generation == layout.generation
            except grpc.aio.AioRpcError:
                continue  # Another balancer leads by now.
            if stayed:
                self.history.unverified += unverified
                return
        self.history.overdue.append(
            f"no layout stayed for as long as it takes to look at it, {_MAX_VERIFICATIONS} times"
        )

    async def _unverified(
        self, layout: worker_link_pb2.Layout, status: pb.PoolStatus
    ) -> AsyncIterator[str]:
        table = np.frombuffer(layout.expert_of_slot, "<i4").reshape(layout.num_layers, -1)
        worker_of_rank = {rank.rank: rank.worker for rank in status.ranks}
        slots_per_rank = layout.num_slots // layout.num_ranks
        for rank, worker in worker_of_rank.items():
            own = table[:, rank * slots_per_rank : (rank + 1) * slots_per_rank]
            stub = worker_pb2_grpc.ExpertTransferStub(self._channels[worker])
            for (layer, _), expert in np.ndenumerate(own):
                request = worker_pb2.FetchRequest(
                    epoch=status.epoch, layer=layer, expert=int(expert)
                )
                held = hashlib.blake2b(digest_size=16)
                what = f"{worker}: expert {expert} of layer {layer}"
                try:
                    async for piece in stub.Fetch(request, timeout=10.0):
                        held.update(piece.data)
                except grpc.aio.AioRpcError as error:
                    yield f"{what} cannot be fetched: {error.details()}"
                    continue
                if held.digest() != self._checksums[layer, int(expert)]:
                    yield f"{what} is not the checkpoint's"

    async def _order(
        self, name: str, request: admin_pb2.PauseRequest | admin_pb2.ResumeRequest
    ) -> None:
        """Have the leader carry out an order; one that was carried out already is fine too.

        Raises:
            TimeoutError: no leader answered.
        """
        async with asyncio.timeout(ORDER_BOUND_S):
            while True:
                stub = admin_pb2_grpc.AdminStub(self._channels[await self.leader()])
                with suppress(grpc.aio.AioRpcError):
                    await getattr(stub, name)(request, timeout=5.0)
                    return
                await asyncio.sleep(_POLL_S)

    async def _committed(self, pool: str) -> pb.GetLayoutResponse:
        stub = status_pb2_grpc.StatusStub(self._channels[await self.leader()])
        return await stub.GetLayout(pb.GetLayoutRequest(pool=pool), timeout=5.0)

    async def _status(self, name: str, pool: str) -> pb.PoolStatus | None:
        stub = status_pb2_grpc.StatusStub(self._channels[name])
        call = stub.GetStatus(pb.GetStatusRequest(pool=pool), timeout=2.0)
        with suppress(grpc.aio.AioRpcError):
            response = await call
            # A follower answers too, and says who leads.
            followed = dict(await call.trailing_metadata() or ()).get("equipoise-leader")
            return None if followed else response.status
        return None

    def _observer(self, name: str) -> Callable[[worker_pb2.GenerateResponse], None]:
        def observe(response: worker_pb2.GenerateResponse) -> None:
            if response.tokens:
                at = response.epoch, response.step, response.generation
                self.history.steps.append(StepSeen(*at, name, self.pool_of(name)))

        return observe

    def _arguments(self, name: str) -> list[str]:
        addresses = ",".join(self._far(balancer) for balancer in self.balancers)
        if name in self.balancers:
            store = self.redis.url if self.redis else str(self._folder / "state.sqlite")
            return [
                "balancer", f"--listen={self._near(name)}", f"--advertise={self._far(name)}",
                f"--store={store}", "--interval-s=2", "--min-assignments=100",
            ]  # fmt: skip
        if name in WORKERS:
            return [
                "worker", f"--listen={self._near(name)}", f"--advertise-host={_FAR}",
                f"--balancer={addresses}", f"--worker={name}",
                f"--rendezvous-port={self._ports[_rendezvous(name)]}",
                f"--metrics-listen={self._near(_metrics(name))}",
                f"--node=node-{int(name[-1]) // 2}", *self._pool_arguments(name),
            ]  # fmt: skip
        pools = (
            () if self.pools == (DEFAULT,) else (f"--pool={WRITERS}", f"--prefill-pool={READERS}")
        )
        return ["gateway", f"--listen={self._near(name)}", f"--balancer={addresses}", *pools]

    def _pool_arguments(self, worker: str) -> list[str]:
        """A worker's pool and its size."""
        pool = self.pool_of(worker)
        if pool == DEFAULT:
            return [f"--num-ranks={NUM_WORKERS}", f"--slots-per-rank={SLOTS_PER_RANK}"]
        phase, peer = ("prefill", WRITERS) if pool == READERS else ("decode", READERS)
        return [
            f"--pool={pool}", f"--phase={phase}", f"--peer-pools={peer}",
            f"--num-ranks={len(WORKERS_OF[pool])}", f"--slots-per-rank={SLOTS_PER_RANK_OF_TWO}",
            f"--cache-tokens={CACHE_TOKENS}", f"--hold-s={HOLD_S:g}",
        ]  # fmt: skip

    def _near(self, name: str) -> str:
        return f"{_NEAR}:{self._ports[name]}"

    def _far(self, name: str) -> str:
        return f"{_FAR}:{self._ports[name]}"


def whole(status: pb.PoolStatus) -> bool:
    """All workers of a pool are ranks that serve, and nothing is rolled out."""
    return (
        status.health == pb.POOL_HEALTH_SERVING
        and {rank.worker for rank in status.ranks} == set(WORKERS_OF[status.pool])
        and not status.HasField("rollout")
    )


def in_use(metrics: Mapping[str, Metric]) -> str:
    """What a worker has in use; empty if nothing."""

    def value(name: str, **labels: str) -> float:
        return float(value_of(metrics, f"equipoise_worker_{name}", **labels))

    gauges = ("active_requests", "queued_requests", "held_tokens", "cache_used_ratio")
    values = {name: value(name) for name in gauges}
    ended = [value("latent_holds_total", ended=end) for end in ("fetched", "released", "expired")]
    values["open_holds"] = value("latent_holds_taken_total") - sum(ended)
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value)


def _free_ports(number: int) -> list[int]:
    """Ports below the ephemeral range, so no other process takes them meanwhile.

    A process that is restarted must find its port free again.
    """
    candidates = random.sample(range(12_000, 30_000), 50 * number)
    free = (port for port in candidates if free_address(f"{_NEAR}:{port}") == f"{_NEAR}:{port}")
    return list(itertools.islice(free, number))


def _rendezvous(worker: str) -> str:
    return f"{worker}-rendezvous"


def _metrics(worker: str) -> str:
    return f"{worker}-metrics"


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _checksums() -> dict[tuple[int, int], bytes]:
    """BLAKE2b-128 of every expert, by MoE layer and logical expert."""
    checkpoint = Checkpoint.open(packaged_checkpoint())
    return {
        (layer, expert): checksum(checkpoint.read_expert(layer, expert))
        for layer in range(checkpoint.config.num_moe_layers)
        for expert in range(checkpoint.config.n_routed_experts)
    }


def _describe(statuses: Sequence[pb.PoolStatus]) -> str:
    return "; ".join(map(_described, statuses)) or "no balancer led, or it lacked a pool"


def _described(status: pb.PoolStatus) -> str:
    ranks = ", ".join(
        f"{rank.worker} {rank.state} ({rank.cache_tokens_used} tokens)" for rank in status.ranks
    )
    rollout = f", rollout {status.rollout.state}" if status.HasField("rollout") else ""
    return (
        f"pool {status.pool}: health {pb.PoolHealth.Name(status.health)} ({status.health_reason}), "
        f"epoch {status.epoch}, generation {status.generation}{rollout}, ranks: {ranks}"
    )


__all__ = ["WORKERS", "Arena", "FleetError", "whole"]
