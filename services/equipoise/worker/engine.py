"""`Engine`: the step loop of one rank, on a thread of its own; it waits for nobody but peers.

A step is: exchange headers, switch if all ranks can, run the scheduled tokens, hand out what was
sampled. Other threads reach in through a few short verbs, whose effect shows at the next step's
start; the engine reaches out through one call per step. It knows nothing of gRPC or the balancer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.distributed import DistError

from equipoise.planning.arrays import Checksums
from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.wire.inference import Blame
from equipoise.wire.messages import RankStats
from equipoise.worker.errors import StepError
from equipoise.worker.group import RankGroup, collective_failed
from equipoise.worker.header import StepHeader, agreed_generation, check_group
from equipoise.worker.held import HeldExperts, StagedGeneration
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Emission, Request, StepPlan
from equipoise_model.dispatch import ExpertParallel, SlotLoad
from equipoise_model.drafting import Drafter, DraftLine
from equipoise_model.exchange import ExchangeError
from equipoise_model.latent_cache import LatentCache
from equipoise_model.sampling import sample
from equipoise_model.sampling_params import SampledToken
from equipoise_model.serving_model import ServingModel
from equipoise_model.step import StepBatch, StepOutput

IDLE_WAIT_S = 0.005
"""An idle rank looks for its peers' work this often, and for its own at once."""

LONG_IDLE_WAIT_S = 0.03
"""The same after `_LONG_IDLE_TURNS` in vain: an exchange of headers costs about 1 ms of CPU."""

_LONG_IDLE_TURNS = 100

_log = logging.getLogger(__name__)

_STEP_LOG_LENGTH = 4096
_MEDIAN_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Switch:
    """A switch as this rank saw it: `step` is the first in the new generation.

    `checksums` are of all own slots behind it, uint8 [layers, slots_per_rank, 16].
    """

    generation: int
    checksums: Checksums
    step: int
    stall_us: int
    median_step_us: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step gave to the world, and the epoch and generation it ran in."""

    epoch: int
    step: int
    generation: int
    emissions: tuple[Emission, ...]
    switch: Switch | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """Counters as they stood at a step's end: of this generation, then of the one before."""

    loads: tuple[SlotLoad, ...]
    stats: RankStats


