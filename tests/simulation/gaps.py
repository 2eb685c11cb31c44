"""`ReportGaps`: load reports that are lost for a while, of ranks that serve and are connected.

Counters are cumulative, so the first report after a gap has the loads of all of it. These must not
look like the loads of one window. While traffic is stationary, a rollout may follow only if it
improves the balance: the planner becomes surer of the traffic with time.
"""

from typing import Any

import numpy as np

from equipoise.planning.balance import balancedness, layout_loads
from tests.simulation.fleet import POOL
from tests.simulation.loop import outside
from tests.simulation.schedule import GAP

LOOK_S = 0.5
CALM_S = 8.0
"""Seconds without a switch after which a pool counts as balanced: two windows at least."""

BEFORE_S = 2.5
"""Seconds of a gap in which a plan on a window without it may be rolled out: a report interval, in
which no report is due, and the first wave."""

AFTER_S = 15.0
"""Seconds after a gap in which its consequences would show: five planning intervals."""

MULTIPLE = 2.0
"""Ratio of measured to true shares of the traffic that no expert may reach."""

LEAST = 20.0
"""Assignments below which shares are not compared."""

ALONE = frozenset({GAP})


class ReportGaps:
    """The gaps of one world, and what the leader makes of them."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._until_s: dict[str, float] = {}
        self._switched_s = world.loop.time()
        self._is_watched = False
        self._watched_from_s = 0.0
        self._balancedness_before = 0.0
        self._switch = ""

    def begin(self, name: str, for_s: float) -> None:
        """Lose a rank's reports from now on."""
        now_s = self._world.loop.time()
        # No plan is made while reports are missing, so a pool that was not balanced remains so.
        calm_since_s = max(self._switched_s, *self._until_s.values(), 0.0)
        self._until_s[name] = max(self._until_s.get(name, 0.0), now_s + for_s)
        if self.is_alone and now_s > calm_since_s + CALM_S and not self._is_watched:
            self._is_watched, self._watched_from_s = True, now_s + BEFORE_S
            self._balancedness_before = self._balancedness()
            self._look()

    @property
    def is_alone(self) -> bool:
        """Whether nothing else has happened, so that the traffic is what it was at the start."""
        return bool(self._world.kinds <= ALONE)

    def loses(self, name: str) -> bool:
        """Whether a report of a rank is lost now."""
        is_lost = self._world.loop.time() < self._until_s.get(name, 0.0)
        if is_lost:
            self._world.effects.add(GAP)
        return is_lost

    def switched(self, text: str) -> None:
        """A rank has switched."""
        self._switched_s = self._world.loop.time()
        if self._is_watched and self._switched_s >= self._watched_from_s:
            self._switch = self._switch or text

    def check(self) -> None:
        """What ranks have switched to since a gap began is better than what they ran."""
        if not self._switch or not self.is_alone:
            return
        before, after = self._balancedness_before, self._balancedness()
        if after <= before:
            self._world.observer.violate(
                "switch-from-a-gap",
                f"{self._switch}, although only reports were lost, and balancedness went from "
                f"{before:.3f} to {after:.3f}",
            )

    def _balancedness(self) -> float:
        """That of the layout that ranks run, on the traffic that there is; 0 without a leader."""
        leader = self._world.leader()
        if leader is None:
            return 0.0
        layout = leader.seat.led.find(POOL).pool.layouts.current
        return balancedness(layout_loads(layout, self._world.traffic()))

    def _look(self) -> None:
        """Compare the leader's loads with the traffic, while nothing but gaps has happened."""
        world = self._world
        if not self.is_alone or world.observer.violation is not None:
            return
        world.loop.call_later(LOOK_S, self._look, context=outside())
        leader = world.leader()
        if leader is None:
            return
        windows = leader.seat.led.find(POOL).pool.windows
        latest, loads = windows.latest, windows.loads
        if latest is not None and not latest.doubt:
            self._compare(f"window {latest.number}", latest.load)
        if loads is not None:
            for name, average in (("fast", loads.fast), ("slow", loads.slow)):
                self._compare(f"the {name} average", average.decayed_load)

    def _compare(self, what: str, load: np.ndarray) -> None:
        true = self._world.traffic()
        totals = load.sum(axis=1, keepdims=True)
        expected = true / true.sum(axis=1, keepdims=True) * totals
        is_multiple = (expected >= LEAST) & (load >= MULTIPLE * expected)
        if is_multiple.any():
            layer, expert = (int(index) for index in np.argwhere(is_multiple)[0])
            self._world.observer.violate(
                "load-from-a-gap",
                f"{what} has {load[layer, expert]:.0f} assignments of expert {expert} of layer "
                f"{layer}, and not {expected[layer, expert]:.0f}",
            )
