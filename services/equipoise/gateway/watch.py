"""`follow`: what the balancers tell about the pool's ranks, as long as the gateway lives.

Owns the status stream, its bounds and going from one balancer to the next. While none answers,
what was told last stays true as far as anybody knows, and serving goes on. A balancer that knows no
ranks is left at once: one that follows never will, however often it has other news.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc

from equipoise.gateway.ranks import Ranks, ToldRank
from equipoise.gateway.routing import Standing
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise_api.v1 import status_pb2, status_pb2_grpc

PACE_S = 0.5
"""The balancer tells changes at most this often."""

SILENCE_S = 15.0
"""A stream without news for so long is opened anew (at the next balancer, if there are several):
nothing else tells an idle pool from a balancer that is gone without a word."""

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0

_STANDING = {
    "connected": Standing.OPEN,
    "leaving": Standing.CLOSED,
    "silent": Standing.DOUBTFUL,
    "gone": Standing.DOUBTFUL,
}

_log = logging.getLogger(__name__)


async def follow(
    balancers: Sequence[str],
    *,
    pool: str,
    ranks: Ranks,
    credentials: Credentials,
) -> None:
    """Keep `ranks` told, until cancelled; the addresses (host:port) are asked in turn."""
    num_failures, said = 0, ""
    for address in itertools.cycle(balancers):
        try:
            async for status in _watch(address, pool, credentials):
                if num_failures or not said:
                    said = f"the balancer at {address} tells the ranks of {status.pool}"
                    _log.info("%s", said)
                num_failures = 0
                ranks.tell(told_ranks(status))
        except TimeoutError:
            continue
        except _NobodyToldError as error:
            why = str(error)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {credentials.explain(error.details())}"
        except TrustError as error:
            why = str(error)
        else:
            why = "it ended the stream"
        words = f"the balancer at {address} does not tell the ranks: {why}; trying on"
        if words != said:
            _log.warning("%s", words)
            said = words
        num_failures += 1
        bound_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(num_failures, 16))
        await asyncio.sleep(random.uniform(0, bound_s))  # noqa: S311 - spreads retries


def told_ranks(status: status_pb2.PoolStatus) -> Iterator[ToldRank]:
    """A status's ranks; one whose address nobody can dial is left out, and said.

    What a rank's state is called beyond the words known here, it is on its way out.
    """
    for rank in status.ranks:
        try:
            address = checks.address("status", f"address of rank {rank.rank}", rank.address)
        except InvalidMessageError as error:
            _log.warning("a rank is left out: %s", error)
            continue
        yield ToldRank(
            name=rank.worker or f"rank-{rank.rank}",
            address=address,
            standing=_STANDING.get(rank.state, Standing.CLOSED),
            num_requests=rank.active_requests + rank.queued_requests,
            kv_tokens_total=rank.cache_tokens,
            kv_tokens_used=rank.cache_tokens_used,
            report=rank.tokens_processed,
        )


async def _watch(
    address: str, pool: str, credentials: Credentials
) -> AsyncIterator[status_pb2.PoolStatus]:
    """Statuses with ranks from one balancer.

    Raises:
        TimeoutError: there is no news within the bound.
        _NobodyToldError: it knows no ranks (any more).
    """
    limit = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)
    async with credentials.balancer_channel(address, options=limit) as channel:
        call = status_pb2_grpc.StatusStub(channel).WatchStatus(
            status_pb2.WatchStatusRequest(pool=pool, min_interval_s=PACE_S),
            metadata=credentials.metadata(),
        )
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    response = await call.read()
                if not isinstance(response, status_pb2.WatchStatusResponse):
                    return
                if not response.status.ranks:
                    raise _NobodyToldError(response.status.health_reason or "it knows none")
                yield response.status
        finally:
            call.cancel()


class _NobodyToldError(Exception):
    """A balancer answers, and knows no ranks; says why."""