class Engine:
    """Generates tokens as rank `group.rank` of an epoch, for the requests of `scheduler`.

    Steps are counted from 1 in every epoch, because ranks that come together must agree on them.

    `names` are the workers' names in rank order, for people. `publish` is called on the engine's
    thread behind every step that made tokens or switched, and must not block. `drafter` guesses
    tokens for the scheduler to have verified; without one, each step gives a request one token.
    `step_s` counts how long steps take.
    """

    def __init__(
        self,
        *,
        model: ServingModel,
        cache: LatentCache,
        experts: ExpertParallel,
        held: HeldExperts,
        group: RankGroup,
        scheduler: Scheduler,
        epoch: int,
        names: tuple[str, ...],
        publish: Callable[[StepResult], None],
        step_s: Histogram | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._cache = cache
        self._experts = experts
        self._held = held
        self._group = group
        self._scheduler = scheduler
        self._epoch = epoch
        self._names = names
        self._publish = publish
        self._step_s = step_s or Histogram(SHORT_S)
        # Guards everything that both the engine and other threads touch; held for microseconds.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._staged: StagedGeneration | None = None
        self._leaving = False
        self._num_idle_turns = 0
        self._num_steps = 0
        self._busy_s = 0.0
        self._loads = experts.loads()
        self._step_log: deque[tuple[int, int]] = deque(maxlen=_STEP_LOG_LENGTH)
        self._recent_us: deque[int] = deque(maxlen=_MEDIAN_STEPS)
        self._unreported_us: deque[int] = deque(maxlen=_STEP_LOG_LENGTH)

    # For any thread.

    @property
    def generation(self) -> int:
        """Generation of the latest step."""
        return self._held.contents.layout.generation

    @property
    def staged_generation(self) -> int:
        """Generation that waits for the other ranks; 0 if none does."""
        staged = self._staged
        return staged.generation if staged else 0

    @property
    def step_log(self) -> tuple[tuple[int, int], ...]:
        """The latest steps and the generation each ran in, oldest first."""
        with self._lock:
            return tuple(self._step_log)

    def submit(self, request: Request) -> None:
        """Take a request; its tokens come by `publish`.

        Raises:
            QueueFullError: there is no place in line.
        """
        with self._lock:
            self._scheduler.submit(request)
        self._wake.set()

    def cancel(self, key: int) -> None:
        """Forget a request, if it is still known."""
        with self._lock:
            self._scheduler.cancel(key)

    def offer(self, staged: StagedGeneration) -> bool:
        """Have a generation ready for the switch, in place of any other that waits.

        False if the ranks have left its base generation meanwhile; then nothing is changed.
        """
        with self._lock:
            if staged.base_generation != self.generation:
                return False
            self._staged = staged
        self._wake.set()
        return True

    def drop(self, generation: int) -> None:
        """Forget a generation that waits, if it is this one.

        A switch whose headers are exchanged already happens all the same: the other ranks do it.
        """
        with self._lock:
            if self.staged_generation == generation:
                self._staged = None

    def leave(self) -> None:
        """Say so in the next header and end `run` behind it."""
        with self._lock:
            self._leaving = True
        self._wake.set()

    def progress(self) -> Progress:
        """Counters for a report; the median step is of the steps since the last call."""
        with self._lock:
            counts, blocks = self._scheduler.counts, self._scheduler.blocks
            stats = RankStats(
                steps=self._num_steps,
                tokens_processed=counts.processed,
                tokens_generated=counts.generated,
                median_step_us=_median(self._unreported_us),
                active_requests=self._scheduler.num_active,
                queued_requests=self._scheduler.num_queued,
                busy_us=round(self._busy_s * 1e6),
                cache_tokens=blocks.num_blocks * blocks.block_tokens,
                cache_tokens_used=blocks.num_used * blocks.block_tokens,
                prefix_tokens_sought=counts.sought,
                prefix_tokens_found=counts.found,
                requests_paused=counts.paused,
                drafts=counts.drafted,
                drafts_accepted=counts.accepted,
            )
            self._unreported_us.clear()
            return Progress(loads=self._loads, stats=stats)

    # For the engine's thread.

    def run(self) -> None:
        """Step until told to leave.

        Raises:
            GroupError: a peer failed, left or disagrees; no further step is possible.
            StepError: a step failed on this rank; names the requests that it ran.
        """
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One exchange of headers and what follows from it; False when it was the last."""
        began, waited_s = time.perf_counter(), self._waited_s
        self._wake.clear()
        with self._lock:
            plan, staged, leaving = self._scheduler.plan(), self._staged, self._leaving
        headers = self._group.exchange(
            StepHeader(
                epoch=self._epoch,
                step=self._num_steps,
                num_tokens=plan.num_tokens,
                generation=self.generation,
                staged_generation=staged.generation if staged else 0,
                leaving=int(leaving),
            )
        )
        if leaving:
            return False
        check_group(headers, names=self._names)
        switch = None
        if staged is not None and agreed_generation(headers) is not None:
            switch = self._switch(staged)
        tokens_by_rank = [header.num_tokens for header in headers]
        emissions: tuple[Emission, ...] = ()
        if any(tokens_by_rank):
            emissions = self._step(plan, tokens_by_rank, began=began)
            self._note_busy(began=began, waited_s=self._waited_s - waited_s)
        if emissions or switch:
            self._publish(
                StepResult(
                    epoch=self._epoch,
                    step=self._num_steps,
                    generation=self.generation,
                    emissions=emissions,
                    switch=switch,
                )
            )
        self._rest(idle=not any(tokens_by_rank))
        return True

    @property
    def _waited_s(self) -> float:
        """Seconds in which this rank was in exchanges with its peers so far."""
        return self._group.waited_s + self._experts.waited_s

    def _note_busy(self, *, began: float, waited_s: float) -> None:
        """A step is done: what was no wait for peers, this rank worked."""
        with self._lock:
            self._busy_s += max(0.0, time.perf_counter() - began - waited_s)

    def _rest(self, *, idle: bool) -> None:
        """Wait a little when no rank has work; the longer, the longer there was none."""
        self._num_idle_turns = self._num_idle_turns + 1 if idle else 0
        if idle:
            long = self._num_idle_turns > _LONG_IDLE_TURNS
            self._wake.wait(LONG_IDLE_WAIT_S if long else IDLE_WAIT_S)

    def _switch(self, staged: StagedGeneration) -> Switch:
        """Run in a staged generation from the coming step on: the time that serving stalls."""
        began = time.perf_counter()
        self._held.switch(staged)
        self._experts.switch(staged.placement)
        stall_us = _microseconds_since(began)
        loads = self._experts.loads()
        with self._lock:
            # Whatever waits now, this or a later one, starts from a generation that is gone.
            self._staged = None
            self._loads = loads
            return Switch(
                generation=staged.generation,
                checksums=staged.checksums,
                step=self._num_steps + 1,
                stall_us=stall_us,
                median_step_us=_median(self._recent_us),
            )

    def _step(
        self, plan: StepPlan, tokens_by_rank: list[int], *, began: float
    ) -> tuple[Emission, ...]:
        """Run a plan's tokens, even none, with the other ranks' and record what came of it."""
        self._experts.agree(tokens_by_rank)
        # Other ranks' tokens run here too, up to the logits.
        num_foreign = sum(tokens_by_rank) - plan.num_tokens
        try:
            output = self._model.step(_batch(plan), self._cache, self._experts)
            num_foreign = 0
            sampled = sample(output.logits_SV, [row for c in plan.chunks for row in c.sampling])
            drafts = self._draft(plan, sampled, output)
            loads = self._experts.loads()
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
            emissions = self._scheduler.commit(plan, sampled, drafts)
            if blocks := self._scheduler.take_suspect_blocks():
                self._cache.clear(blocks)
            self._num_steps += 1
            self._loads = loads
            self._step_log.append((self._num_steps, self.generation))
            duration_us = _microseconds_since(began)
            self._recent_us.append(duration_us)
            self._unreported_us.append(duration_us)
            self._step_s.observe(duration_us / 1e6)
        return tuple(emissions)

    def _draft(
        self, plan: StepPlan, sampled: list[SampledToken], output: StepOutput
    ) -> dict[int, tuple[int, ...]]:
        """Guesses by request at what follows the tokens of this step."""
        if self._drafter is None or not plan.drafts:
            return {}
        guesses = self._drafter.draft(output, _draft_lines(plan, sampled))
        return {chunk.key: guess for chunk, guess in zip(plan.chunks, guesses, strict=True)}


def _batch(plan: StepPlan) -> StepBatch:
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    samples: list[int] = []
    for index, chunk in enumerate(plan.chunks):
        tokens += chunk.tokens
        positions += range(chunk.start, chunk.start + len(chunk.tokens))
        sequences += [index] * len(chunk.tokens)
        samples += range(len(tokens) - len(chunk.sampling), len(tokens))
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        block_tables=[chunk.blocks for chunk in plan.chunks],
        sample_rows_S=torch.tensor(samples, dtype=torch.int64),
    )


def _draft_lines(plan: StepPlan, sampled: Sequence[SampledToken]) -> list[DraftLine]:
    tokens = iter(sampled)
    lines = []
    for chunk in plan.chunks:
        standing = [one.token for one in chunk.accepted([next(tokens) for _ in chunk.sampling])]
        sampling = None
        if chunk.sampling:
            last = chunk.sampling[len(standing) - 1]
            sampling = replace(last, output=[*last.output, standing[-1]])
        lines.append(
            DraftLine(
                num_rows=len(chunk.tokens),
                tokens=(*chunk.known, *standing, *chunk.upcoming),
                sampling=sampling,
            )
        )
    return lines


def _median(durations_us: deque[int]) -> int:
    return round(median(durations_us)) if durations_us else 0


def _microseconds_since(began: float) -> int:
    return round((time.perf_counter() - began) * 1e6)
