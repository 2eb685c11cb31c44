"""`RankTable`: the ranks of a pool as this gateway knows them, and the queue for a rank.

Counts and waits. `routing` chooses the rank; `watch` or the settings supply the ranks.
Independent of sockets and gRPC.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from equipoise.gateway.errors import NoRankError, TooManyQueuedError
from equipoise.gateway.prefix_index import MAX_BLOCKS
from equipoise.gateway.rank_load import RankInfo, RankLoad, RankState
from equipoise.gateway.routing import Demand, NoRankChoice, RankChoice, choose
from equipoise.gateway.suspicion import PROOF_TOKENS, Suspicion
from equipoise.wire.block_keys import keys_of
from equipoise.wire.inference_messages import GenerateRequest

FIRST_REST_S = 0.1
LONGEST_REST_S = 2.0
"""Backoff of a rank that failed, seconds: doubles with each failure up to the longest."""

FULL_REST_S = 0.2
"""Backoff of a rank whose queue is full, seconds."""

ASSUMED_ANSWER_TOKENS = 256.0
"""Length of an answer before any has ended."""

ANSWER_WEIGHT = 0.02
"""Weight of one more answer in the mean length of answers."""

_log = logging.getLogger(__name__)


class RankTable:
    """All ranks of the pool; used from one event loop only.

    New requests are rejected while `max_queued` wait for a rank. `clock` gives monotonic seconds.
    Equal ranks take turns from `first_turn` on; gateways that begin alike would go through them in
    step.
    """

    def __init__(self, *, max_queued: int, clock: Callable[[], float], first_turn: int = 0) -> None:
        self._max_queued = max_queued
        self.now = clock
        self._ranks: dict[str, _Tracked] = {}
        self._queue: deque[_Waiter] = deque()
        self._turns = itertools.count(first_turn)
        self._mean_answer = ASSUMED_ANSWER_TOKENS
        self._why_none = "no rank is known yet"
        self._retry: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Queued requests."""
        return len(self._queue)

    def loads(self) -> Sequence[RankLoad]:
        """Every rank and its current work."""
        return list(self._ranks.values())

    def trouble(self) -> str:
        """Why no rank serves; empty when one does."""
        troubles = {rank.name: rank.trouble for rank in self._ranks.values()}
        if not all(troubles.values()):
            return ""
        return "; ".join(f"{name}: {why}" for name, why in troubles.items()) or "no rank is known"

    def unready(self) -> str:
        """Why clients should not send requests yet; empty once a rank has answered."""
        answered = any(rank.answers for rank in self._ranks.values())
        return self.trouble() or ("" if answered else "no rank has answered yet")

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together on any rank; 0 if unknown."""
        lengths = [rank.context_length for rank in self._ranks.values() if rank.context_length]
        return min(lengths, default=0)

    def note_answer(self, address: str, *, context_length: int) -> None:
        """A rank serves requests of up to `context_length` tokens; 0 if it does not report it."""
        if rank := self._ranks.get(address):
            rank.answers, rank.context_length = True, context_length

    def note_silence(self, address: str, reason: str) -> None:
        """A rank serves no requests, or does not answer."""
        if rank := self._ranks.get(address):
            rank.answers, rank.silence = False, reason

    def update(self, infos: Iterable[RankInfo]) -> None:
        """Replace what is known of all ranks. An empty list is ignored: the ranks keep serving.

        A rank that is missing gets no new requests, and is removed when its last request ends.
        """
        by_address = {info.address: info for info in infos}
        if not by_address:
            return
        for address, rank in list(self._ranks.items()):
            if address not in by_address:
                rank.state = RankState.CLOSED
                if not rank.num_open:
                    del self._ranks[address]
        for address, info in by_address.items():
            if address not in self._ranks:
                _log.info("new rank: %s at %s", info.name, address)
            rank = self._ranks.setdefault(address, _Tracked(name=info.name, address=address))
            rank.note_report(info)
            most = rank.cache_tokens // max(1, rank.block_tokens)
            rank.prefixes.max_blocks = min(most, MAX_BLOCKS // len(by_address))
        self._serve_queue()

    async def reserve(
        self,
        request: GenerateRequest,
        *,
        avoid: frozenset[str],
        is_retry: bool,
        suspicion: Suspicion,
        until_s: float,
        timeout_s: float,
        is_prefilled_elsewhere: bool = False,
    ) -> "Reservation":
        """Reserve a rank for a request, waiting until `until_s`; messages show `timeout_s`.

        `is_prefilled_elsewhere`: whether another pool is expected to prefill the prompt.

        A retry precedes new requests and is never rejected for the queue's length. A suspect may
        wait longer: it shares no rank with another suspect, and its choices run one at a
        time until each is proven.

        Raises:
            TooManyQueuedError: too many requests wait already.
            NoRankError: no rank accepted it in time; gives each rank's reason.
        """
        if until_s <= self.now():
            raise self._no_rank(timeout_s)
        waiter = _Waiter(
            request=request,
            demand=self._demand(request, is_prefilled_elsewhere=is_prefilled_elsewhere),
            avoid=avoid,
            is_retry=is_retry,
            suspicion=suspicion,
        )
        # After earlier retries, before everything new.
        index = sum(one.is_retry for one in self._queue) if is_retry else len(self._queue)
        self._queue.insert(index, waiter)
        self._serve_queue()
        try:
            self._check_length(waiter)
            async with asyncio.timeout(until_s - self.now()):
                return await waiter.reservation
        except TimeoutError:
            waiter.release()
            raise self._no_rank(timeout_s) from None
        except BaseException:
            waiter.release()
            raise
        finally:
            with suppress(ValueError):
                self._queue.remove(waiter)

    def _demand(self, request: GenerateRequest, *, is_prefilled_elsewhere: bool) -> Demand:
        """What a request needs of a rank, as far as can be expected."""
        block_tokens = max((rank.block_tokens for rank in self._ranks.values()), default=0)
        keys = keys_of(request.prompt, block_tokens=block_tokens) if block_tokens else ()
        return Demand(
            prompt_tokens=len(request.prompt),
            answer_tokens=min(request.max_tokens, round(self._mean_answer)),
            is_prefilled_elsewhere=is_prefilled_elsewhere,
            generates=request.max_tokens > 1,
            keys=tuple(keys),
            block_tokens=block_tokens,
        )

    def note_answer_length(self, num_tokens: int) -> None:
        """A rank has ended a request after this many tokens."""
        self._mean_answer += ANSWER_WEIGHT * (num_tokens - self._mean_answer)

    def _no_rank(self, timeout_s: float) -> NoRankError:
        return NoRankError(
            f"no rank accepted the request within {timeout_s:g} s (queue): {self._why_none}"
        )

    def _check_length(self, waiter: "_Waiter") -> None:
        """Reject a new request that has to wait in a queue that is full."""
        is_full = len(self._queue) > self._max_queued
        if is_full and not waiter.reservation.done() and not waiter.is_retry:
            raise TooManyQueuedError(
                f"{self._max_queued} requests already wait for a rank ({self._why_none}): "
                f"try again later"
            )

    def _serve_queue(self) -> None:
        """Reserve ranks, first come, first served. A suspect that must wait holds up no other."""
        for waiter in list(self._queue):
            if not waiter.reservation.done():
                is_suspect = waiter.suspicion.is_strong
                if is_suspect and self._is_on_trial(waiter.suspicion):
                    self._why_none = "ranks failed, and another choice of the request is retried"
                    continue
                found = choose(
                    self.loads(),
                    demand=waiter.demand,
                    now=self.now(),
                    avoid=waiter.avoid,
                    turn=next(self._turns),
                    is_suspect=is_suspect,
                )
                if isinstance(found, NoRankChoice):
                    self._why_none = found.reason
                    self._serve_queue_at(found.retry_at_s)
                    if is_suspect:
                        continue
                    return
                _log.debug("%s: %s", waiter.request.request_id, found.reason)
                rank = self._ranks[found.address]
                waiter.reservation.set_result(Reservation(rank, waiter, choice=found, ranks=self))
            self._queue.remove(waiter)

    def _is_on_trial(self, suspicion: Suspicion) -> bool:
        """Whether a choice of the request runs that is not proven there yet."""
        return any(
            one.suspicion is suspicion for rank in self._ranks.values() for one in rank.unproven
        )

    def mark_suspects(self) -> None:
        """A request became a suspect: its choices that run and are not proven are suspects too."""
        for rank in self._ranks.values():
            rank.mark_suspects()

    def _serve_queue_at(self, at_s: float | None) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if at_s is not None:
            delay_s = max(0.0, at_s - self.now())
            self._retry = asyncio.get_running_loop().call_later(delay_s, self._serve_queue)

    def changed(self, rank: "_Tracked") -> None:
        """A rank's work or state has changed: a queued request may fit now."""
        if rank.state is RankState.CLOSED and not rank.num_open:
            self._ranks.pop(rank.address, None)
        self._serve_queue()


