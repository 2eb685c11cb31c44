"""Scripted workers behind real agents, for balancers that are real too."""

import asyncio
from contextlib import asynccontextmanager

from equipoise.wire.messages import JoinEpoch, Stage
from equipoise.worker.agent import Agent

WAIT_S = 120.0


class News:
    """Tells whoever waits that some rank heard something."""

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
    """A scripted worker with the real agent, which obeys what it is told and keeps count."""

    def __init__(self, worker, addresses, news) -> None:
        self.worker = worker
        self.news = news
        self.obeyed = []
        self.answers = True
        self.agent = Agent(
            addresses=addresses,
            hello=self.hello,
            heartbeat=worker.heartbeat,
            receive=self.receive,
            dropped=lambda *_: None,
            running=lambda: self.worker.layout,
            ack_timeout_s=1.0,
            backoff_s=0.05,
            max_backoff_s=0.5,
        )
        self.agent.heartbeat_interval_s = 0.2

    def hello(self):
        return self.worker.reconnecting() if self.worker.join_epoch else self.worker.hello

    def receive(self, message) -> None:
        self.obeyed.append(message)
        self.worker.take(message)
        match message:
            case JoinEpoch():
                self.agent.send(self.worker.serving())
            case Stage() if self.answers:
                self.agent.send(self.worker.answer_staged())
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
    """Skewed tokens and reports, ten times a second, whoever listens."""

    async def report():
        while True:
            for rank in ranks:
                rank.worker.serve_traffic(load)
                rank.agent.send(rank.worker.report())
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
        rank.agent.send(rank.worker.switch(step=step))
