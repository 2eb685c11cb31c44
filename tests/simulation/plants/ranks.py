"""Planted faults of workers: switching, bytes, and what they say to balancers."""

import asyncio
from dataclasses import replace
from typing import Any

from equipoise.rank.agent import Agent
from equipoise.rank.errors import LinkLostError
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.transfer import ExpertPuller
from equipoise.worker import engine, group
from equipoise.worker.epoch_state import EpochState
from equipoise.worker.lifecycle import Worker
from equipoise.worker.rank import Rank
from tests.simulation.experts import SimCheckpoint
from tests.simulation.plants.plant import Plant, always


def _epoch_unsaid() -> list[tuple[Any, str, Any]]:
    hello = Worker.hello
    silent = lambda self: replace(hello(self), highest_epoch=0)  # noqa: E731
    return [(Worker, "hello", silent), (EpochState, "rejection", lambda *_a: None)]


def _digests_ignored() -> list[tuple[Any, str, Any]]:
    blank = {"peers_digest": 0, "layout_digest": 0, "staged_digest": 0}
    check, agreed = engine.check_group, engine.agreed_generation

    def blanked(headers: Any) -> Any:
        return tuple(
            one._replace(**blank) if hasattr(one, "_replace") else replace(one, **blank)
            for one in headers
        )

    return [
        (group, "check_arrivals", lambda *_a, **_k: None),
        (engine, "check_group", lambda headers, **names: check(blanked(headers), **names)),
        (engine, "agreed_generation", lambda headers: agreed(blanked(headers))),
        (engine, "staged_conflict", lambda *_a, **_k: ""),
    ]


def _switch_alone() -> list[tuple[Any, str, Any]]:
    def eager(headers: Any) -> int | None:
        newest = max(header.staged_generation for header in headers)
        return newest if newest > headers[0].generation else None

    return [(engine, "agreed_generation", eager)]


async def _found_good(_self: Any, _layer: int, _slot: int) -> None:
    return None


async def _scrub_in_silence(self: Any) -> None:
    await self.scrubber.run()


def _needs_balancer() -> list[tuple[Any, str, Any]]:
    connect = Agent._connect

    async def dependent(self: Any) -> None:
        try:
            await connect(self)
        except LinkLostError:
            if self._handler.rank is not None:
                self._handler.epochs._leave()
            raise

    return [(Agent, "_connect", dependent)]


async def _for_ever(_self: Any) -> None:
    await asyncio.get_running_loop().create_future()


def _without_running() -> list[tuple[Any, str, Any]]:
    hello = Worker.hello
    return [(Worker, "hello", lambda self: replace(hello(self), running=None))]


async def _verified(_self: Any, *_args: Any) -> None:
    pass


RANK_PLANTS = {
    "switch-alone": Plant(
        breaks="a rank switches as soon as it has staged, whatever the others have",
        patches=_switch_alone,
    ),
    "digests-ignored": Plant(
        breaks="ranks compare numbers of layouts, not digests",
        patches=_digests_ignored,
        kinds=("wrong_layout", "stop_worker", "kill_worker", "shift"),
    ),
    "checkpoint-unverified": Plant(
        breaks="what is read from a checkpoint is not compared with its manifest",
        patches=lambda: [(SimCheckpoint, "verifies", False)],
        kinds=("disk_damaged", "kill_worker", "shift", "restart_everything"),
    ),
    "pull-unverified": Plant(
        breaks="pulled bytes are not compared with their checksum",
        patches=lambda: [(ExpertPuller, "_verify", _verified)],
        kinds=("corrupt_transfers", "shift", "kill_worker"),
    ),
    "rot-unnoticed": Plant(
        breaks="slots in use are not verified again",
        patches=lambda: [(Scrubber, "_wrong", _found_good)],
        kinds=("bit_rot", "shift"),
    ),
    "rot-unreported": Plant(
        breaks="a worker whose memory is damaged stops without sending what it holds",
        patches=lambda: [(Rank, "_scrub", _scrub_in_silence)],
        kinds=("bit_rot", "shift"),
    ),
    "rot-pulled": Plant(
        breaks="experts are pulled from damaged slots without being verified",
        patches=lambda: [(ExpertPuller, "_verify", _verified)],
        kinds=("bit_rot", "shift", "kill_worker"),
    ),
    "epoch-unsaid": Plant(
        breaks="a worker does not say which epoch it has taken up",
        patches=_epoch_unsaid,
        kinds=("lose_control_plane", "kill_worker", "disk_hangs"),
    ),
    "running-unsaid": Plant(
        breaks="a worker that reconnects does not say what it runs",
        patches=_without_running,
        kinds=("kill_leader", "pause_leader", "reset", "shift", "operator"),
    ),
    "old-term-obeyed": Plant(
        breaks="workers obey a leader whose term is over",
        patches=lambda: [(Agent, "_outdated", always(""))],
        kinds=("old_leader", "kill_leader", "shift"),
    ),
    "needs-balancer": Plant(
        breaks="a rank leaves its group when it loses its balancer",
        patches=_needs_balancer,
        kinds=("kill_leader", "pause_leader", "reset", "shift"),
    ),
    "ack-timeout-never": Plant(
        breaks="a worker waits for a silent balancer for ever",
        patches=lambda: [(Agent, "_watch", _for_ever)],
    ),
}
"""Planted faults of workers, by name."""
