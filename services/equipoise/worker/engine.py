"""`Engine`: the step loop of one rank, on a thread of its own; it blocks only on peer ranks.

A step is: exchange headers, switch if all ranks can, run the scheduled tokens, publish what was
sampled. Other threads call a few short methods, which take effect when the next step starts; the
engine calls out once per step. It is independent of gRPC and the balancer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from torch.distributed import DistError

from equipoise.rank.engine import EngineProgress
from equipoise.rank.header import (
    Leaving,
    StepHeader,
    agreed_generation,
    balances_replicas,
    check_group,
    digest_word,
    staged_conflict,
    takes_two_hops,
)
from equipoise.rank.held import StagedGeneration
from equipoise.telemetry.histogram import Histogram
from equipoise.wire.inference_messages import Blame
from equipoise.wire.messages import LayoutRejected, Switched
from equipoise.worker.core import ModelCore
from equipoise.worker.errors import StepError
from equipoise.worker.group import RankGroup, collective_failed
from equipoise.worker.hops import HopChoice, Hops
from equipoise.worker.micro_batches import num_second
from equipoise.worker.placement import HeldSlots
from equipoise.worker.prefill_cost import PrefillCostFit
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Emission, Request, StepPlan
from equipoise.worker.statistics import node_counts, rank_stats
from equipoise.worker.step_inputs import (
    draft_lines,
    draft_tokens,
    sampling_rows,
    step_batch,
    tokens_by_batch,
    wanted_logits,
)
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.drafting import Drafter
from equipoise_model.exchange import ExchangeError
from equipoise_model.placement import PlacementTables
from equipoise_model.ranges import named
from equipoise_model.sampling import sample, score
from equipoise_model.sampling_params import SampledToken
from equipoise_model.step import StepOutput

IDLE_WAIT_S = 0.005
"""How often an idle rank looks for its peers' work; its own work wakes it at once."""

LONG_IDLE_WAIT_S = 0.03
"""The same after `LONG_IDLE_TURNS` idle turns: a header exchange costs about 1 ms of CPU time."""

LONG_IDLE_TURNS = 100

_log = logging.getLogger(__name__)
Visited = TypeVar("Visited")
_UNREPORTED_STEPS, _MEDIAN_STEPS = 4096, 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """A step's published result, and the epoch and generation it ran in."""

    epoch: int
    step: int
    generation: int
    emissions: tuple[Emission, ...]
    switch: Switched | None
    rejected: LayoutRejected | None
    """Set if the ranks cannot switch to what they staged."""


