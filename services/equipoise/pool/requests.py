"""What operators ask of a pool, as values, and the answer they get. Nothing here decides."""

from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Plan now; with `force` adopt what is not worse, however little it gains."""

    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Adopt no plan until Resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Take Pause back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RollBack:
    """Place experts as `layout`, a committed one, does, as a new generation."""

    layout: Layout
    keep_planning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pin:
    """Keep a placement until Unpin: that of `layout`, or the one that runs if it is None.

    `generation` is the committed one that `layout` is, 0 if it was given as a table.
    """

    layout: Layout | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """Take Pin back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Say what a plan by `policy` would do now."""

    policy: Policy


Wish = Rebalance | Pause | Resume | RollBack | Pin | Unpin | Preview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdminRequest:
    """A wish, who has it and why. `what` is all of it in words, `ticket` finds whoever waits."""

    ticket: int
    who: str
    reason: str
    what: str
    wish: Wish

    @property
    def by(self) -> str:
        """Who, and why if that was said."""
        return f"{self.who}: {self.reason}" if self.reason else self.who


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of a request. `generation` is where the pool goes or stays, 0 for neither.

    `sequence` is its number in the audit, `proposal` what a preview found.
    """

    accepted: bool
    reason: str
    generation: int = 0
    sequence: int = 0
    proposal: Proposal | None = None
