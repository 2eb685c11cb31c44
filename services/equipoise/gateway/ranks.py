"""`Ranks`: the ranks as this gateway knows them, its work on each, and the line for a place.

Owns counting and waiting; whom to choose is `routing`'s decision, what is said about ranks comes
from `watch` or the settings. Knows neither sockets nor gRPC.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from equipoise.gateway.attempt import TokenRequest
from equipoise.gateway.errors import NoRankError, QueueFullError
from equipoise.gateway.routing import NoChoice, RankLoad, Standing, choose

FIRST_REST_S = 0.1
LONGEST_REST_S = 2.0
"""A rank that failed is left alone this long: doubled with each failure, up to the longest."""

FULL_REST_S = 0.2
"""A rank whose line is full is asked again after this long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRank:
    """A rank as a balancer or a setting tells it.

    `num_requests` are active and queued there, and `kv_tokens_used` of the `kv_tokens_total` that
    its latent cache has room for are taken, as of its report number `report` (any number that
    changes from one report to the next).
    """

    name: str
    address: str
    standing: Standing
    num_requests: int = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0
    report: int = 0


class Ranks:
    """All ranks of the pool; used from one event loop only.

    At most `max_queued` new requests wait for a place. `clock` gives monotonic seconds.
    """

    def __init__(self, *, max_queued: int, clock: Callable[[], float]) -> None:
        self._max_queued = max_queued
        self._clock = clock
        self._ranks: dict[str, _Rank] = {}
        self._line: deque[_Waiter] = deque()
        self._turns = itertools.count()
        self._why_none = "no rank is known yet"
        self._retry: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests queued."""
        return len(self._line)

    def loads(self) -> list[RankLoad]:
        """Every rank and its work now."""
        return [rank.load() for rank in self._ranks.values()]

    def trouble(self) -> str:
        """Why no rank can take a request now; empty when one can."""
        found = choose(self.loads(), now=self._clock(), avoid=frozenset(), turn=0)
        return found.reason if isinstance(found, NoChoice) else ""

    def tell(self, told: Iterable[ToldRank]) -> None:
        """Take what is told of all ranks. Nobody at all is no news: who was known serves on.

        A rank that is not told any more gets no new request, and is forgotten when its last ends.
        """
        by_address = {rank.address: rank for rank in told}
        if not by_address:
            return
        for address, rank in list(self._ranks.items()):
            if address not in by_address:
                rank.standing = Standing.CLOSED
                if not rank.num_open:
                    del self._ranks[address]
        for address, one in by_address.items():
            if address not in self._ranks:
                _log.info("%s at %s is one of the ranks", one.name, address)
            self._ranks.setdefault(address, _Rank(name=one.name, address=address)).hear(one)
        self._serve_line()

    async def place(
        self,
        request: TokenRequest,
        *,
        avoid: frozenset[str],
        is_returning: bool,
        is_suspect: bool,
        until_s: float,
        bound_s: float,
    ) -> "Place":
        """A place at a rank, waiting in line until `until_s`; `bound_s` is that wait in words.

        A request that returns from a rank goes before new ones, and is never turned away for the
        queue's length. A suspect may wait longer: it shares a rank with no other suspect.

        Raises:
            QueueFullError: too many wait already.
            NoRankError: nobody took it in time; says what is wrong with each rank.
        """
        if until_s <= self._clock():
            raise self._no_rank(bound_s)
        waiter = _Waiter(
            request=request, avoid=avoid, is_returning=is_returning, is_suspect=is_suspect
        )
        # Before all that is new, behind those that returned earlier.
        where = sum(one.is_returning for one in self._line) if is_returning else len(self._line)
        self._line.insert(where, waiter)
        self._serve_line()
        try:
            self._check_length(waiter)
            async with asyncio.timeout(until_s - self._clock()):
                return await waiter.place
        except TimeoutError:
            waiter.give_back()
            raise self._no_rank(bound_s) from None
        except BaseException:
            waiter.give_back()
            raise
        finally:
            with suppress(ValueError):
                self._line.remove(waiter)

    def _no_rank(self, bound_s: float) -> NoRankError:
        return NoRankError(
            f"no rank took the request within {bound_s:g} s (queue): {self._why_none}"
        )

    def _check_length(self, waiter: "_Waiter") -> None:
        """Turn a new request away if it stands in line and the line is too long."""
        num_new = sum(not one.is_returning for one in self._line)
        if not waiter.place.done() and not waiter.is_returning and num_new > self._max_queued:
            raise QueueFullError(
                f"{self._max_queued} requests wait for a rank already ({self._why_none}): "
                f"try again later"
            )

    def _serve_line(self) -> None:
        """Give places, first come, first served, as long as there are any."""
        for waiter in list(self._line):
            if not waiter.place.done():
                found = choose(
                    self.loads(),
                    now=self._clock(),
                    avoid=waiter.avoid,
                    turn=next(self._turns),
                    is_suspect=waiter.is_suspect,
                )
                if isinstance(found, NoChoice):
                    self._why_none = found.reason
                    self._look_again(found.retry_at_s)
                    if waiter.is_suspect:
                        continue
                    return
                _log.debug("%s: %s", waiter.request.request_id, found.reason)
                waiter.place.set_result(
                    Place(
                        self._ranks[found.address],
                        waiter.request,
                        ranks=self,
                        is_suspect=waiter.is_suspect,
                    )
                )
            self._line.remove(waiter)

    def _look_again(self, at_s: float | None) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if at_s is not None:
            wait_s = max(0.0, at_s - self._clock())
            self._retry = asyncio.get_running_loop().call_later(wait_s, self._serve_line)

    def changed(self, rank: "_Rank") -> None:
        """A rank's work or standing has changed: somebody in line may go there."""
        if rank.standing is Standing.CLOSED and not rank.num_open:
            self._ranks.pop(rank.address, None)
        self._serve_line()

    def now(self) -> float:
        """The clock's time."""
        return self._clock()


