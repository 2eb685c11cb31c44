"""`FalseReports`: a worker of the pool that steps like the others, and reports something else.

A liar of `liars.py` runs nothing, so that no group of ranks outlasts its lies. This one is a real
worker: ranks and balancer disagree about it for as long as it serves.
"""

from dataclasses import replace
from typing import Any

from equipoise.wire.messages import GroupLost, Heartbeat, Hello, Switched
from tests.simulation.fleet import POOL

RAISED = 2**31
"""A number that a liar's own Hello makes its pool reserve."""

CLAIMS = {"far above": 2**50, "below": RAISED - 5, "the first": 1}
"""Generations in false heartbeats: above all numbers, below a raised one, and one of the past."""

NAMED_S = 10.0
"""Seconds within which a rank is named whose heartbeats are false: it reconnects, and sends two."""

SWITCH_S = 20.0
"""Seconds within which an operator has a converged pool switched to another layout."""

ASK_S = 2.5
"""Seconds between two requests of that operator."""

WATCH_S = 45.0
"""How long a pool is watched that has converged although a worker ends its epochs."""

MAX_EPOCHS_OF_LOSSES = 10
"""Epochs that may begin meanwhile: the worker ends three, is left out for 30 s, and returns."""

MAX_EPOCHS_OF_CRASHES = 12
"""Epochs that may begin meanwhile: the worker joins five times and crashes each time, is left out
for 30 s, and joins and crashes once more."""


class FalseReports:
    """Which worker of a world reports what falsely."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._liars: dict[str, str] = {}
        self._claim = ""
        self._num_steps_altered = 0

    def begin(self, what: str, name: str, *, claim: str = "") -> None:
        """Reports of a kind are false from now on; false generations are those of a `claim`."""
        self._liars[what], self._claim = name, claim or self._claim

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
            self._world.effects.add("false_loss")
        if self._liars.get("generation") == name and worker.rank is not None:
            self._world.effects.add("false_generation")
            return replace(
                beat,
                generation=CLAIMS[self._claim],
                staged_generation=0,
                layout_digest=bytes(16),
            )
        return beat

    def hello(self, worker: Any, hello: Hello) -> Hello:
        """What a worker sends for a Hello."""
        is_liar = self._liars.get("generation") == worker.process.name
        if not is_liar or self._claim != "below":
            return hello
        return replace(hello, highest_generation=max(hello.highest_generation, RAISED))

    def switched(self, worker: Any, switched: Switched) -> Switched:
        """What a worker sends for a report of its switch."""
        if self._liars.get("step") != worker.process.name:
            return switched
        self._num_steps_altered += 1
        self._world.effects.add("other_step")
        return replace(switched, step=switched.step + 1)

    def watch(self) -> None:
        """False losses do not interrupt ranks for ever; false generations and steps are named."""
        # One that also ends its groups, or crashes, is a rank for moments only.
        stays = "loss" not in self._liars and not self._world.crashing
        if "generation" in self._liars and stays:
            self._check_named(self._liars["generation"], "a generation that its pool does not run")
        if "step" in self._liars and stays:
            self._have_it_switch()
        if self._world.crashing:  # More epochs pass before it is excluded than one that only lies.
            why = f"{self._world.crashing} crashes again and again"
            # Crashes are counted anew once other workers have died, too.
            has_liar = "lie" in self._world.kinds
            self._count_epochs(why, allowed=MAX_EPOCHS_OF_CRASHES * (1 + has_liar))
        elif "loss" in self._liars:
            why = f"{self._liars['loss']} reports false losses"
            self._count_epochs(why, allowed=MAX_EPOCHS_OF_LOSSES)

    def _have_it_switch(self) -> None:
        """Have the ranks switch once more; the one that reports another step is named for it."""
        world, name = self._world, self._liars["step"]
        for operation in ("Resume", "Unpin"):
            world.operators.ask(operation)
        num, ends_s = self._num_steps_altered, world.loop.time() + SWITCH_S
        while world.loop.time() < ends_s and self._num_steps_altered == num:
            if name in self._reason():
                return  # For an earlier switch: nothing is planned meanwhile.
            world.do_shift(world.pattern + 1)
            world.operators.ask("TriggerRebalance")
            world.loop.run_until(world.loop.time() + ASK_S)
        if self._num_steps_altered > num:
            self._check_named(name, "another step for its switch")

    def _reason(self) -> str:
        """Why the leader says that the pool does not serve; empty without a leader."""
        leader = self._world.leader()
        return leader.seat.led.find(POOL).pool.diagnosis().reason if leader is not None else ""

    def _check_named(self, name: str, what: str) -> None:
        world, before = self._world, self._rank_of(name)
        world.loop.run_until(world.loop.time() + NAMED_S)
        leader = world.leader()
        if leader is None or before is None or self._rank_of(name) is not before:
            return  # Its pool has not heard it for that long.
        diagnosis = leader.seat.led.find(POOL).pool.diagnosis()
        if name not in diagnosis.reason:
            world.observer.violate(
                "lie-unnamed",
                f"{name} reports {what}, and the pool is {diagnosis.health}",
            )

    def _rank_of(self, name: str) -> Any:
        worker = self._world.workers.get(name)
        return worker.rank if worker is not None and worker.process.alive else None

    def _count_epochs(self, why: str, *, allowed: int) -> None:
        world = self._world
        before = world.observer.num_epochs
        world.loop.run_until(world.loop.time() + WATCH_S)
        begun = world.observer.num_epochs - before
        if begun > allowed:
            world.observer.violate(
                "serving-interrupted",
                f"{begun} epochs began within {WATCH_S:g} s after the pool had converged, because "
                f"{why}",
            )
