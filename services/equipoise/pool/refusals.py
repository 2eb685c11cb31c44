"""`Refusals`: what was refused, how often, and the latest of each kind in words."""

from dataclasses import dataclass, field, replace

MAX_KINDS = 64
"""Kinds are fixed words of our own code; the bound only guards against a mistake there."""

MAX_TEXT = 500
"""Characters kept of the latest fault, because parts of it come from outside."""

_OTHERS = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One kind of refused input since the balancer started."""

    kind: str
    count: int
    latest: str


@dataclass(slots=True)
class Refusals:
    """Counts refusals by kind in bounded memory."""

    _by_kind: dict[str, Refusal] = field(default_factory=dict)

    def count(self, kind: str, latest: str) -> None:
        """One more of a kind; `latest` names the worker and the value."""
        if kind not in self._by_kind and len(self._by_kind) >= MAX_KINDS:
            kind = _OTHERS
        known = self._by_kind.get(kind, Refusal(kind=kind, count=0, latest=""))
        self._by_kind[kind] = replace(known, count=known.count + 1, latest=latest[:MAX_TEXT])

    def of(self, kind: str) -> int:
        """How often a kind was refused."""
        return self._by_kind[kind].count if kind in self._by_kind else 0

    def all(self) -> tuple[Refusal, ...]:
        """Every kind seen so far, sorted by kind."""
        return tuple(self._by_kind[kind] for kind in sorted(self._by_kind))
