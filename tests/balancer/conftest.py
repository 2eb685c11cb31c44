"""A controller with scripted workers, a store that obeys, and a clock turned by hand."""

import hashlib
from dataclasses import replace

import grpc
import numpy as np
import pytest
from balancer_links import opened
from redis import Redis
from redis_server import RedisServer, require_redis

from equipoise.balancer.planner.proposal import propose
from equipoise.balancer.policy.book import PolicyBook
from equipoise.balancer.pool.controller import PoolController
from equipoise.balancer.pool.effects import Propose, Send, WriteDecision
from equipoise.balancer.pool.memory import PoolMemory
from equipoise.planning.counters import LoadReport, Phase
from equipoise.planning.policy import Policy
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import ModelShape
from equipoise.wire.messages import (
    Abort,
    Assignment,
    Heartbeat,
    HeartbeatAck,
    Hello,
    RankStats,
    Refused,
    Rejection,
    Report,
    RunningState,
    Serving,
    Stage,
    Staged,
    Switched,
)
from equipoise_api.v1 import status_pb2_grpc

MODEL = ModelShape(num_layers=3, num_experts=32, num_groups=8, expert_bytes=1000)
POLICY = Policy(interval_s=10.0, min_tokens=100.0)


def expert_checksum(layer: int, expert: int) -> bytes:
    return hashlib.blake2b(f"{layer}/{expert}".encode(), digest_size=16).digest()


def make_hello(name="worker-0", *, node="node-0", boot_id="boot-1", **changes) -> Hello:
    values = {
        "pool": "tiny",
        "worker": name,
        "boot_id": boot_id,
        "node": node,
        "address": f"{name}:1",
        "rendezvous_address": f"{name}:2",
        "model": MODEL,
        "slots_per_rank": 10,
        "num_ranks": 4,
        "checkpoint_fingerprint": "abc",
        "device": "cuda:0 (NVIDIA H200)",
        "kernels": "triton, gemm_large=deep_gemm",
        "cache_token_bytes": 70_272,
    }
    return Hello(**{**values, **changes})


class ScriptedWorker:
    """Does what a worker does with what it is sent, one word at a time."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.assignment: Assignment | None = None
        self.layout = None
        self.staged: Stage | None = None
        self.tokens = None
        self.steps = 0
        self.busy_us = 0
        self.busy_us_a_step = 100
        self.is_lopsided = False

    @property
    def rank(self) -> int:
        return self.assignment.rank

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    def take(self, message) -> None:
        match message:
            case Assignment():
                if self.assignment is None or self.assignment.epoch != message.epoch:
                    self.run(message.layout)
                self.assignment = message
            case Stage():
                self.staged = message
            case Abort():
                if self.staged is not None and self.staged.layout.generation == message.generation:
                    self.staged = None

    def run(self, layout) -> None:
        self.layout = layout
        self.staged = None
        self.tokens = np.zeros((layout.num_layers, layout.slots_per_rank), dtype=np.uint64)

    def own(self, table):
        first = self.rank * self.layout.slots_per_rank
        return table[:, first : first + self.layout.slots_per_rank]

    def checksums(self):
        experts = self.own(self.layout.expert_of_slot)
        told = [
            [list(expert_checksum(layer, int(e))) for e in row] for layer, row in enumerate(experts)
        ]
        return np.array(told, dtype=np.uint8)

    def serving(self) -> Serving:
        return Serving(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.layout.generation,
            checksums=self.checksums(),
            steps="captured; rows by deep_ep",
        )

    def serve_traffic(self, tokens_of_expert) -> None:
        """Receive this rank's part of [layers, experts] tokens; replicas serve their shares."""
        table = self.layout.expert_of_slot
        share = tokens_of_expert / self.layout.replica_counts()
        per_slot = np.take_along_axis(share, table, axis=1)
        if self.layout.share_of_slot is not None:
            per_slot = np.take_along_axis(tokens_of_expert, table, axis=1)
            per_slot = per_slot * self.layout.share_of_slot / WHOLE
        if self.is_lopsided:
            # The first replica gets all, whatever the layout was made for.
            first = np.stack(
                [
                    np.isin(np.arange(len(row)), np.unique(row, return_index=True)[1])
                    for row in table
                ]
            )
            per_slot = np.take_along_axis(tokens_of_expert, table, axis=1) * first
        self.tokens = self.tokens + self.own(per_slot).round().astype(np.uint64)
        self.steps += 10
        self.busy_us += 10 * self.busy_us_a_step

    def report(self) -> Report:
        return Report(
            load=LoadReport(
                boot_id=self.hello.boot_id,
                epoch=self.epoch,
                rank=self.rank,
                generation=self.layout.generation,
                phase=Phase.MIXED,
                tokens=self.tokens.copy(),
            ),
            stats=RankStats(
                steps=self.steps,
                tokens_processed=7,
                tokens_generated=5,
                median_step_us=900,
                active_requests=3,
                queued_requests=1,
                busy_us=self.busy_us,
            ),
        )

    def answer_staged(self) -> Staged:
        return Staged(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.staged.layout.generation,
            peer_bytes=0,
            checkpoint_bytes=0,
            duration_us=1,
        )

    def refuse(self, reason: str) -> Refused:
        return Refused(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.staged.layout.generation,
            reason=reason,
        )

    def switch(self, *, step: int = 70) -> Switched:
        self.run(self.staged.layout)
        return Switched(
            epoch=self.epoch,
            rank=self.rank,
            generation=self.layout.generation,
            step=step,
            stall_us=100 + self.rank,
            median_step_us=900,
            checksums=self.checksums(),
        )

    def heartbeat(self, sequence: int = 1) -> Heartbeat:
        return Heartbeat(
            epoch=self.epoch if self.assignment else 0,
            generation=self.layout.generation if self.layout else 0,
            staged_generation=self.staged.layout.generation if self.staged else 0,
            sequence=sequence,
        )

    def reconnecting(self, **changes) -> Hello:
        """The Hello of a new stream of the same process."""
        running = RunningState(
            epoch=self.epoch,
            rank=self.rank,
            staged_generation=self.staged.layout.generation if self.staged else 0,
            layout=self.layout,
            checksums=self.checksums(),
        )
        return replace(self.hello, running=running, **changes)