class Place:
    """A request's place at a rank, from the choice to the request's end there.

    A context manager: leaving it releases the place.
    """

    def __init__(
        self, rank: "_Rank", request: TokenRequest, *, ranks: Ranks, is_suspect: bool = False
    ) -> None:
        self._rank = rank
        self.was_accepted = False
        self._ranks = ranks
        self._in_flight = len(request.prompt) + request.max_tokens
        self._num_prompt = len(request.prompt)
        self._cached = 0
        self._is_suspect = is_suspect
        rank.num_suspects += is_suspect
        rank.open(self._in_flight)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def address(self) -> str:
        """host:port of the rank."""
        return self._rank.address

    @property
    def name(self) -> str:
        """The rank's name, for people."""
        return self._rank.name

    def accepted(self) -> None:
        """The rank has taken the request: it lives."""
        self.was_accepted = True
        self._rank.num_unanswered -= 1
        if self._rank.num_failures:
            self._rank.num_failures = 0
            self._ranks.changed(self._rank)

    def made(self, num_tokens: int) -> None:
        """The rank has run the prompt, if it had not, and made so many tokens."""
        run = num_tokens + (self._num_prompt if not self._cached else 0)
        self._rank.move_to_cache(run)
        self._in_flight -= run
        self._cached += run
        if self._is_suspect:
            self._clear_suspicion()
            self._ranks.changed(self._rank)

    def lost(self, reason: str) -> None:
        """The rank has failed the request; it rests before it is tried again."""
        rank, now = self._rank, self._ranks.now()
        if now >= rank.resting_until_s:
            # Many requests that break at once are one failure.
            rank.num_failures += 1
            # Said once: a rank that is gone for long fails again and again.
            level = logging.WARNING if rank.num_failures == 1 else logging.DEBUG
            _log.log(level, "%s at %s failed: %s", rank.name, rank.address, reason)
            rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(rank.num_failures - 1, 16))
            rank.rest(until_s=now + rest_s, reason=reason)

    def full(self, reason: str) -> None:
        """The rank has no place in its line."""
        self._rank.rest(until_s=self._ranks.now() + FULL_REST_S, reason=reason)

    def release(self) -> None:
        """The request is over at this rank; harmless when repeated."""
        if self._in_flight < 0:
            return
        self._clear_suspicion()
        self._rank.leave(self._in_flight, self._cached, was_accepted=self.was_accepted)
        self._in_flight = -1
        self._ranks.changed(self._rank)

    def _clear_suspicion(self) -> None:
        self._rank.num_suspects -= self._is_suspect
        self._is_suspect = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    """Somebody in line."""

    request: TokenRequest
    avoid: frozenset[str]
    is_returning: bool
    is_suspect: bool
    place: "asyncio.Future[Place]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def give_back(self) -> None:
        """Nobody will come for the place, if there is one."""
        if self.place.done() and not self.place.cancelled() and not self.place.exception():
            self.place.result().release()


