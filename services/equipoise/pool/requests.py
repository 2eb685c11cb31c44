"""What operators request of a pool, as values, and the answers they get. Nothing here decides."""

from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Plan now; with `force` adopt any plan that is not worse, however little it gains."""

    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Adopt no plan until Resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """End Pause."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RollBack:
    """Place experts as `layout`, a committed one, does, as a new generation."""

    layout: Layout
    keep_planning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pin:
    """Keep a placement until Unpin: that of `layout`, or the one that runs if it is None.

    `generation` is the committed one that `layout` is, 0 if it was sent as a table.
    """

    layout: Layout | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """End Pin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Plan by `policy` and show the verdict, without adopting the plan."""

    policy: Policy


Operation = Rebalance | Pause | Resume | RollBack | Pin | Unpin | Preview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdminRequest:
    """An operator's request."""

    ticket: int
    """Identifies the caller that waits for the answer."""

    who: str
    """The caller, as authenticated."""

    reason: str
    """Why the caller wants it; empty if not given."""

    what: str
    """The operation with its arguments, for the audit record."""

    operation: Operation
    """The operation itself."""

    @property
    def by(self) -> str:
        """Who, and why if that was given."""
        return f"{self.who}: {self.reason}" if self.reason else self.who


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The answer to a request."""

    accepted: bool
    """Whether the operation is carried out."""

    reason: str
    """Why, or what follows from it."""

    generation: int = 0
    """Generation that the pool switches to or stays at; 0 for neither."""

    sequence: int = 0
    """Number of the audit record; 0 for a preview, which has none."""

    proposal: Proposal | None = None
    """The plan of a preview."""
