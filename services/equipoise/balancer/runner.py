"""`PoolRunner`: carries out one pool's effects, in order, each with a timeout.

It owns the pool's streams, ticks and writes. `equipoise.pool` decides.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from opentelemetry.trace import Tracer

from equipoise.balancer.answers import Answers
from equipoise.balancer.changed import Changed
from equipoise.balancer.clock import Clock, tick_s
from equipoise.balancer.errors import UnansweredError
from equipoise.balancer.leadership.elector import Tenure
from equipoise.balancer.loop_share import LoopShare, LoopShares
from equipoise.balancer.mailbox import Mailbox
from equipoise.balancer.message_limit import MessageLimit
from equipoise.balancer.planner.planning import (
    Planner,
    PlannerDiedError,
    Planning,
    PlanTimeoutError,
)
from equipoise.balancer.pool_log import PoolLog
from equipoise.balancer.pool_writes import PoolWrites
from equipoise.balancer.spans import PoolSpans
from equipoise.balancer.store.store import Store
from equipoise.balancer.wave_turns import WaveTurns
from equipoise.planning.redundancy import Redundancy, RedundancyHistory
from equipoise.pool.controller import PoolController
from equipoise.pool.counters import answer_timeout_s
from equipoise.pool.effects import (
    Chain,
    Effect,
    Log,
    Propose,
    Reply,
    Send,
    WriteProposed,
)
from equipoise.pool.hello_checks import check_name
from equipoise.pool.pool import Pool
from equipoise.pool.requests import AdminRequest, Answer, Operation, Rebalance
from equipoise.telemetry.logs import about, is_worth_logging
from equipoise.wire.balancer_messages import Abort, HeartbeatAck, JoinEpoch, Stage
from equipoise.wire.checks import MAX_RANKS
from equipoise.wire.encoder import Encoder
from equipoise.wire.messages import Hello, WorkerMessage

COMPARE_S = 5.0
"""Seconds between two looks at what the store has of the pool: a failover may have lost writes."""

STREAM_LINES_PER_S = 2.0
"""Lines about streams that begin and end, in the long run; at once as many as a pool that restarts
has."""

_OVER = "this balancer no longer leads: ask the next leader for the status"

_log = logging.getLogger(__name__)


class PoolRunner:
    """Runs one pool until its task is cancelled; `closed` once its streams have ended.

    `tenure` fences writes and messages: when it is over, no more effects are carried out. `clock`
    gives unix time that never runs backwards. `wave_turns` decides when waves begin, by how long
    the streams take to send messages, which they encode with `encoder`. All work for the pool is
    charged to its share of the event loop, that on messages by the streams.
    """

    def __init__(
        self,
        controller: PoolController,
        *,
        store: Store,
        tenure: Tenure,
        planner: Planner,
        wave_turns: WaveTurns,
        loop_shares: LoopShares,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._controller = controller
        self._spans = PoolSpans(controller.pool.name, tracer=tracer)
        self._log = PoolLog(_log, pool=controller.pool, tenure=tenure)
        self._tenure = tenure
        self._clock = clock
        self._planning = Planning(controller.pool.name, planner=planner)
        self.wave_turns = wave_turns
        self._loop_shares = loop_shares
        self._mailboxes: dict[str, Mailbox] = {}
        # Chains to carry out; None stands for a look at the store, while nothing is written.
        self._chains: asyncio.Queue[Chain | None] = asyncio.Queue()
        # Generations of waves that have had their turn.
        self._may_begin: set[int] = set()
        self._changed = Changed()
        self._answers = Answers()
        self._writes = PoolWrites(
            controller, store=store, tenure=tenure, answers=self._answers, log=self._log
        )
        self.encoder = Encoder()
        self._stream_lines = MessageLimit(per_s=STREAM_LINES_PER_S, burst=4.0 * MAX_RANKS)
        self._num_left_out = 0
        self.closed = False
        self._redundancy = RedundancyHistory()
        self.empty_since_s: float | None = clock()
        """When the last worker left, in unix seconds; None while there are workers."""

    @property
    def loop_share(self) -> LoopShare:
        """The event loop's time that the pool may take."""
        return self._loop_shares.of(self.pool.name)

    @property
    def leads(self) -> bool:
        """Whether messages may still be sent; checked right before each of them."""
        return self._tenure.holds()

    @property
    def pool(self) -> Pool:
        """The pool, to be read only."""
        return self._controller.pool

    @property
    def redundancy(self) -> Redundancy | None:
        """A number of redundant slots that the latest plans found better than the present one."""
        return self._redundancy.shown

    def admit(self, hello: Hello, mailbox: Mailbox, *, is_certified: bool = False) -> None:
        """Let a worker in; an earlier stream of it is closed.

        `is_certified` says that its own credentials name it, and not only its pool.

        Raises:
            RejectedWorkerError: it cannot be in this pool; an earlier stream of it stays.
        """
        member = self.pool.roster.members.get(hello.worker)
        live = member.hello if member is not None and member.connected else None
        check_name(hello, live, is_certified=is_certified)
        # Not at the pool's turn: for a new pool, other pools had to give way first.
        with self.loop_share.charged():
            chain = self._controller.hello(hello, now=self._clock())
        previous = self._mailboxes.get(hello.worker)
        if previous is not None:
            previous.close()
        self._mailboxes[hello.worker] = mailbox
        self.empty_since_s = None
        newer = "" if previous is None else ", with a newer stream"
        self._log_stream(hello.worker, f"connected from {hello.address}{newer}")
        self._submit(chain)

    def receive(self, worker: str, mailbox: Mailbox, value: WorkerMessage) -> None:
        """Handle a worker's message; messages of a replaced stream are dropped.

        Raises:
            InvalidMessageError, InvalidReportError: it cannot be used; the stream continues.
        """
        if self._mailboxes.get(worker) is mailbox:
            self._submit(self._controller.message(worker, value, now=self._clock()))

    def reject(self, worker: str, *, kind: str, reason: str) -> None:
        """Count a rejected message and send the reason to its worker."""
        self._submit(self._controller.reject(worker, kind=kind, reason=reason))
        self._log_rejection(worker, kind=kind, reason=reason)

    def reject_stream(self, worker: str, *, kind: str, reason: str) -> None:
        """Count a stream that was not admitted; a live stream of that name does not notice."""
        self._controller.count_rejection(kind, reason)
        self._log_rejection(worker, kind=kind, reason=reason)

    def _log_stream(self, worker: str, what: str) -> None:
        """Log that a stream begins or ends; who does both without end must not flood the log."""
        if not self._stream_lines.take(now=self._clock()):
            self._num_left_out += 1
            return
        if self._num_left_out:
            self._log.info("left out %d lines about streams", self._num_left_out)
            self._num_left_out = 0
        self._log.info("worker %s %s", worker, what, extra=self._about(worker))

    def _log_rejection(self, worker: str, *, kind: str, reason: str) -> None:
        count = self.pool.counters.rejections.of(kind)
        if is_worth_logging(count):  # A worker that repeats itself must not flood the log.
            fields = self._about(worker)
            self._log.warning("rejected (%s, time %d): %s", kind, count, reason, extra=fields)

    def count_poison(self, gateway: str, num_rejected: int) -> None:
        """A gateway's process reports how many requests it has rejected because ranks failed."""
        self._controller.count_poison(gateway, num_rejected)

    def leave(self, worker: str, mailbox: Mailbox, *, reason: str) -> None:
        """A stream has ended; ignored unless it is the worker's newest."""
        if self._mailboxes.get(worker) is not mailbox:
            return
        del self._mailboxes[worker]
        if not self._mailboxes:
            self.empty_since_s = self._clock()
        self._log_stream(worker, f"is gone: {reason}")
        with self.loop_share.charged():
            self._submit(self._controller.lost(worker, reason=reason, now=self._clock()))

    async def administer(self, operation: Operation, *, who: str, reason: str, what: str) -> Answer:
        """Carry out an operator's request once it is recorded; `what` describes the operation.

        Raises:
            UnansweredError: the store did not accept the record, or this balancer no longer leads.
        """
        if self.closed:
            raise UnansweredError(_OVER)
        timeout_s = answer_timeout_s(self.pool.policy.values)
        async with self._answers.asked(timeout_s=timeout_s) as (ticket, answer):
            request = AdminRequest(
                ticket=ticket, who=who, reason=reason, what=what, operation=operation
            )
            self._submit(self._controller.administer(request, now=self._clock()))
            return await answer

    def retire(self, *, elsewhere: str) -> Pool:
        """This balancer no longer leads; returns the pool for display."""
        return self._controller.hand_over(elsewhere)

    def close_streams(self) -> None:
        """The balancer stops: end the streams of workers, watchers and operators."""
        self.closed = True
        self._answers.fail_all(_OVER)
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._changed.notify()

    async def until_changed(self, revision: int) -> None:
        """Wait until the pool's revision differs from `revision`, or it is closed."""
        while self.pool.revision == revision and not self.closed:
            await self._changed.wait()

    async def run(self) -> None:
        """Tick, and carry out effects, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._look_at_store())
            while True:
                chain = await self._chains.get()
                with self._surviving("carrying out a decision"):
                    if chain is None:
                        await self._writes.restore_lost()
                    else:
                        await self._perform(chain, tasks)

    async def _tick(self) -> None:
        latest_s = 0.0
        while True:
            await asyncio.sleep(tick_s(self.pool.policy.values, latest_s=latest_s))
            began_s = time.thread_time()
            with self._surviving("a tick"), self.loop_share.charged():
                self._submit(self._controller.tick(now=self._clock()))
            latest_s = time.thread_time() - began_s

    async def _look_at_store(self) -> None:
        while True:
            await asyncio.sleep(COMPARE_S)
            self._chains.put_nowait(None)

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Log a bug instead of letting it end the pool's streams."""
        try:
            yield
        except Exception:  # noqa: BLE001
            self._log.exception("%s failed", what)

    def _submit(self, chain: Chain) -> None:
        """Queue a chain; heartbeats are answered at once: a slow store is not a hung balancer."""
        self._spans.follow(self.pool.rollouts)
        rest: list[Effect] = []
        for effect in chain:
            if isinstance(effect, Log):
                self._write_log(effect)
            elif isinstance(effect, Send) and isinstance(effect.message, HeartbeatAck):
                self._post(effect)
            else:
                rest.append(effect)
        if rest:
            self._chains.put_nowait(tuple(rest))
        self._changed.notify()

    def _about(self, worker: str) -> dict[str, Any]:
        """Fields of a line about one of the workers."""
        member = self.pool.roster.members.get(worker)
        return about(worker=worker, rank=member.rank if member is not None else None)

    def _write_log(self, line: Log) -> None:
        level = logging.WARNING if line.is_warning else logging.INFO
        fields = about(
            rank=line.rank, epoch=line.epoch, generation=line.generation, worker=line.worker
        )
        self._log.log(level, "%s", line.text, extra=fields)

    async def _perform(self, chain: Chain, tasks: asyncio.TaskGroup) -> None:
        for place, effect in enumerate(chain):
            if not self._tenure.holds():
                return
            if isinstance(effect, WriteProposed) and not self._takes_turn(effect):
                # Only the effects after it wait for its turn, nothing else of the pool.
                tasks.create_task(self._begin_later(chain[place:]))
                return
            match effect:
                case Send():
                    with self.loop_share.charged():
                        self._post(effect)
                case Reply():
                    self._reply(effect)
                case Propose():
                    tasks.create_task(self._propose(effect))
                case Log():
                    pass  # It was written when the chain was queued.
                case _:
                    written = await self._writes.write(effect, behind=chain[place + 1 :])
                    if written is None:
                        self._changed.notify()
                        return
                    with self.loop_share.charged():
                        self._submit(self._controller.written(written, now=self._clock()))

    def _takes_turn(self, wave: WriteProposed) -> bool:
        """Whether a wave has had its turn; it can be used once."""
        may_begin = wave.layout.generation in self._may_begin
        self._may_begin.discard(wave.layout.generation)
        return may_begin

    async def _begin_later(self, chain: Chain) -> None:
        """Carry out a chain that begins with a wave at its turn; skip the wave if it is over."""
        wave, *behind = chain
        assert isinstance(wave, WriteProposed), "only waves wait"
        generation = wave.layout.generation

        def is_wanted() -> bool:
            current = self.pool.rollouts.current
            return current is not None and current.target.generation == generation

        with self._surviving("waiting for the turn of a wave"):
            may_begin = await self.wave_turns.turn(
                self.pool.name,
                num_ranks=wave.layout.num_ranks,
                is_first=self.pool.rollouts.is_at_first,
                policy=self.pool.policy.values,
                is_wanted=is_wanted,
            )
            if may_begin:
                self._may_begin.add(generation)
                self._chains.put_nowait(chain)
            elif behind:
                self._chains.put_nowait(tuple(behind))

    def _post(self, send: Send) -> None:
        mailbox = self._mailboxes.get(send.worker)
        if mailbox is None:
            return
        match send.message:
            case Stage() as push:
                parent = self._spans.parent_for_ranks(push.layout.generation)
                mailbox.post(replace(push, term=self._tenure.term, traceparent=parent))
            case JoinEpoch() | Abort() as push:
                mailbox.post(replace(push, term=self._tenure.term))
            case message:
                mailbox.post(message)

    def _reply(self, reply: Reply) -> None:
        request, answer = reply.request, reply.answer
        self._log.info("%s: %s: %s", request.who, request.what, answer.reason)
        self._answers.give(request.ticket, answer)

    async def _propose(self, effect: Propose) -> None:
        with self._surviving("planning"):
            await self._plan(effect)

    async def _plan(self, effect: Propose) -> None:
        started_s = time.perf_counter()
        spans = self._spans.planning()
        try:
            is_awaited = effect.requested_by is not None and isinstance(
                effect.requested_by.operation, Rebalance
            )
            with self.wave_turns.expecting() if is_awaited else nullcontext():
                proposal = await self._planning.propose(effect.request)
        except (PlanTimeoutError, PlannerDiedError) as error:
            self._log.error("%s", error)
            spans.abandoned(str(error))
            self._give_up_plan(effect, str(error), timed_out=isinstance(error, PlanTimeoutError))
            return
        except Exception as error:  # noqa: BLE001
            # A bug, which must not end the pool's streams.
            self._log.exception("planning failed")
            reason = f"the planner failed ({error!r}); the next window tries again"
            spans.abandoned(reason)
            self._give_up_plan(effect, reason, timed_out=False)
            return
        plan_ms = 1000 * (time.perf_counter() - started_s)
        spans.made(proposal)
        self._redundancy = self._redundancy.after(proposal.redundancy)
        with self._surviving("adopting a plan"), self.loop_share.charged():
            before = self.pool.rollouts.current
            chain = self._controller.proposed(
                proposal, plan_ms=plan_ms, now=self._clock(), requested_by=effect.requested_by
            )
            self._spans.decided(spans, adopted=self.pool.rollouts.current is not before)
            self._submit(chain)

    def _give_up_plan(self, effect: Propose, reason: str, *, timed_out: bool) -> None:
        failed = self._controller.proposal_failed(
            reason, timed_out=timed_out, now=self._clock(), requested_by=effect.requested_by
        )
        self._submit(failed)