class Engine:
    """Generates tokens as one rank of an epoch.

    Steps are counted from 1 in every epoch, because ranks that come together must agree on them.
    """

    def __init__(
        self,
        *,
        core: ModelCore,
        experts: ExpertParallel,
        held: HeldSlots,
        group: RankGroup,
        scheduler: Scheduler,
        publish: Callable[[StepResult], None],
        step_s: Histogram,
        drafter: Drafter | None,
        prefill_cost: PrefillCostFit | None = None,
        cut_from_tokens: int = 0,
        hops: Hops = Hops.AUTO,
        wants_balance: bool = False,
        after_turn: Callable[[int], None] = lambda _num_steps: None,
    ) -> None:
        """`publish` is called on the engine's thread after each step that has a result to publish.

        It must not block. `step_s` collects the durations of steps. `drafter` guesses tokens for
        the scheduler to have verified; without one, a step gives each request one token.
        `prefill_cost` continues to be fitted; by default a new one is. This rank cuts its steps
        from `cut_from_tokens` tokens on into two micro-batches, or never if that is 0. Its rows
        travel to other nodes by `hops`, and their replicas are balanced in each step if
        `wants_balance`, if most ranks choose the same.
        `after_turn` is called on the engine's thread with the number of steps so far.
        """
        self._model = core.model
        self._cache = core.cache
        self._drafter = drafter
        self._experts = experts
        self._held = held
        self._group = group
        self._scheduler = scheduler
        self._publish, self._after_turn = publish, after_turn
        self._step_s, self._step_s_before = step_s, step_s.sum
        self._prefill_cost, self._cut_from_tokens = (
            prefill_cost or PrefillCostFit(),
            cut_from_tokens,
        )
        self._hops = HopChoice(hops, sums_on_nodes=core.operations.sums_on_nodes)
        self._wants_balance = wants_balance
        self._nodes = node_counts(experts.spread)
        self._assumed_parity_tokens = core.parity_tokens
        # Guards what both the engine and other threads touch; held for microseconds.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._staged: StagedGeneration[PlacementTables] | None = None
        self._leaving = Leaving.NOT
        self._num_idle_turns = 0
        self._num_steps = 0
        self._busy_s = 0.0
        self._loads = experts.loads()
        self._recent_us: deque[int] = deque(maxlen=_MEDIAN_STEPS)
        self._unreported_us: deque[int] = deque(maxlen=_UNREPORTED_STEPS)

    # For any thread.

    @property
    def generation(self) -> int:
        """Generation of the latest step."""
        return self._held.contents.layout.generation

    @property
    def staged_generation(self) -> int:
        """Generation that is ready for the switch; 0 if there is none."""
        staged = self._staged
        return staged.generation if staged else 0

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens arrive through `publish`.

        Raises:
            QueueFullError: the queue is full.
        """
        with self._lock:
            self._scheduler.submit(request)
        self._wake.set()

    def cancel(self, key: int) -> None:
        """Forget a request, if there is one with this key."""
        with self._lock:
            self._scheduler.cancel(key)

    def visit(self, act: Callable[[Scheduler], Visited]) -> Visited:
        """Let `act` use the scheduler and its blocks, for at most the time of one block's copy."""
        with self._lock:
            visited = act(self._scheduler)
        self._wake.set()
        return visited

    def latest_step_if_waiting(self, key: int) -> tuple[int, int] | None:
        """Return the latest step's epoch and number if the request waits for its turn."""
        with self._lock:
            is_waiting = self._scheduler.is_waiting(key)
            return (self._group.epoch, self._num_steps) if is_waiting else None

    def offer(self, staged: StagedGeneration[PlacementTables]) -> bool:
        """Make a generation ready for the switch, in place of any other.

        Returns False, and changes nothing, if the ranks have left its base generation.
        """
        staged.contents.layout.digest()  # Computed here, so that no step waits for it.
        with self._lock:
            if staged.base_generation != self.generation:
                return False
            self._staged = staged
        self._wake.set()
        return True

    def drop(self, generation: int) -> None:
        """Forget the staged generation, if it has this number.

        A switch whose headers have been exchanged still happens: the other ranks make it.
        """
        with self._lock:
            if self.staged_generation == generation:
                self._staged = None

    def leave(self, why: Leaving = Leaving.IN_ORDER) -> None:
        """Announce it in the next header and end `run` afterwards."""
        with self._lock:
            self._leaving = max(self._leaving, why)
        self._wake.set()

    def progress(self) -> EngineProgress:
        """Return counters for a report; the median step is of the steps since the last call."""
        with self._lock:
            stats = rank_stats(
                self._scheduler,
                num_steps=self._num_steps,
                median_step_us=_median(self._unreported_us),
                busy_s=self._busy_s,
                step_s=self._step_s.sum - self._step_s_before,
                parity_tokens=self._prefill_cost.parity_tokens or self._assumed_parity_tokens,
                nodes=self._nodes,
            )
            self._unreported_us.clear()
            return EngineProgress(loads=self._loads, stats=stats)

    # For the engine's thread.

    def run(self) -> None:
        """Step until `leave` is called.

        Raises:
            GroupError: a peer failed, left or disagrees; no further step is possible.
            StepError: a step failed on this rank; names the requests that it ran.
        """
        while self._turn():
            self._after_turn(self._num_steps)

    def _turn(self) -> bool:
        """Exchange headers and do what they agree on; returns False when this rank leaves."""
        began, waited_s = time.perf_counter(), self._waited_s
        self._wake.clear()
        with self._lock:
            plan = self._scheduler.plan(now=time.monotonic())
            if blocks := self._scheduler.blocks.take_to_clear():
                self._cache.clear(blocks)
            staged, leaving = self._staged, self._leaving
        headers = self._group.exchange(self._header(plan, staged, leaving=leaving))
        if any(header.leaving == Leaving.DAMAGED for header in headers):
            with self._lock:
                self._scheduler.forget_latents()
        if leaving:
            return False
        check_group(headers, names=self._group.names)
        switch, rejected = None, None
        if staged is not None:
            if agreed_generation(headers) is not None:
                switch = self._switch(staged)
            elif reason := staged_conflict(headers, names=self._group.names):
                rejected = self._reject(staged, reason)
        emissions: tuple[Emission, ...] = ()
        is_idle = not any(header.num_tokens for header in headers)
        if not is_idle:
            with named("step"):
                emissions = self._step(plan, headers, began=began)
            with self._lock:
                # A rank that waits for its peers is not busy.
                waited_s = self._waited_s - waited_s
                busy_s = max(0.0, time.perf_counter() - began - waited_s)
                self._busy_s += busy_s
                mean_tokens = sum(header.num_tokens for header in headers) / len(headers)
                self._prefill_cost.add(plan, mean_tokens=mean_tokens, busy_s=busy_s)
        if emissions or switch or rejected:
            self._publish(
                StepResult(
                    epoch=self._group.epoch,
                    step=self._num_steps,
                    generation=self.generation,
                    emissions=emissions,
                    switch=switch,
                    rejected=rejected,
                )
            )
        self._num_idle_turns = self._num_idle_turns + 1 if is_idle else 0
        if is_idle:
            self._wake.wait(idle_wait_s(self._num_idle_turns))
        return True

    def _header(
        self, plan: StepPlan, staged: StagedGeneration[PlacementTables] | None, *, leaving: int
    ) -> StepHeader:
        return StepHeader(
            epoch=self._group.epoch,
            step=self._num_steps,
            num_tokens=plan.num_tokens,
            num_drafts=self._num_drafts(plan),
            generation=self.generation,
            staged_generation=staged.generation if staged else 0,
            leaving=leaving,
            peers_digest=self._group.peers_digest,
            layout_digest=digest_word(self._held.contents.layout.digest()),
            staged_digest=digest_word(staged.contents.layout.digest()) if staged else 0,
            num_second=num_second(
                plan,
                least_tokens=self._cut_from_tokens,
                parity_tokens=self._assumed_parity_tokens,
            ),
            wants_two_hops=int(self._hops.wants_two(self._nodes)),
            wants_balance=int(self._wants_balance),
        )

    @property
    def _waited_s(self) -> float:
        """Total time this rank has spent in exchanges with its peers, seconds."""
        return self._group.waited_s + self._experts.waited_s

    def _switch(self, staged: StagedGeneration[PlacementTables]) -> Switched:
        """Use a staged generation from the coming step on; serving stalls while this runs."""
        began = time.perf_counter()
        self._held.switch(staged)
        self._experts.switch(staged.tables)
        stall_us = _microseconds_since(began)
        loads = self._experts.loads()
        with self._lock:
            # Whatever is staged by now starts from the generation that has just ended.
            self._staged = None
            self._loads = loads
            return Switched(
                epoch=self._group.epoch,
                rank=self._group.rank,
                generation=staged.generation,
                checksums=staged.contents.checksums,
                layout_digest=staged.contents.layout.digest(),
                step=self._num_steps + 1,
                stall_us=stall_us,
                median_step_us=_median(self._recent_us),
            )

    def _reject(self, staged: StagedGeneration[PlacementTables], reason: str) -> LayoutRejected:
        """Drop a staged generation, unless another has replaced it."""
        with self._lock:
            if self._staged is staged:
                self._staged = None
        return LayoutRejected(
            epoch=self._group.epoch,
            rank=self._group.rank,
            generation=staged.generation,
            reason=reason,
        )

    def _step(
        self, plan: StepPlan, headers: tuple[StepHeader, ...], *, began: float
    ) -> tuple[Emission, ...]:
        """Run a plan's tokens, even none, together with the other ranks, and commit the result."""
        tokens_by_rank = [header.num_tokens for header in headers]
        self._experts.agree(
            tokens_by_batch(headers),
            is_two_hop=takes_two_hops(headers),
            is_balanced=balances_replicas(headers),
        )
        # Other ranks' tokens run here too, up to the logits and while drafting.
        num_foreign = sum(tokens_by_rank) - plan.num_tokens
        try:
            output = self._model.step(step_batch(plan), self._cache, self._experts)
            num_foreign = 0
            scoring_SV, sampling_SV = wanted_logits(plan, output.logits_SV)
            scores = score(
                scoring_SV,
                [token for c in plan.chunks for token in c.scored],
                num_top=[c.num_top for c in plan.chunks for _ in c.scored],
            )
            sampled = sample(sampling_SV, sampling_rows(plan))
            if tokens_by_depth := draft_tokens(headers):
                num_foreign = sum(tokens_by_depth[0]) - tokens_by_depth[0][self._group.rank]
            drafts = self._draft(plan, sampled, output, tokens_by_depth)
            loads, nodes = self._experts.loads(), node_counts(self._experts.spread)
        # On a device a collective may fail as late as when its result is read.
        except (ExchangeError, DistError) as error:
            raise collective_failed(error) from error
        except Exception as error:
            keys = tuple(chunk.key for chunk in plan.chunks)
            blame = Blame.REQUEST if len(keys) == 1 and not num_foreign else Blame.STEP
            words = f"step {self._num_steps + 1} failed with {len(keys)} requests in it: {error}"
            _log.exception("%s", words)
            raise StepError(words, keys=keys, blame=blame) from error
        with self._lock:
            emissions = self._scheduler.commit(
                plan, sampled, drafts, scores=scores, now=time.monotonic()
            )
            self._num_steps += 1
            self._loads, self._nodes = loads, nodes
            duration_us = _microseconds_since(began)
            self._recent_us.append(duration_us)
            self._unreported_us.append(duration_us)
            self._step_s.observe(duration_us / 1e6)
        return tuple(emissions)

    def _num_drafts(self, plan: StepPlan) -> int:
        """Draft modules that this rank runs on a plan's tokens."""
        if self._drafter is None or not (plan.drafts and plan.num_tokens):
            return 0
        return self._drafter.num_drafts

    def _draft(
        self, plan: StepPlan, sampled: list[SampledToken], output: StepOutput, rows: list[list[int]]
    ) -> dict[int, tuple[int, ...]]:
        """Return guesses, by request, at what follows this step; `rows` as of `draft_tokens`."""
        if self._drafter is None or not rows:
            return {}
        chunks = plan.chunks if self._num_drafts(plan) else ()
        lines = draft_lines(plan, sampled) if chunks else []
        guesses = self._drafter.draft(output, lines, rows)
        return {chunk.key: guess for chunk, guess in zip(chunks, guesses, strict=True)}


def idle_wait_s(num_idle_turns: int) -> float:
    """Return how long to sleep after this many consecutive idle turns, seconds."""
    return LONG_IDLE_WAIT_S if num_idle_turns > LONG_IDLE_TURNS else IDLE_WAIT_S


def _median(durations_us: deque[int]) -> int:
    return round(median(durations_us)) if durations_us else 0


def _microseconds_since(began: float) -> int:
    return round((time.perf_counter() - began) * 1e6)
