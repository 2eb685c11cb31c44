"""Candidates of one lease with clocks turned by hand."""

from dataclasses import dataclass, field

from equipoise.balancer.leadership.leader_state import (
    Due,
    Failed,
    LeaderRole,
    LeaderState,
    Overtaken,
    ReadRegister,
    Saw,
    WriteRegister,
    Wrote,
)
from equipoise.balancer.leadership.lease import Candidate, LeaseTiming, Sighting

TIMING = LeaseTiming(duration_s=3.0, renew_deadline_s=2.0, retry_s=0.5, request_timeout_s=0.5)


class Register:
    """A record and how often it was replaced."""

    def __init__(self) -> None:
        self.sighting = None
        self.writes = 0

    def write(self, request: WriteRegister):
        version = self.sighting.version if self.sighting else None
        if request.replacing != version:
            return None
        self.writes += 1
        self.sighting = Sighting(record=request.record, version=str(self.writes))
        return self.sighting


@dataclass
class Balancer:
    """A candidate with a clock of its own; what it cannot reach answers nothing."""

    name: str
    register: Register
    state: LeaderState = None
    reachable: bool = True
    running: bool = True
    skew_s: float = 0.0
    term_offset: int = 1
    terms: list = field(default_factory=list)

    def __post_init__(self) -> None:
        address = f"{self.name}:7070"
        candidate = Candidate(name=self.name, address=address, term_offset=self.term_offset)
        self.state = LeaderState(candidate=candidate, timing=TIMING)

    def apply(self, event, true_s):
        self.state, request = self.state.step(event, now=true_s + self.skew_s)
        if self.state.role is LeaderRole.LEADING and self.state.term not in self.terms:
            self.terms.append(self.state.term)
        return request

    def round(self, true_s):
        """One round in which every request is answered at once, or not at all."""
        if not self.running:
            return
        request = self.apply(Due(), true_s)
        while request is not None:
            request = self.apply(self.answer(request, true_s), true_s)

    def answer(self, request, true_s):
        if not self.reachable:
            return Failed(reason="no answer")
        if isinstance(request, ReadRegister):
            return Saw(sighting=self.register.sighting)
        written = self.register.write(request)
        if written is None:
            return Overtaken()
        return Wrote(sighting=written, sent_s=true_s + self.skew_s)

    def leads(self, true_s) -> bool:
        return self.running and self.state.leads(now=true_s + self.skew_s)


def run(balancers, *, from_s, to_s):
    """Rounds every half second; returns when each moment had whom leading."""
    history = []
    now = from_s
    while now < to_s:
        for balancer in balancers:
            balancer.round(now)
        leaders = [balancer.name for balancer in balancers if balancer.leads(now)]
        assert len(leaders) <= 1, f"{leaders} lead at {now}"
        history.append((now, leaders))
        now += TIMING.retry_s
    return history
