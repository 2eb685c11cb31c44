"""`Relay`: one request's life: reserve a rank, stream its tokens, retry on another rank.

The reader of the tokens sees one stream. Tokens generated before a break are not generated again:
the next rank gets the prompt with the tokens so far and continues, sampling included.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NoReturn

from equipoise.gateway.attempt import attempt
from equipoise.gateway.errors import (
    AttemptsExhaustedError,
    InvalidRequestError,
    PoisonRequestError,
    RankFullError,
    RankLostError,
)
from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_table import RankTable, Reservation
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.trust.credentials import Credentials
from equipoise.wire.inference import Blame, GeneratedTokens, GenerateRequest

_log = logging.getLogger(__name__)


class Relay:
    """Serves requests by the ranks of a table; used from one event loop only.

    The settings' queue timeout starts again after each failure; only ranks that fail after they
    accepted the request count against its attempts.
    """

    def __init__(
        self,
        ranks: RankTable,
        *,
        vocab_size: int,
        settings: GatewaySettings,
        tally: RequestTally,
        credentials: Credentials,
        channels: RankChannels,
    ) -> None:
        self._ranks = ranks
        self._tally = tally
        self._vocab_size = vocab_size
        self._settings = settings
        self._credentials = credentials
        self._channels = channels

    def stream(
        self,
        request: GenerateRequest,
        *,
        suspicion: Suspicion,
        is_complete: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """Yield a request's tokens up to its finish, whatever ranks do. Close it to end it early.

        All choices of an HTTP request share one suspicion. `is_complete`: whether the choice that
        is closed needs no more tokens, which counts as finished.

        Raises:
            RequestError: the request cannot be served; says why, and whether to retry.
        """
        return self._tally.counted(
            self._stream(request, suspicion), now=self._ranks.now, is_complete=is_complete
        )

    async def _stream(
        self, request: GenerateRequest, suspicion: Suspicion
    ) -> AsyncGenerator[GeneratedTokens, None]:
        progress = _RequestProgress(without_rank_since_s=self._ranks.now(), suspicion=suspicion)
        while True:
            rest = request.after(tuple(progress.tokens))
            reservation = await self._ranks.reserve(
                rest,
                avoid=frozenset(progress.avoid),
                is_retry=progress.was_placed,
                suspicion=suspicion,
                until_s=progress.without_rank_since_s + self._settings.queue_timeout_s,
                timeout_s=self._settings.queue_timeout_s,
            )
            progress.was_placed = True
            with reservation:
                self._check_verdict(progress)
                try:
                    async with aclosing(self._attempt(reservation, rest)) as parts:
                        async for part in parts:
                            progress.tokens += part.tokens
                            if reservation.is_proven or part.finish is not None:
                                suspicion.note_proof(request.request_id)
                            yield part
                    return
                except RankFullError as full:
                    reservation.full(str(full))
                except RankLostError as lost:
                    failure = reservation.lost(str(lost))
                    progress.avoid.add(reservation.rank.address)
                    # A rank that blames the request accepted it, even if the end came first.
                    if reservation.was_accepted or lost.blame is Blame.REQUEST:
                        suspicion.note_break(
                            request.request_id,
                            lost.blame,
                            rank=reservation.rank.address,
                            failure=failure,
                            was_isolated=reservation.is_isolated,
                        )
                        self._ranks.mark_suspects()
                        self._note_break(progress, reservation, request, reason=str(lost))
                except InvalidRequestError as rejection:
                    if not progress.tokens:
                        raise
                    # Another rank accepted the same request: this one differs from the others.
                    progress.avoid.add(reservation.rank.address)
                    reason = f"it rejects the request: {rejection}"
                    self._note_break(progress, reservation, request, reason=reason)

    async def _attempt(
        self, reservation: Reservation, request: GenerateRequest
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """One attempt on the reserved rank, with its work accounted for."""
        async with self._channels.stub(reservation.rank.address) as stub:
            parts = attempt(
                stub,
                request,
                vocab_size=self._vocab_size,
                settings=self._settings,
                accepted=reservation.accepted,
                credentials=self._credentials,
                worker=reservation.rank.name,
            )
            async with aclosing(parts):
                async for part in parts:
                    reservation.generated(len(part.tokens))
                    yield part

    def _note_break(
        self,
        progress: "_RequestProgress",
        reservation: Reservation,
        request: GenerateRequest,
        *,
        reason: str,
    ) -> None:
        """Record a break.

        Raises:
            PoisonRequestError: the request seems to make ranks fail.
            AttemptsExhaustedError: it was the last attempt.
        """
        _log.warning(
            "%s: %s at %s failed after %d of %d tokens: %s",
            *(request.request_id, reservation.rank.name, reservation.rank.address),
            *(len(progress.tokens), request.max_tokens, reason),
        )
        self._tally.replays += 1
        progress.without_rank_since_s = self._ranks.now()
        progress.failures.append(f"{reservation.rank.name}: {reason}")
        self._check_verdict(progress)
        if len(progress.failures) >= self._settings.max_attempts:
            raise AttemptsExhaustedError(
                f"{len(progress.failures)} attempts failed: {'; '.join(progress.failures)}"
            )

    def _check_verdict(self, progress: "_RequestProgress") -> None:
        if verdict := progress.suspicion.verdict:
            self._reject(progress, verdict)

    def _reject(self, progress: "_RequestProgress", verdict: str) -> NoReturn:
        # The choices of a request are rejected together, and counted once.
        self._tally.poison += not progress.suspicion.is_rejected
        progress.suspicion.is_rejected = True
        failures = f" ({'; '.join(progress.failures)})" if progress.failures else ""
        raise PoisonRequestError(
            f"the request is rejected because {verdict}{failures}: "
            f"change the request before retrying"
        )


@dataclass(slots=True, kw_only=True)
class _RequestProgress:
    """How far a request is, and what went wrong so far."""

    without_rank_since_s: float
    """When it last lost its rank, or arrived."""

    suspicion: Suspicion
    """Shared with the request's other choices."""

    was_placed: bool = False
    """Whether a rank was reserved for it before."""

    tokens: list[int] = field(default_factory=list)
    """Tokens so far."""

    failures: list[str] = field(default_factory=list)
    """Rank and reason of each failure."""

    avoid: set[str] = field(default_factory=set)
    """Addresses of the ranks that failed."""