@dataclass(slots=True, kw_only=True, eq=False)
class _Rank:
    """One rank's books."""

    name: str
    address: str
    standing: Standing = Standing.OPEN
    num_open: int = 0
    num_unanswered: int = 0
    num_failures: int = 0
    num_suspects: int = 0
    resting_until_s: float = 0.0
    resting_reason: str = ""
    tokens_in_flight: int = 0
    kv_tokens: int = 0
    num_foreign: int = 0
    report: int = 0
    # Most requests of ours that were open at a time: since the latest report, and between it and
    # the one before. What a report counts beyond them is not ours.
    peak_open: int = 0
    earlier_peak_open: int = 0
    # The same of tokens that our requests may hold in the cache, when they end at the latest.
    foreign_kv_tokens: int = 0
    kv_tokens_total: int = 0
    peak_kv_tokens: int = 0
    earlier_peak_kv_tokens: int = 0

    def load(self) -> RankLoad:
        return RankLoad(
            name=self.name,
            address=self.address,
            standing=self.standing,
            num_open=self.num_open,
            num_unanswered=self.num_unanswered,
            tokens_in_flight=self.tokens_in_flight,
            kv_tokens=self.kv_tokens,
            num_foreign=self.num_foreign,
            foreign_kv_tokens=self.foreign_kv_tokens,
            kv_tokens_total=self.kv_tokens_total,
            num_suspects=self.num_suspects,
            on_trial=self.num_failures > 0,
            resting_until_s=self.resting_until_s,
            resting_reason=self.resting_reason,
        )

    def hear(self, told: ToldRank) -> None:
        self.name, self.standing = told.name, told.standing
        if told.report != self.report:
            ours = max(self.peak_open, self.earlier_peak_open)
            self.num_foreign = max(0, told.num_requests - ours)
            self.report = told.report
            self.earlier_peak_open, self.peak_open = self.peak_open, self.num_open
            ours_kv = max(self.peak_kv_tokens, self.earlier_peak_kv_tokens)
            self.foreign_kv_tokens = max(0, told.kv_tokens_used - ours_kv)
            self.kv_tokens_total = told.kv_tokens_total
            self.earlier_peak_kv_tokens = self.peak_kv_tokens
            self.peak_kv_tokens = self.kv_tokens + self.tokens_in_flight

    def open(self, in_flight: int) -> None:
        self.num_open += 1
        self.num_unanswered += 1
        self.peak_open = max(self.peak_open, self.num_open)
        self.tokens_in_flight += in_flight
        self.peak_kv_tokens = max(self.peak_kv_tokens, self.kv_tokens + self.tokens_in_flight)

    def move_to_cache(self, num_tokens: int) -> None:
        self.tokens_in_flight -= num_tokens
        self.kv_tokens += num_tokens

    def leave(self, in_flight: int, cached: int, *, was_accepted: bool) -> None:
        self.num_open -= 1
        self.num_unanswered -= not was_accepted
        self.tokens_in_flight -= in_flight
        self.kv_tokens -= cached

    def rest(self, *, until_s: float, reason: str) -> None:
        self.resting_until_s, self.resting_reason = until_s, reason
