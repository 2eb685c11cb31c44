"""`Relay`: one request's life: a place at a rank, its tokens, another rank when that one breaks.

Whoever reads the tokens sees one stream. What was made before a break is never made again: the next
rank gets the prompt with the tokens so far, and goes on as if nothing had been, sampling too.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from equipoise.gateway.attempt import Bounds, Made, TokenRequest, attempt
from equipoise.gateway.errors import (
    AttemptsExhaustedError,
    InvalidRequestError,
    PoisonRequestError,
    RankFullError,
    RankLostError,
)
from equipoise.gateway.metrics import RequestTally
from equipoise.gateway.ranks import Place, Ranks
from equipoise.gateway.suspicion import Suspicion
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

_CHANNEL_OPTIONS = (
    # A rank that comes back is found at once; left alone, gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPolicy:
    """How long and how often is tried.

    `queue_s` bounds each time without a rank, seconds. `max_attempts` ranks may break under a
    request that they had taken; those that do not take it cost nothing but time.
    """

    bounds: Bounds
    queue_s: float
    max_attempts: int


class Relay:
    """Answers requests by the ranks; used from one event loop only."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        vocab_size: int,
        policy: RelayPolicy,
        credentials: Credentials,
        tally: RequestTally | None = None,
    ) -> None:
        self._ranks = ranks
        self._tally = tally or RequestTally()
        self._vocab_size = vocab_size
        self._policy = policy
        self._credentials = credentials
        self._channels: dict[tuple[str, int], _SharedChannel] = {}

    def stream(self, request: TokenRequest) -> AsyncGenerator[Made, None]:
        """Tokens of a request up to its finish, whatever ranks do. Close it to end it early.

        Raises:
            RequestError: it cannot be answered; says why, and whether to try again.
        """
        return self._tally.counted(self._stream(request), now=self._ranks.now)

    async def _stream(self, request: TokenRequest) -> AsyncGenerator[Made, None]:
        story = _Story(without_rank_since_s=self._ranks.now())
        while True:
            rest = request.after(tuple(story.made))
            place = await self._ranks.place(
                rest,
                avoid=frozenset(story.avoid),
                is_returning=story.was_placed,
                is_suspect=story.suspicion.is_strong,
                until_s=story.without_rank_since_s + self._policy.queue_s,
                bound_s=self._policy.queue_s,
            )
            story.was_placed = True
            with place:
                try:
                    async with aclosing(self._at(place, rest)) as parts:
                        async for part in parts:
                            story.made += part.tokens
                            story.suspicion.note_progress()
                            yield part
                    return
                except RankFullError as full:
                    place.full(str(full))
                except RankLostError as lost:
                    place.lost(str(lost))
                    story.avoid.add(place.address)
                    if place.was_accepted:
                        story.suspicion.note_break(lost.blame)
                        self._note_break(story, place, request, reason=str(lost))
                except InvalidRequestError as refusal:
                    if not story.made:
                        raise
                    # It could be served so far: this rank differs from the others.
                    story.avoid.add(place.address)
                    self._note_break(story, place, request, reason=f"it refuses: {refusal}")

    async def _at(self, place: Place, request: TokenRequest) -> AsyncGenerator[Made, None]:
        """One attempt at the place's rank, with its books kept."""
        async with self._stub(place.address) as stub:
            parts = attempt(
                stub,
                request,
                vocab_size=self._vocab_size,
                bounds=self._policy.bounds,
                accepted=place.accepted,
                credentials=self._credentials,
            )
            async with aclosing(parts):
                async for part in parts:
                    place.made(len(part.tokens))
                    yield part

    def _note_break(
        self, story: "_Story", place: Place, request: TokenRequest, *, reason: str
    ) -> None:
        """Remember a break.

        Raises:
            PoisonRequestError: the request seems to be what breaks ranks.
            AttemptsExhaustedError: it was one too many.
        """
        _log.warning(
            "%s: %s at %s broke with %d of %d tokens made: %s",
            *(request.request_id, place.name, place.address),
            *(len(story.made), request.max_tokens, reason),
        )
        self._tally.replays += 1
        story.without_rank_since_s = self._ranks.now()
        story.breaks.append(f"{place.name}: {reason}")
        if verdict := story.suspicion.verdict:
            self._tally.poison += 1
            raise PoisonRequestError(
                f"the request is refused, because {verdict} ({'; '.join(story.breaks)}): "
                f"change it before you send it again"
            )
        if len(story.breaks) >= self._policy.max_attempts:
            raise AttemptsExhaustedError(
                f"{len(story.breaks)} attempts broke: {'; '.join(story.breaks)}"
            )

    @asynccontextmanager
    async def _stub(self, address: str) -> AsyncIterator["pb_grpc.InferenceAsyncStub"]:
        """A channel that streams share while any is open: none is kept to a rank that is gone."""
        place = (address, self._credentials.version())
        shared = self._channels.get(place)
        if shared is None:
            try:
                channel = self._credentials.worker_channel(address, options=_CHANNEL_OPTIONS)
            except TrustError as error:
                raise RankLostError(str(error)) from error
            shared = self._channels[place] = _SharedChannel(channel=channel)
        shared.num_users += 1
        try:
            yield pb_grpc.InferenceStub(shared.channel)
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                del self._channels[place]
                await shared.channel.close(None)


@dataclass(slots=True, kw_only=True)
class _Story:
    """What has happened to a request: its tokens, its breaks, and since when it has no rank."""

    without_rank_since_s: float
    was_placed: bool = False
    made: list[int] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    suspicion: Suspicion = field(default_factory=Suspicion)


@dataclass(slots=True, kw_only=True)
class _SharedChannel:
    channel: grpc.aio.Channel
    num_users: int = 0
