"""`PoolPolicy`: the policy in force for one pool."""

from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.policy.digest import changes


class PoolPolicy:
    """Follows the book. All parts of a pool share it, so that a change reaches them at once."""

    def __init__(self, pool: str, book: PolicyBook, *, recorded: str) -> None:
        self._pool = pool
        self.book = book
        """Policies of all pools, and the latest rejection."""
        self._phase: Phase | None = None
        self.in_force = book.of(pool, None)
        """The policy in force, and where it comes from."""
        self._revision = 0
        self._recorded = recorded

    @property
    def values(self) -> Policy:
        """The values in force."""
        return self.in_force.values

    @property
    def is_stale(self) -> bool:
        """Whether the book changed since `follow`."""
        return self._revision != self.book.revision

    def note_phase(self, phase: Phase | None) -> None:
        """The pool's workers serve this phase; None if none has connected yet."""
        if phase is not None and phase is not self._phase:
            self._phase, self._revision = phase, 0

    def follow(self) -> str:
        """Put the book's policy in force; returns what is to be recorded of it, if anything.

        A change that happened while no balancer led is recorded by the first one that does.
        """
        self._revision = self.book.revision
        before, after = self.in_force, self.book.of(self._pool, self._phase)
        self.in_force = after
        if self._phase is None and self.book.is_by_phase:
            return ""  # Another policy may follow when a worker tells the phase.
        recorded, self._recorded = self._recorded, after.digest
        if recorded in {"", after.digest}:
            return ""
        differences = changes(before.values, after.values)
        what = ", ".join(differences) if differences else "it changed while no balancer led"
        return f"policy {after.digest} of {after.source} instead of {recorded}: {what}"