class Reservation(AbstractContextManager["Reservation"]):
    """A request's share of a rank, from the choice to the request's end there.

    A context manager: leaving it releases the reservation.
    """

    def __init__(
        self, rank: "_Tracked", waiter: "_Waiter", *, choice: RankChoice, ranks: RankTable
    ) -> None:
        self.rank = rank
        self.was_accepted = False
        self.suspicion = waiter.suspicion
        self.is_isolated = waiter.suspicion.is_strong
        """Whether it started as a suspect and no other suspect ran there since."""
        self.is_proven = False
        """Whether it made enough tokens here to prove that it runs."""
        self._ranks = ranks
        self._demand = waiter.demand
        self._booking = choice.booking
        self._latents = choice.booking.latents
        self._num_generated = 0
        self._is_released = False
        rank.unproven.add(self)
        rank.mark_suspects()
        rank.book(choice.booking, now=ranks.now())

    def __exit__(self, *_: object) -> None:
        self.release()

    def num_cached(self) -> int:
        """Tokens of the prompt that the rank has probably cached, by what it ran before."""
        return self._demand.num_cached_on(self.rank)

    def accepted(self) -> None:
        """The rank has accepted the request: it is alive."""
        self.was_accepted = self.rank.answers = True
        self.rank.num_unanswered -= 1
        if self.rank.num_failures:
            self.rank.num_failures = 0
            self._ranks.changed(self.rank)

    def generated(self, num_tokens: int) -> None:
        """The rank has generated tokens, and has run the prompt before the first."""
        if num_tokens and not self._num_generated:
            self.rank.note_prefilled(self._booking)
            self.rank.prefixes.note(self._demand.keys)
        self._num_generated += num_tokens
        # Longer answers than expected hold more.
        more = self._demand.prompt_tokens + self._num_generated - self._latents
        if more > 0:
            self._latents += more
            self.rank.latents.add(more)
        if self._num_generated >= PROOF_TOKENS and not self.is_proven:
            was_suspect = self.suspicion.is_strong
            self.is_proven, self.is_isolated = True, False
            self._leave_trial()
            if was_suspect:
                self._ranks.changed(self.rank)

    def lost(self, reason: str) -> tuple[str, float]:
        """The rank has failed the request: back off before it is tried again.

        Returns a key of the failure, the same for all requests that break at once.
        """
        rank, now = self.rank, self._ranks.now()
        rank.answers, rank.silence = False, reason
        # Its process, and what that has cached, may be gone.
        rank.prefixes.clear()
        self._leave_trial()
        if now >= rank.resting_until_s:
            # Many requests that break at once are one failure.
            rank.num_failures += 1
            # Warn once: a rank that is gone for long fails again and again.
            level = logging.WARNING if rank.num_failures == 1 else logging.DEBUG
            _log.log(level, "%s at %s failed: %s", rank.name, rank.address, reason)
            rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(rank.num_failures - 1, 16))
            rank.resting_until_s, rank.resting_reason = now + rest_s, reason
        return rank.address, rank.resting_until_s

    def full(self, reason: str) -> None:
        """The rank's queue is full."""
        self.rank.resting_until_s = self._ranks.now() + FULL_REST_S
        self.rank.resting_reason = reason

    def release(self) -> None:
        """The request has ended on this rank. May be repeated."""
        if self._is_released:
            return
        self._is_released = True
        self._leave_trial()
        self.rank.requests.add(-1)
        self.rank.num_unanswered -= not self.was_accepted
        self.rank.latents.add(-self._latents)
        if self._num_generated:
            self._ranks.note_answer_length(self._num_generated)
        else:
            self.rank.note_prefilled(self._booking)
        self._ranks.changed(self.rank)

    def _leave_trial(self) -> None:
        self.rank.unproven.discard(self)
        self.rank.mark_suspects()


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """A queued request."""

    request: GenerateRequest
    demand: Demand
    avoid: frozenset[str]
    is_retry: bool
    suspicion: Suspicion
    reservation: "asyncio.Future[Reservation]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def release(self) -> None:
        """Release the reservation, if there is one, because the caller is gone."""
        future = self.reservation
        if future.done() and not future.cancelled() and not future.exception():
            future.result().release()


@dataclass(slots=True, kw_only=True, eq=False)
class _Tracked(RankLoad):
    """A rank's load, and which of our requests prove themselves there."""

    # Requests of ours that run here, not proven yet.
    unproven: set[Reservation] = field(default_factory=set)

    def mark_suspects(self) -> None:
        """Count the suspects; those that share the rank are not isolated from then on."""
        suspects = [one for one in self.unproven if one.suspicion.is_strong]
        self.num_suspects = len(suspects)
        if len(suspects) > 1:
            for one in suspects:
                one.is_isolated = False
