"""`FalseReports`: a worker of the pool that steps like the others, and reports something else.

A liar of `liars.py` runs nothing, so that no group of ranks outlasts its lies. This one is a real
worker: ranks and balancer disagree about it for as long as it serves.
"""

from typing import Any

from equipoise.wire.messages import GroupLost, Heartbeat

WATCH_S = 45.0
"""How long a pool is watched that has converged although a worker reports false losses."""

MAX_EPOCHS = 10
"""Epochs that may begin meanwhile: the worker ends three, is left out for 30 s, and returns."""


class FalseReports:
    """Which worker of a world reports what falsely."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._liars: dict[str, str] = {}

    def begin(self, what: str, name: str) -> None:
        """Reports of a kind are false from now on."""
        self._liars[what] = name

    def end(self, what: str) -> None:
        """Reports of a kind are true again."""
        self._liars.pop(what, None)

    def heartbeat(self, worker: Any, beat: Heartbeat) -> Heartbeat:
        """What a worker sends for a heartbeat, perhaps after another message."""
        name = worker.process.name
        if self._liars.get("loss") == name and worker.rank is not None:
            lost = GroupLost(
                epoch=beat.epoch,
                reason="a lie",
                expert_of_slot=None,
                generation=beat.generation,
            )
            worker.outbox.send(lost)
        return beat

    def watch(self) -> None:
        """False losses do not interrupt the ranks that serve for ever."""
        if "loss" not in self._liars:
            return
        world = self._world
        before = world.observer.num_epochs
        world.loop.run_until(world.loop.time() + WATCH_S)
        begun = world.observer.num_epochs - before
        if begun > MAX_EPOCHS:
            world.observer.violate(
                "serving-interrupted",
                f"{begun} epochs began within {WATCH_S:g} s after the pool had converged, because "
                f"{self._liars['loss']} reports false losses",
            )
