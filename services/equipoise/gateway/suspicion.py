"""`Suspicion`: whether a request makes the ranks that run it fail. Pure.

All choices of a request share one. For the reasons, see docs/decisions/0021-poison-requests.md.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from equipoise.wire.inference_messages import Blame

MAX_BLAMES = 2
"""Ranks that may name the request as the cause of a failure."""

MAX_BREAKS = 3
"""Unexplained failures of ranks before the choices that ran there are proven."""

PROOF_TOKENS = 8
"""Tokens on one rank that prove that a choice runs: a rank that fails later failed by itself."""


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """Evidence from the failures of a request's choices."""

    blames: list[tuple[str, str]] = field(default_factory=list)
    """Choice and rank of each failure that the rank blamed on the request."""

    breaks: dict[Hashable, set[str]] = field(default_factory=dict)
    """The choices not proven since each failure that the request may have caused."""

    is_convicted: bool = False
    """Whether a rank failed while this was its only suspect, after enough other failures."""

    is_rejected: bool = False
    """Whether a choice has ended with the verdict."""

    def note_proof(self, choice: str) -> None:
        """A rank runs the choice: the choice did not cause earlier failures."""
        for choices in self.breaks.values():
            choices.discard(choice)
        self.breaks = {failure: choices for failure, choices in self.breaks.items() if choices}

    def note_break(
        self, choice: str, blame: Blame, *, rank: str, failure: Hashable, was_isolated: bool
    ) -> None:
        """A rank that ran the choice failed.

        `failure` is the same for all choices that it ended. `was_isolated`: the choice started
        there as a suspect, and no other suspect ran there since.
        """
        if blame is Blame.REQUEST:
            self.blames.append((choice, rank))
        elif blame is Blame.STEP:
            self.breaks.setdefault(failure, set()).add(choice)
            self.is_convicted |= was_isolated and len(self.breaks) >= MAX_BREAKS

    @property
    def is_strong(self) -> bool:
        """Whether one more failure gets it rejected; it then shares no rank with other suspects."""
        return len(self.breaks) >= MAX_BREAKS - 1

    @property
    def verdict(self) -> str:
        """Why the request is rejected; empty while it is not."""
        # A single bad rank may blame each choice once.
        num_blames = max(
            len({rank for _, rank in self.blames}),
            *Counter(choice for choice, _ in self.blames).values(),
            0,
        )
        if num_blames >= MAX_BLAMES:
            return f"{num_blames} ranks blamed it for their failure"
        if self.is_convicted:
            return f"{len(self.breaks)} consecutive ranks failed while running it"
        return ""
