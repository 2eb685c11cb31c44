"""`PoolSpans`: a pool's plans and rollouts as traces, read from its state; it changes nothing.

One rebalancing is one trace: its plan and, for each wave, the stage and the switch, with the spans
of the ranks below them.
"""

from opentelemetry.trace import Span, Tracer, set_span_in_context

from equipoise.planning.proposal import Proposal
from equipoise.planning.rollout import State, Wave
from equipoise.pool.rollouts import Rollouts
from equipoise.telemetry.tracing import failed, traceparent_of


class PoolSpans:
    """The spans of one pool. A span that is open when the balancer ends is never exported."""

    def __init__(self, pool: str, *, tracer: Tracer) -> None:
        self._tracer = tracer
        self._pool = pool
        self._rebalance: Span | None = None
        self._wave: Span | None = None
        self._phase: Span | None = None
        self._seen: Wave | None = None
        self._generation = 0
        self._state: State | None = None

    def planning(self) -> "PlanSpans":
        """Begin a trace with a plan."""
        root = self._open("rebalance")
        return PlanSpans(root, plan=self._open("plan", below=root))

    def decided(self, planned: "PlanSpans", *, adopted: bool) -> None:
        """There is a verdict on a plan; if adopted, the rollout belongs to its trace."""
        if adopted:
            self._rebalance = planned.root
        else:
            planned.root.end()

    def parent_for_ranks(self, generation: int) -> str:
        """The traceparent for ranks that stage a generation, or an empty one."""
        if self._wave is None or generation != self._generation:
            return ""
        return traceparent_of(self._wave)

    def follow(self, rollouts: Rollouts) -> None:
        """Open and end spans for the state of the latest wave; called after every change."""
        wave = rollouts.latest
        if wave is self._seen:
            return  # As after most messages.
        self._seen = wave
        if wave is None:
            # Its epoch is over.
            self._end("abandoned: a new epoch began")
            return
        if wave.target.generation != self._generation:
            self._begin_wave(wave, moves=rollouts.moves)
        if wave.state is not self._state:
            self._enter(wave)
        if wave.is_over and not rollouts.waves_left:
            self._end(wave.reason if wave.state is State.ABORTED else "")

    def _begin_wave(self, wave: Wave, *, moves: int) -> None:
        if wave.is_over:
            return
        self._close_phase()
        if self._wave is not None:
            self._wave.end()
        if self._rebalance is None:
            # An operator's, or one that an earlier balancer started.
            self._rebalance = self._open("rebalance")
        self._wave = self._open("wave", below=self._rebalance)
        self._wave.set_attributes({"generation": wave.target.generation, "moves": moves})
        self._generation, self._state = wave.target.generation, None

    def _enter(self, wave: Wave) -> None:
        self._state = wave.state
        if self._wave is None:
            return
        if wave.state is State.STAGING:
            self._open_phase("stage")
        elif wave.state is State.STAGED:
            self._open_phase("switch")
        elif wave.state is State.SWITCHED:
            self._open_phase("commit")
        elif wave.state is State.ABORTED and self._phase is not None:
            failed(self._phase, wave.reason)
        if wave.switch_step is not None:
            self._wave.set_attribute("step", wave.switch_step)

    def _open_phase(self, name: str) -> None:
        self._close_phase()
        self._phase = self._open(name, below=self._wave)
        self._phase.set_attribute("generation", self._generation)

    def _close_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
        self._phase = None

    def _end(self, fault: str) -> None:
        self._close_phase()
        for span in (self._wave, self._rebalance):
            if span is not None:
                if fault:
                    failed(span, fault)
                span.end()
        self._wave = self._rebalance = None

    def _open(self, name: str, *, below: Span | None = None) -> Span:
        parent = set_span_in_context(below) if below is not None else None
        return self._tracer.start_span(name, context=parent, attributes={"pool": self._pool})


class PlanSpans:
    """The spans of a plan that is being made, with the trace that begins with it."""

    def __init__(self, root: Span, *, plan: Span) -> None:
        self.root = root
        self._plan = plan

    def made(self, proposal: Proposal) -> None:
        """The plan is ready, with its verdict."""
        verdict = proposal.verdict
        self._plan.set_attributes(
            {
                "algorithm": proposal.plan.algorithm.value,
                "accepted": verdict.accepted,
                "reason": verdict.reason,
                "moves": verdict.moves,
                "bytes": verdict.bytes,
            }
        )
        self._plan.end()

    def abandoned(self, reason: str) -> None:
        """There will be no plan."""
        failed(self._plan, reason)
        self._plan.end()
        self.root.end()
