"""A controller with scripted workers, a store that obeys, and a clock turned by hand."""

import numpy as np
import pytest

from equipoise.planning.policy import Policy
from equipoise.planning.proposal import propose
from equipoise.policy.book import PolicyBook
from equipoise.pool.controller import PoolController
from equipoise.pool.effects import Log, Propose, Reply, Send, WriteAudit, WriteDecision
from equipoise.pool.records import PoolMemory
from equipoise.wire.balancer_messages import HeartbeatAck, Rejection
from tests.support.scripted_worker import MODEL, ScriptedWorker, make_hello

POLICY = Policy(interval_s=10.0, min_assignments=100.0)


class PoolHarness:
    """Carries out the controller's effects at once; `store_fault` makes writes fail."""

    def __init__(self, *, policy=POLICY, memory=None, num_ranks=4, term=1) -> None:
        self.policies = PolicyBook(policy)
        self.controller = PoolController(
            "tiny", policies=self.policies, memory=memory or PoolMemory(), term=term
        )
        self.now = 1000.0
        self.store_fault = ""
        self.disconnected = set()
        self.writes = []
        self.sent = []
        self.logs = []
        self.replies = []
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
                case Log():
                    self.logs.append(effect.text)
                case Propose():
                    proposal = propose(effect.request)
                    self.perform(
                        self.controller.proposed(
                            proposal, plan_ms=1.0, now=self.now, requested_by=effect.requested_by
                        )
                    )
                case Reply():
                    self.replies.append(effect)
                case _ if self.store_fault:
                    behind = chain[place + 1 :]
                    self.controller.write_failed(effect, reason=self.store_fault, behind=behind)
                    return
                case _:
                    if isinstance(effect, WriteAudit):
                        effect = self.pool.journal.brought_up_to_date(effect)  # noqa: PLW2901
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
        """Serve [layers, experts] assignments per second; all ranks report each second."""
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.ranks:
                worker.serve_traffic(tokens_per_s)
                self.say(worker, worker.report())
            self.tick()
            if carry_out:
                self.carry_out_rollout()


def skewed_load(seed: int, *, assignments_per_layer=10_000.0):
    """A load in which a few experts get most, other ones for each seed, [layers, experts]."""
    generator = np.random.default_rng(seed)
    load = generator.gamma(0.5, size=(MODEL.num_layers, MODEL.num_experts))
    return load / load.sum(axis=1, keepdims=True) * assignments_per_layer


@pytest.fixture
def make_harness():
    return PoolHarness


@pytest.fixture
def harness():
    return PoolHarness()


@pytest.fixture
def serving_harness():
    harness = PoolHarness()
    harness.serve()
    return harness


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
