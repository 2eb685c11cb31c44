"""`SimEngine`: the real step loop, as a coroutine."""

import asyncio
from types import SimpleNamespace
from typing import Any

from equipoise.rank.engine import EngineProgress
from equipoise.worker.blocks import BlockPool
from equipoise.worker.engine import Engine
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import PrefillWork

STEP_S = (0.4, 0.7)
TOKENS = 8


class _ExchangedError(Exception):
    def __init__(self, header: Any) -> None:
        self.header = header


class _Wake:
    """An event that the engine's coroutine sleeps on."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def clear(self) -> None:
        pass

    def wait(self, _timeout_s: float) -> None:
        pass

    async def sleep(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(timeout_s, self.set)
        await self._waiting
        timer.cancel()


class SimEngine(Engine):
    """The real engine, whose blocking exchange is made of two passes through `_turn`.

    The first pass ends where the real one blocks. The second continues with what the first had
    planned and staged, as the local variables of the real one do.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._wake = _Wake()  # type: ignore[assignment]
        self._world = parts["core"].world
        self._gathered: Any = None
        self._mesh, self._group = self._group, self  # type: ignore[assignment]
        self.num_switched = 0
        self._world.observer.engine_started(self)

    # What `_turn` uses of its group.

    @property
    def epoch(self) -> int:
        return self._mesh.epoch

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def names(self) -> tuple[str, ...]:
        return self._mesh.names

    @property
    def peers_digest(self) -> int:
        return self._mesh.peers_digest

    waited_s = 0.0

    def exchange(self, header: Any) -> Any:
        if self._gathered is None:
            raise _ExchangedError(header)
        return self._gathered

    async def run(self) -> None:  # type: ignore[override]
        rng = self._world.rng
        while True:
            before = self._staged, self._leaving
            self._gathered = None
            try:
                self._turn()
            except _ExchangedError as exchanged:
                header = exchanged.header
            headers = await self._mesh.gather(header)
            if not self._finish(headers, before):
                return
            slowness = self._world.slowness.get(self._mesh.process.name, 1.0)
            await self._wake.sleep(rng.uniform(*STEP_S) * slowness)

    def _finish(self, headers: Any, before: Any) -> bool:
        since = self._staged, self._leaving
        self._staged, self._leaving = before
        self._gathered = headers
        generation = self.generation
        try:
            goes_on = self._turn()
        finally:
            is_dropped = self._staged is not before[0] and since[0] is before[0]
            if self.generation == generation and not is_dropped:
                self._staged = since[0]
            self._leaving = since[1]
        return goes_on

    def _header(self, plan: Any, staged: Any, *, leaving: bool) -> Any:
        """The second pass needs none: it has every rank's."""
        if self._gathered is not None:
            return None
        return super()._header(plan, staged, leaving=leaving)

    def progress(self) -> EngineProgress:
        self._loads = self._experts.loads()
        return super().progress()

    def _step(self, plan: Any, headers: Any, *, began: float) -> tuple[Any, ...]:
        self._experts.serve()
        self._num_steps += 1
        self._scheduler.run(plan, epoch=self.epoch)
        self._busy_s += 0.01 * self._world.slowness.get(self._mesh.process.name, 1.0)
        if self._mesh.process.name in self._world.slowness:
            self._world.effects.add("slow_worker")
        self._world.observer.stepped(self)
        return ()


class SimScheduler(Scheduler):
    """The real one without requests: traffic is a load, of prompts that never end."""

    def __init__(self, world: Any) -> None:
        blocks = BlockPool(num_blocks=8, block_tokens=16)
        for _ in range(6):
            blocks.take()
        super().__init__(blocks=blocks, max_requests=4, max_queued=0, max_step_tokens=TOKENS)
        self._world = world

    @property
    def num_active(self) -> int:
        return 3 if self._world.has_traffic else 0

    def prefill_work(self) -> PrefillWork:
        return PrefillWork(tokens=1000 if self._world.has_traffic else 0, pairs=0)

    def plan(self, *, now: float) -> Any:
        if self._world.has_traffic:
            return _PLAN
        self._world.effects.add("idle")
        return _NO_PLAN

    def run(self, plan: Any, *, epoch: int) -> None:
        """Count the tokens of a step."""
        self.counts.processed += plan.num_tokens
        self._world.tokens_of_epoch[epoch] += plan.num_tokens


_PLAN, _NO_PLAN = (SimpleNamespace(num_tokens=tokens, chunks=()) for tokens in (TOKENS, 0))