class Bench:
    """Carries out the controller's effects at once; `store_fault` makes writes fail."""

    def __init__(self, *, policy=POLICY, memory=None, num_ranks=4) -> None:
        self.policies = PolicyBook(policy)
        self.controller = PoolController(
            "tiny", policies=self.policies, memory=memory or PoolMemory()
        )
        self.now = 1000.0
        self.store_fault = ""
        self.disconnected = set()
        self.writes = []
        self.sent = []
        self.step = 70
        self.workers = {}
        for number in range(num_ranks):
            name = f"worker-{number}"
            hello = make_hello(name, node=f"node-{number % 2}", num_ranks=num_ranks)
            self.workers[name] = ScriptedWorker(hello)

    @property
    def pool(self):
        return self.controller.pool

    @property
    def ranks(self):
        """Workers in rank order."""
        return sorted(self.workers.values(), key=lambda worker: worker.rank)

    def sent_to(self, name, kind):
        return [
            message for worker, message in self.sent if worker == name and isinstance(message, kind)
        ]

    def decisions(self):
        return [write.record for write in self.writes if isinstance(write, WriteDecision)]

    def perform(self, chain) -> None:
        for place, effect in enumerate(chain):
            match effect:
                case Send() if effect.worker in self.disconnected:
                    continue
                case Send():
                    self.sent.append((effect.worker, effect.message))
                    if not isinstance(effect.message, HeartbeatAck | Rejection):
                        self.workers[effect.worker].take(effect.message)
                case Propose():
                    proposal = propose(effect.request)
                    self.perform(
                        self.controller.proposed(
                            proposal, plan_ms=1.0, now=self.now, asked=effect.asked
                        )
                    )
                case _ if self.store_fault:
                    behind = chain[place + 1 :]
                    self.controller.write_failed(effect, reason=self.store_fault, behind=behind)
                    return
                case _:
                    self.writes.append(effect)
                    self.perform(self.controller.written(effect, now=self.now))

    def hello(self, hello) -> None:
        self.perform(self.controller.hello(hello, now=self.now))

    def say(self, worker, value) -> None:
        self.perform(self.controller.message(worker.hello.worker, value, now=self.now))

    def lose(self, worker, reason="its stream ended") -> None:
        self.perform(self.controller.lost(worker.hello.worker, reason=reason, now=self.now))

    def tick(self, seconds=0.0) -> None:
        self.now += seconds
        self.perform(self.controller.tick(now=self.now))

    def assemble(self) -> None:
        """All workers say Hello."""
        for worker in self.workers.values():
            self.hello(worker.hello)

    def serve(self) -> None:
        """All workers come and serve."""
        self.assemble()
        for worker in self.ranks:
            self.say(worker, worker.serving())

    def carry_out_rollout(self) -> None:
        """Every wave that is on its way is staged and switched to by all ranks."""
        while all(worker.staged for worker in self.workers.values()):
            self.stage_all()
            self.step += 10
            for worker in self.ranks:
                self.say(worker, worker.switch(step=self.step))

    def stage_all(self) -> None:
        for worker in self.ranks:
            self.say(worker, worker.answer_staged())

    def run_traffic(self, tokens_per_s, *, seconds, carry_out=True) -> None:
        """Serve [layers, experts] tokens a second; all ranks report each second."""
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.ranks:
                worker.serve_traffic(tokens_per_s)
                self.say(worker, worker.report())
            self.tick()
            if carry_out:
                self.carry_out_rollout()


def skewed_load(seed: int, *, tokens_per_layer=10_000.0):
    """A load in which a few experts get most, other ones for each seed, [layers, experts]."""
    generator = np.random.default_rng(seed)
    load = generator.gamma(0.5, size=(MODEL.num_layers, MODEL.num_experts))
    return load / load.sum(axis=1, keepdims=True) * tokens_per_layer


@pytest.fixture
def make_bench():
    return Bench


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def serving_bench():
    bench = Bench()
    bench.serve()
    return bench


@pytest.fixture
def hello_of():
    return make_hello


@pytest.fixture
def skewed():
    return skewed_load


@pytest.fixture
def worker_of():
    return ScriptedWorker


@pytest.fixture
def policy():
    return POLICY


@pytest.fixture
async def address(tmp_path):
    """Where a real server listens, with a real file."""
    async with opened(tmp_path) as address:
        yield address


@pytest.fixture
async def channel(address):
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def status(channel):
    return status_pb2_grpc.StatusStub(channel)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory):
    require_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(shared_redis):
    """An empty database of a server that works."""
    with Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis.url


@pytest.fixture
def redis_server(tmp_path):
    """A server of the test's own, to be hurt."""
    require_redis()
    with RedisServer(tmp_path / "redis") as server:
        yield server
