"""`Relay`: one request's life: reserve a rank, stream its tokens, retry on another rank.

The reader of the tokens sees one stream. Tokens generated before a break are not generated again:
the next rank gets the prompt with the tokens so far and continues, sampling included.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import grpc

from equipoise.gateway.attempt import attempt
from equipoise.gateway.errors import (
    AttemptsExhaustedError,
    GrammarLimitError,
    InvalidRequestError,
    NoRankError,
    PoisonRequestError,
    RankFullError,
    RankLostError,
    TooManyQueuedError,
)
from equipoise.gateway.handover import (
    Direct,
    first_leg,
    first_part,
    has_all,
    have_same_form,
    second_leg,
    why_direct,
)
from equipoise.gateway.metrics import Outcome, RequestTally
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankLoad
from equipoise.gateway.rank_table import RankTable, Reservation
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.suspicion import Suspicion
from equipoise.telemetry.logs import is_worth_logging
from equipoise.trust.credentials import Credentials
from equipoise.trust.tokens import worker_audience
from equipoise.wire.inference_messages import Blame, GeneratedTokens, GenerateRequest, LatentHold
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

PREFILL_WAIT_S = 1.0
"""Time for a rank of the prefill pool to become free; then the decode rank prefills."""

RELEASE_TIMEOUT_S = 1.0
"""Time for a prefill rank to end a hold."""

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
        prefill: RankTable | None = None,
    ) -> None:
        """`prefill` are the ranks of the settings' prefill pool, if there is one."""
        self._ranks = ranks
        self._tally = tally
        self._vocab_size = vocab_size
        self._settings = settings
        self._credentials = credentials
        self._channels = channels
        self._prefill = prefill
        self._releasing: set[asyncio.Task[None]] = set()

    def stream(
        self,
        request: GenerateRequest,
        *,
        suspicion: Suspicion,
        if_closed: Callable[[], Outcome] = lambda: Outcome.ENDED,
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """Yield a request's tokens up to its finish, whatever ranks do. Close it to end it early.

        All choices of an HTTP request share one suspicion. `if_closed`: the outcome to count for a
        choice that is closed early.

        Raises:
            RequestError: the request cannot be served; says why, and whether to retry.
        """
        return self._tally.counted(
            self._stream(request, suspicion), now=self._ranks.now, if_closed=if_closed
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
                is_prefilled_elsewhere=self._prefill is not None and not self._prefill.trouble(),
            )
            progress.was_placed = True
            progress.running = reservation
            with reservation:
                self._check_verdict(progress, request)
                try:
                    async with aclosing(self._legs(reservation, rest, progress)) as parts:
                        async for part in parts:
                            progress.tokens += part.tokens
                            if reservation.is_proven or part.finish is not None:
                                suspicion.note_proof(request.request_id)
                            yield part
                    return
                except RankFullError as full:
                    progress.running.full(str(full))
                except RankLostError as lost:
                    failure = progress.running.lost(str(lost))
                    progress.avoid.add(progress.running.rank.address)
                    # A rank that blames the request accepted it, even if the end came first.
                    if progress.running.was_accepted or lost.blame is Blame.REQUEST:
                        suspicion.note_break(
                            request.request_id,
                            lost.blame,
                            rank=progress.running.rank.address,
                            failure=failure,
                            was_isolated=progress.running.is_isolated,
                        )
                        self._ranks.mark_suspects()
                        self._note_break(progress, request, reason=str(lost))
                except InvalidRequestError as rejection:
                    if not progress.tokens or isinstance(rejection, GrammarLimitError):
                        raise
                    # Another rank accepted the same request: this one differs from the others.
                    progress.avoid.add(progress.running.rank.address)
                    reason = f"it rejects the request: {rejection}"
                    self._note_break(progress, request, reason=reason)

    async def _legs(
        self, reservation: Reservation, request: GenerateRequest, progress: "_RequestProgress"
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """One attempt: the prompt and the first token by the prefill pool, if that is possible."""
        leg, rejection = await self._reserve_prefill(reservation, request, progress), ""
        if leg is not None:
            try:
                first = await self._first_leg(leg, request, progress)
            except GrammarLimitError:
                raise
            except InvalidRequestError as error:
                # The pools' limits may differ. If the decode rank rejects it too, it is invalid.
                leg, rejection = None, f"{progress.running.rank.name} rejects it: {error}"
                progress.running = reservation
            except RankFullError as full:
                leg.full(str(full))
                self._note_direct(Direct.CROWDED, reservation.rank)
                leg, progress.running = None, reservation
        if leg is None:
            own_pool = self._settings.pool
            async with aclosing(self._attempt(reservation, request, pool=own_pool)) as parts:
                async for part in parts:
                    if rejection:
                        self._note_direct(Direct.REJECTED, reservation.rank, why=rejection)
                        rejection = ""
                    yield part
            return
        async with aclosing(self._after_first(reservation, request, progress, leg, first)) as parts:
            async for part in parts:
                yield part

    async def _first_leg(
        self, leg: Reservation, request: GenerateRequest, progress: "_RequestProgress"
    ) -> GeneratedTokens:
        """The first token, by the reserved rank of the prefill pool."""
        progress.running = leg
        pool = self._settings.prefill_pool
        with leg:
            async with aclosing(self._attempt(leg, first_leg(request), pool=pool)) as parts:
                return await anext(parts)

    async def _after_first(
        self,
        reservation: Reservation,
        request: GenerateRequest,
        progress: "_RequestProgress",
        leg: Reservation,
        first: GeneratedTokens,
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """The first token, then those of the decode rank; no hold is left."""
        first_s, whole, was_continued = self._ranks.now(), first_part(first, request), False
        # Failures of the client, and of the next leg, are not the prefill rank's.
        progress.running = reservation
        try:
            yield whole
            if whole.finish is not None:
                return
            pool = self._settings.prefill_pool
            rest = second_leg(request, first, pool=pool, prefill=leg.rank)
            self._tally.num_handed_over += 1
            parts = self._attempt(reservation, rest, pool=self._settings.pool)
            async with aclosing(parts):
                async for part in parts:
                    if not was_continued:
                        was_continued = True
                        self._tally.second_token_s.observe(self._ranks.now() - first_s)
                        if first.held is not None and not has_all(part, first.held):
                            self._release_soon(leg, first.held)
                        part = progress.with_handover(part, request)  # noqa: PLW2901
                    yield part
        finally:
            if first.held is not None and not was_continued:
                await self._release(leg, first.held)

    async def _reserve_prefill(
        self, reservation: Reservation, request: GenerateRequest, progress: "_RequestProgress"
    ) -> Reservation | None:
        """Reserve a rank that prefills the prompt; None if the reserved decode rank should."""
        if self._prefill is None:
            return None
        decode, suspicion = reservation.rank, progress.suspicion
        reason = why_direct(
            request,
            decode=decode,
            num_cached=reservation.num_cached(),
            prefill=self._prefill.loads(),
            is_suspect=suspicion.is_strong,
        )
        if reason is None:
            others = [one for one in self._prefill.loads() if not have_same_form(decode, one)]
            try:
                leg = await self._prefill.reserve(
                    first_leg(request),
                    avoid=frozenset(progress.avoid | {one.address for one in others}),
                    is_retry=bool(progress.failures),
                    suspicion=suspicion,
                    until_s=self._prefill.now() + PREFILL_WAIT_S,
                    timeout_s=PREFILL_WAIT_S,
                )
            except (NoRankError, TooManyQueuedError):
                reason = Direct.CROWDED
            else:
                if have_same_form(decode, leg.rank):
                    return leg
                leg.release()
                reason = Direct.CROWDED
        self._note_direct(reason, decode)
        return None

    def _note_direct(self, reason: Direct, decode: RankLoad, *, why: str = "") -> None:
        self._tally.direct[reason] += 1
        count = self._tally.direct[reason]
        if reason is Direct.SHORT or not is_worth_logging(count):
            return
        assert self._prefill is not None
        forms = {rank.latent_form or "unknown" for rank in self._prefill.loads()}
        known = {
            Direct.FORM: f"its latents are {decode.latent_form or 'unknown'}, those of the prefill "
            f"pool {' and '.join(sorted(forms))}",
            Direct.NO_PREFILL: self._prefill.trouble(),
        }
        _log.warning(
            "%s prefills a prompt itself (%s, %d so far): %s",
            *(decode.name, reason, count, why or known.get(reason) or "see docs/disaggregation.md"),
        )

    def _release_soon(self, leg: Reservation, held: LatentHold) -> None:
        """End a hold that the decode rank has not fetched to its end; nobody waits for it."""
        releasing = asyncio.create_task(self._release(leg, held))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, leg: Reservation, held: LatentHold) -> None:
        """End a hold that no decode rank will fetch; it expires if that fails."""
        audience = worker_audience(self._settings.prefill_pool, leg.rank.name)
        with suppress(grpc.aio.AioRpcError, RankLostError):
            async with self._channels.channel(leg.rank.address) as channel:
                await pb_grpc.LatentTransferStub(channel).Release(
                    pb.LatentTransferReleaseRequest(boot_id=held.boot_id, hold=held.hold),
                    metadata=self._credentials.metadata(audience=audience),
                    timeout=RELEASE_TIMEOUT_S,
                )

    async def _attempt(
        self, reservation: Reservation, request: GenerateRequest, *, pool: str
    ) -> AsyncGenerator[GeneratedTokens, None]:
        """One attempt on the reserved rank of `pool`, with its work accounted for."""
        async with self._channels.stub(reservation.rank.address) as stub:
            parts = attempt(
                stub,
                request,
                vocab_size=self._vocab_size,
                settings=self._settings,
                accepted=reservation.accepted,
                credentials=self._credentials,
                pool=pool,
                worker=reservation.rank.name,
            )
            async with aclosing(parts):
                async for part in parts:
                    reservation.generated(len(part.tokens))
                    yield part

    def _note_break(
        self,
        progress: "_RequestProgress",
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
            *(request.request_id, progress.running.rank.name, progress.running.rank.address),
            *(len(progress.tokens), request.max_tokens, reason),
        )
        self._tally.replays += 1
        progress.without_rank_since_s = self._ranks.now()
        progress.failures.append(f"{progress.running.rank.name}: {reason}")
        self._check_verdict(progress, request)
        if len(progress.failures) >= self._settings.max_attempts:
            raise AttemptsExhaustedError(
                f"{len(progress.failures)} attempts failed: {'; '.join(progress.failures)}"
            )

    def _check_verdict(self, progress: "_RequestProgress", request: GenerateRequest) -> None:
        verdict = progress.suspicion.verdict
        if not verdict:
            return
        failures = f" ({'; '.join(progress.failures)})" if progress.failures else ""
        reason = (
            f"the request is rejected because {verdict}{failures}: "
            f"change the request before retrying"
        )
        # The choices of a request are rejected together, and counted once.
        if not progress.suspicion.is_rejected:
            progress.suspicion.is_rejected = True
            self._tally.poison += 1
            _log.error("%s: %s", request.request_id, reason)
        raise PoisonRequestError(reason)


@dataclass(slots=True, kw_only=True)
class _RequestProgress:
    """How far a request is, and what went wrong so far."""

    without_rank_since_s: float
    """When it last lost its rank, or arrived."""

    suspicion: Suspicion
    """Shared with the request's other choices."""

    running: Reservation = field(init=False)
    """Where it runs now."""

    was_placed: bool = False
    """Whether a rank was reserved for it before."""

    tokens: list[int] = field(default_factory=list)
    """Tokens so far."""

    failures: list[str] = field(default_factory=list)
    """Rank and reason of each failure."""

    avoid: set[str] = field(default_factory=set)
    """Addresses of the ranks that failed."""

    was_handed_over: bool = False
    """Whether a decode rank has continued it; further handovers after failures are not reported."""

    def with_handover(self, part: GeneratedTokens, request: GenerateRequest) -> GeneratedTokens:
        """The first part of a decode rank, with how much of the prompt was handed over to it."""
        if self.was_handed_over:
            return part
        self.was_handed_over = True
        num_cached = 0 if part.prompt is None else part.prompt.num_cached
        num_prompt = len(request.prompt) - request.num_replayed
        return replace(part, num_handed_over=min(num_cached, num_prompt))
