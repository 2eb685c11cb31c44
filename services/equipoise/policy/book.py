"""`PolicyBook`: the policy in force for each pool, and the latest rejected policy.

Pools read it at every tick. A rejected policy changes nothing: the last valid one stays in force.
"""

import logging
from dataclasses import dataclass

from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.policy.digest import digest
from equipoise.policy.errors import PolicyError
from equipoise.policy.reading import ReadPolicy, read_policy

FLAGS = "command line"
"""Source of a policy without a file."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """A policy and where it comes from."""

    values: Policy
    """The policy."""

    digest: str
    """Digest of the values."""

    source: str
    """Path of the file, or `FLAGS`."""

    loaded_s: float
    """When it was loaded, in Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedPolicy:
    """A policy file that was rejected."""

    reason: str
    """Every fault, human-readable."""

    rejected_s: float
    """When it was rejected, in Unix seconds."""


class PolicyBook:
    """Policies by pool. `revision` grows with every change.

    `base` provides the values that the file does not set. With `needs_file`, no policy is in force
    until a valid file was read.
    """

    def __init__(self, base: Policy, *, needs_file: bool = False, now: float = 0.0) -> None:
        self._base = base
        self._read: ReadPolicy | None = None
        self._source = FLAGS
        self._loaded_s = now
        self._digests: dict[Policy, str] = {}
        self.needs_file = needs_file
        self.revision = 1
        self.num_rejected = 0
        self.latest_rejection: RejectedPolicy | None = None

    @property
    def missing(self) -> str:
        """Why no policy is in force yet; empty if one is."""
        if not self.needs_file or self._read is not None:
            return ""
        if self.latest_rejection is not None:
            return self.latest_rejection.reason
        return "the policy file has not been read yet"

    @property
    def is_by_phase(self) -> bool:
        """Whether a pool's policy may depend on its phase."""
        return self._read is not None and bool(self._read.phases)

    def of(self, pool: str, phase: Phase | None) -> PolicyInForce:
        """The policy in force for a pool; its phase is None if not known yet."""
        values = self._base if self._read is None else self._read.of(pool, phase)
        if values not in self._digests:
            self._digests[values] = digest(values)
        return PolicyInForce(
            values=values,
            digest=self._digests[values],
            source=self._source,
            loaded_s=self._loaded_s,
        )

    def offer(self, text: str, *, source: str, now: float) -> bool:
        """Put the text of a policy file in force if it is valid; returns whether it is."""
        try:
            self._read = read_policy(text, source=source, base=self._base)
        except PolicyError as error:
            self.reject(str(error), now=now)
            return False
        self._source, self._loaded_s = source, now
        self._digests.clear()
        self.latest_rejection = None
        self.revision += 1
        _log.info("policy %s is in force", source)
        return True

    def reject(self, reason: str, *, now: float) -> None:
        """Record a policy file that is invalid or cannot be read; the last valid one stays."""
        self.num_rejected += 1
        self.latest_rejection = RejectedPolicy(reason=reason, rejected_s=now)
        self.revision += 1
        kept = (
            "no policy is in force yet" if self.missing else "the last valid policy stays in force"
        )
        _log.error("rejected %s; %s", reason, kept)
