"""`Suspicion`: whether a request makes the ranks that run it fail. Pure.

For the reasons, see docs/decisions/0021-poison-requests.md.
"""

from dataclasses import dataclass

from equipoise.wire.inference import Blame

MAX_BLAMES = 2
"""Ranks that may name the request as the cause of a failure."""

MAX_BREAKS = 3
"""Consecutive ranks that may fail unexplained before the request makes another token."""


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """Evidence from a request's failures."""

    num_blames: int = 0
    """Times a rank named this request as the cause."""

    num_breaks: int = 0
    """Failures since its last token that it may have caused."""

    def note_progress(self) -> None:
        """A rank made a token of the request: it did not cause earlier failures."""
        self.num_breaks = 0

    def note_break(self, blame: Blame) -> None:
        """A rank that ran the request failed."""
        self.num_blames += blame is Blame.REQUEST
        self.num_breaks += blame is Blame.STEP

    @property
    def is_strong(self) -> bool:
        """Whether one more failure gets it rejected; it then shares no rank with other suspects."""
        return self.num_breaks == MAX_BREAKS - 1

    @property
    def verdict(self) -> str:
        """Why the request is rejected; empty while it is not."""
        if self.num_blames >= MAX_BLAMES:
            return f"{self.num_blames} ranks blamed it for their failure"
        if self.num_breaks >= MAX_BREAKS:
            return f"{self.num_breaks} consecutive ranks failed while running it"
        return ""
