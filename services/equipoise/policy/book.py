"""`PolicyBook`: which policy is in force for which pool, and what was refused since.

Whoever reads policies offers them here; pools look here at every tick. A policy that is refused
changes nothing: the last good one stays.
"""

import logging
from dataclasses import dataclass

from equipoise.planning.policy import Policy
from equipoise.policy.digest import digest
from equipoise.policy.errors import PolicyError
from equipoise.policy.reading import ReadPolicy, read_policy

FLAGS = "command line"
"""Source of a policy that no file says."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """A policy and where it comes from; `digest` names its values, `loaded_s` is unix time."""

    values: Policy
    digest: str
    source: str
    loaded_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPolicy:
    """A policy that was not taken, why, and when in unix seconds."""

    reason: str
    refused_s: float


class PolicyBook:
    """Policies by pool. `revision` grows whenever something here changes.

    `base` are the values that hold where no file says anything. `needs_file` tells a balancer that
    was given a file: until one was good it has no policy, and does not guess.
    """

    def __init__(self, base: Policy, *, needs_file: bool = False, now: float = 0.0) -> None:
        self._base = base
        self._read: ReadPolicy | None = None
        self._source = FLAGS
        self._loaded_s = now
        self.needs_file = needs_file
        self.revision = 1
        self.num_refused = 0
        self.latest_refusal: RefusedPolicy | None = None

    @property
    def missing(self) -> str:
        """Why there is no policy yet, in words; empty if there is one."""
        if not self.needs_file or self._read is not None:
            return ""
        if self.latest_refusal is not None:
            return self.latest_refusal.reason
        return "its policy file was not read yet"

    def of(self, pool: str) -> PolicyInForce:
        """What is in force for a pool."""
        values = self._base
        if self._read is not None:
            values = self._read.pools.get(pool, self._read.defaults)
        return PolicyInForce(
            values=values, digest=digest(values), source=self._source, loaded_s=self._loaded_s
        )

    def offer(self, text: str, *, source: str, now: float) -> bool:
        """Take the text of a policy file if it is good; else refuse it whole and say so."""
        try:
            self._read = read_policy(text, source=source, base=self._base)
        except PolicyError as error:
            self.refuse(str(error), now=now)
            return False
        self._source, self._loaded_s = source, now
        self.latest_refusal = None
        self.revision += 1
        _log.info("policy %s is in force", source)
        return True

    def refuse(self, reason: str, *, now: float) -> None:
        """Count a policy that cannot be used; the last good one stays."""
        self.num_refused += 1
        self.latest_refusal = RefusedPolicy(reason=reason, refused_s=now)
        self.revision += 1
        kept = "no policy is in force yet" if self.missing else "the last good one stays"
        _log.error("refused %s; %s", reason, kept)
