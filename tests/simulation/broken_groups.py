"""`BrokenGroups`: groups form, but their ranks cannot exchange anything, whoever is in them.

No worker is at fault, so excluding one does not help: the leader has to try again ever less often,
and to say why nothing is served.
"""

from typing import Any

from tests.simulation.fleet import POOL

KIND = "broken_groups"


MAX_EPOCHS = 12
"""Epochs that one leader opens in the longest of these faults: three at once, then after intervals
of 1, 2, 4, 8, 16 and 30 s, some of which overlap with the next fault."""

EPOCHS_OF_A_FAULT = 3
"""Epochs that open because of another fault: a worker leaves, returns, and is excluded."""

SAID_AFTER_S = 10.0
"""Seconds after which the leader has to say why the pool does not serve."""

SETTLE_S = 90.0
"""Seconds that a fleet takes longer to converge after such a fault: a worker that was excluded for
it returns after 60 s, and the epoch that it joins may have to wait for 30 s."""

CALM = frozenset({KIND, "shift", "operator", "edit_policy", "idle", "slow_worker"})
"""Kinds of faults that give the leader nothing else to say."""


class BrokenGroups:
    """The time during which no group of a world can take a step."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._until_s = self._began_s = 0.0
        self._num_before = (0, 0)

    @property
    def settle_s(self) -> float:
        """Seconds that the world's fleet takes longer to converge than others."""
        return SETTLE_S if KIND in self._world.kinds else 0.0

    def begin(self, for_s: float) -> None:
        """Break all groups from now on."""
        world, now_s = self._world, self._world.loop.time()
        if not world.rendezvous.is_broken:
            self._began_s = now_s
            self._num_before = world.observer.num_opened, world.observer.num_terms
        world.rendezvous.is_broken = True
        self._until_s = max(self._until_s, now_s + for_s)

    def end(self) -> None:
        """Let groups work again, and check what the leader did meanwhile."""
        world = self._world
        if not world.rendezvous.is_broken or world.loop.time() < self._until_s:
            return
        world.rendezvous.is_broken = False
        self._check_number()
        self._check_reason()

    def _check_number(self) -> None:
        observer, (epochs, terms) = self._world.observer, self._num_before
        begun, num_leaders = observer.num_opened - epochs, 1 + observer.num_terms - terms
        allowed = MAX_EPOCHS * num_leaders
        allowed += EPOCHS_OF_A_FAULT * (len(self._world.schedule.actions) - 1)
        if begun > allowed:
            observer.violate(
                "epochs-without-end",
                f"{begun} epochs opened within {self._until_s - self._began_s:.0f} s in which no "
                "group could take a step",
            )

    def _check_reason(self) -> None:
        world, leader = self._world, self._world.leader()
        if leader is None or not world.kinds <= CALM:
            return
        if world.loop.time() < self._began_s + SAID_AFTER_S:
            return
        diagnosis = leader.seat.led.find(POOL).pool.diagnosis()
        if "epochs in a row failed" not in diagnosis.reason:
            world.observer.violate(
                "failures-unexplained",
                f"no group can take a step, and the pool is {diagnosis.health}: {diagnosis.reason}",
            )
