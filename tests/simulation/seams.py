"""Where the simulation enters the product: what blocks, measures real time, or needs torch's group.

Nothing here decides anything; each replaced name is I/O of the module that it is replaced in.
"""

import asyncio
import gc
import logging
import sys
from types import SimpleNamespace
from typing import Any

from equipoise.balancer import loop_share, runner
from equipoise.pool import demand
from equipoise.rank import held, stager
from equipoise.worker import engine, epochs, joining, rank, reach, spans
from equipoise.worker.reading import CheckpointReader
from tests.simulation import group
from tests.simulation.engine import SimEngine
from tests.simulation.experts import SimExperts, SimPlacement, checksum_of
from tests.simulation.loop import current_process
from tests.simulation.schedule import Schedule
from tests.simulation.world import World

_world: list[Any] = []

_TIME = SimpleNamespace(
    time_ns=lambda: int(_world[0].loop.time() * 1e9),
    thread_time=lambda: 0.0,
    sleep=lambda _s: None,
)
"""In place of the module `time`; `Seams.open` adds the clocks of the current world."""


async def _meet(join_epoch: Any, **about: Any) -> Any:
    about.pop("device", None)
    return await group.meet(_world[0].rendezvous, join_epoch, **about)


async def _accepts(address: str) -> bool:
    return await _world[0].rendezvous.accepts(current_process(), address)


def _begin_read(self: Any, layer: int, expert: int) -> Any:
    """As `CheckpointReader._begin`, which reads on a thread that nothing can interrupt."""
    reading = asyncio.get_running_loop().run_in_executor(None, self._read, layer, expert)
    reading.add_done_callback(lambda _done: self._free.release())
    return asyncio.shield(reading)


async def _step(self: Any) -> None:
    """As `Rank._step`, which runs on a thread of its own."""
    try:
        await self.engine.run()
    finally:
        self._experts.close()
        self._group.close()


class Seams:
    """Installs the seams, for the rest of a process that plays schedules and does nothing else."""

    def __init__(self) -> None:
        for target, name, value in _REPLACED:
            setattr(target, name, value)
        logging.disable(logging.CRITICAL)
        if sys.version_info < (3, 14):
            # Nobody lists all tasks, and registering each weakly takes longer than making it.
            asyncio.tasks._all_tasks.add = id  # type: ignore[attr-defined]
        # Dead processes leave coroutines that were never cancelled.
        sys.unraisablehook = lambda _about: None
        gc.collect()
        gc.freeze()
        gc.disable()

    def play(self, schedule: Schedule) -> World:
        """Play a schedule to its end, without collecting garbage at arbitrary moments."""
        world = self.open(schedule)
        world.run()
        return world

    def open(self, schedule: Schedule) -> World:
        """Make a world the current one."""
        world = World(schedule)
        _world[:] = [world]
        _TIME.perf_counter = _TIME.monotonic = _TIME.time = world.loop.time
        return world

    def clean_up(self) -> None:
        """Free the worlds that nobody refers to."""
        _world.clear()
        gc.collect()


class _no_progress:  # noqa: N801 - used as a function
    def __init__(self, _what: str) -> None:
        pass

    def __enter__(self) -> Any:
        return lambda _done, _total: None

    def __exit__(self, *_error: object) -> None:
        pass


_REPLACED: list[tuple[Any, str, Any]] = [
    (runner, "time", _TIME),
    (spans, "time", _TIME),
    (loop_share, "time", _TIME),
    (engine, "time", _TIME),
    (stager, "time", _TIME),
    (joining, "placement_of", SimPlacement),
    (held, "checksum", checksum_of),
    (rank, "Engine", SimEngine),
    (rank, "_expert_parallel", SimExperts),
    (rank.Rank, "_step", _step),
    (rank, "ThreadPoolExecutor", lambda *_a, **_k: SimpleNamespace(shutdown=lambda: None)),
    (joining, "meet", _meet),
    (joining, "time", _TIME),
    (joining, "_POLL_S", 0.25),
    (reach, "_accepts", _accepts),
    (reach, "time", _TIME),
    (reach, "_POLL_S", 0.25),
    (CheckpointReader, "_begin", _begin_read),
    (joining.WorkerSlots, "open_exchange", lambda *_a: None),
    (demand, "MINUTE_S", 1.5),
    (epochs, "Loading", lambda **_k: SimpleNamespace(of=_no_progress)),
]
