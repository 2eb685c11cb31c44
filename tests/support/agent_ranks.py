"""Scripted workers with real agents, for real balancers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from equipoise.rank.agent import Agent, Outbox
from equipoise.rank.waits import Waits
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import JoinEpoch, Stage
from equipoise.wire.messages import Heartbeat
from tests.support.joining_workers import JoiningWorker

WAIT_S = 300.0


def agent_of(addresses, handler, outbox, **changes):
    """An agent without certificates; keyword arguments replace its collaborators."""
    fields = {"credentials": Credentials(), "waits": Waits({})}
    return Agent(addresses=addresses, handler=handler, outbox=outbox, **fields | changes)


class RecordingHandler:
    """A worker that records what its agent receives and drops."""

    def __init__(self, hello) -> None:
        self._hello = hello
        self.received = asyncio.Queue()
        self.dropped = asyncio.Queue()

    def hello(self):
        return self._hello

    def heartbeat(self, sequence):
        return Heartbeat(epoch=0, generation=0, staged_generation=0, sequence=sequence)

    def running(self):
        return None

    def receive(self, message) -> None:
        self.received.put_nowait(message)

    def message_dropped(self, message, reason) -> None:
        self.dropped.put_nowait(reason)


class News:
    """Notifies waiting tests that a rank received something."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self._changed.wait()


class Rank:
    """A scripted worker with a real agent, which obeys its messages and records them."""

    def __init__(self, worker, addresses, news) -> None:
        self.worker = worker
        self.news = news
        self.obeyed = []
        self.answers = True
        self.outbox = Outbox()
        self.agent = agent_of(
            addresses,
            self,
            self.outbox,
            heartbeat_interval_s=0.2,
            ack_timeout_s=1.0,
            backoff_s=0.05,
            max_backoff_s=0.5,
        )

    def hello(self):
        return self.worker.reconnecting() if self.worker.join_epoch else self.worker.hello

    def heartbeat(self, sequence):
        return self.worker.heartbeat(sequence)

    def running(self):
        return self.worker.layout

    def message_dropped(self, message, reason) -> None:
        pass

    def receive(self, message) -> None:
        self.obeyed.append(message)
        self.worker.take(message)
        match message:
            case JoinEpoch():
                self.outbox.send(self.worker.serving())
            case Stage() if self.answers:
                self.outbox.send(self.worker.answer_staged())
        self.news.tell()


@asynccontextmanager
async def ranks_of(bench, addresses):
    """The bench's workers, connected by real agents."""
    news = News()
    ranks = [Rank(worker, addresses, news) for worker in bench.workers.values()]
    tasks = [asyncio.create_task(rank.agent.run()) for rank in ranks]
    try:
        await news.until(lambda: all(rank.obeyed for rank in ranks))
        yield ranks, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def traffic(ranks, load):
    """Skewed traffic and reports, ten times a second."""

    async def report():
        while True:
            for rank in ranks:
                rank.worker.serve_traffic(load)
                rank.outbox.send(rank.worker.report())
            await asyncio.sleep(0.1)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()


def staged_by_all(ranks, *, term):
    return all(rank.worker.staged and rank.worker.staged.term >= term for rank in ranks)


def switch(ranks, *, step):
    for rank in ranks:
        rank.outbox.send(rank.worker.switch(step=step))


class JoiningRank:
    """A worker with a real agent, which takes up epochs and serves when the test says so."""

    def __init__(self, hello, addresses, news) -> None:
        self.worker = JoiningWorker(hello)
        self.news = news
        self.outbox = Outbox()
        self._agent = agent_of(
            addresses,
            self,
            self.outbox,
            heartbeat_interval_s=0.2,
            backoff_s=0.05,
            max_backoff_s=0.3,
        )
        self._task = asyncio.create_task(self._agent.run())

    def hello(self):
        return self.worker.greeting()

    def heartbeat(self, sequence):
        return replace(self.worker.heartbeat(sequence), epoch=0)

    def running(self):
        return self.worker.layout

    def message_dropped(self, message, reason) -> None:
        pass

    def receive(self, message) -> None:
        if isinstance(message, JoinEpoch):
            self.worker.take(message)
        self.send()
        self.news.tell()

    def send(self) -> None:
        answers, self.worker.answers = self.worker.answers, []
        for answer in answers:
            self.outbox.send(answer)

    def form(self) -> None:
        self.worker.form()
        self.send()

    def fail(self) -> None:
        self.worker.fail("a peer is gone")
        self.send()

    async def die(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def joining_ranks(bench, addresses):
    """Workers of which three have slots enough, once all have taken up an epoch."""
    news = News()
    hellos = [replace(one.hello, slots_per_rank=12) for one in bench.workers.values()]
    ranks = [JoiningRank(hello, addresses, news) for hello in hellos]
    try:
        await news.until(lambda: all(rank.worker.join_epoch for rank in ranks))
        yield ranks, news
    finally:
        for rank in ranks:
            await rank.die()
