"""`Suspicion`: whether a request is what breaks the ranks that run it. Pure.

Why it counts as it does: docs/decisions/0021-poison-requests.md.
"""

from dataclasses import dataclass

from equipoise.wire.inference import Blame

MAX_BLAMES = 2
"""Ranks that may name the request as the cause of a failure."""

MAX_BREAKS = 3
"""Ranks that may break in a row without an explanation before the request makes another token."""


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """What the breaks of one request say of it."""

    num_blames: int = 0
    """Times a rank named this request as the cause."""

    num_breaks: int = 0
    """Breaks since the request last made a token that it may have caused."""

    def note_progress(self) -> None:
        """A rank made a token of the request: earlier breaks were not its doing."""
        self.num_breaks = 0

    def note_break(self, blame: Blame) -> None:
        """A rank that ran the request broke."""
        self.num_blames += blame is Blame.REQUEST
        self.num_breaks += blame is Blame.STEP

    @property
    def is_strong(self) -> bool:
        """Whether one more break would condemn it: it is kept apart from others like it."""
        return self.num_breaks == MAX_BREAKS - 1

    @property
    def verdict(self) -> str:
        """Why the request is refused; empty while it is not."""
        if self.num_blames >= MAX_BLAMES:
            return f"{self.num_blames} ranks failed because of it"
        if self.num_breaks >= MAX_BREAKS:
            return f"{self.num_breaks} ranks broke in a row while they ran it"
        return ""
