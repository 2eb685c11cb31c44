"""`follow`: keeps the rank table up to date from the balancers' status streams.

Also tells the balancer what the status shows of gateways.

Goes from one balancer to the next. While none answers, the last known ranks stay in use. A balancer
that knows no ranks is left at once: a follower never will, however often it sends updates.
"""

import asyncio
import itertools
import logging
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress

import grpc

from equipoise.gateway.rank_load import RankInfo, RankState
from equipoise.gateway.rank_table import RankTable
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.tokens import BALANCER
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise_api.v1 import (
    gateway_link_pb2,
    gateway_link_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

PACE_S = 0.5
"""The balancer sends changes at most this often, seconds."""

SILENCE_S = 15.0
"""A stream that is silent for this long is opened again, at the next balancer if there are several:
nothing else distinguishes an idle pool from a vanished balancer."""

REPORT_TIMEOUT_S = 2.0
"""Time that a balancer has to take a report, seconds."""

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0

_STATE_OF = {
    "connected": RankState.OPEN,
    "leaving": RankState.CLOSED,
    "silent": RankState.DOUBTFUL,
    "gone": RankState.DOUBTFUL,
}

_log = logging.getLogger(__name__)


async def follow(
    balancers: Sequence[str],
    *,
    pool: str,
    ranks: RankTable,
    credentials: Credentials,
    num_poison: Callable[[], int] = lambda: 0,
) -> None:
    """Keep `ranks` up to date until cancelled; the addresses (host:port) are tried in turn.

    `num_poison` counts the requests that this process has rejected because ranks failed; the
    balancer is told.
    """
    num_failures, logged, boot_id = 0, "", uuid.uuid4().hex

    def counts() -> gateway_link_pb2.GatewayLinkReportRequest:
        return gateway_link_pb2.GatewayLinkReportRequest(
            pool=pool, boot_id=boot_id, poison_requests=num_poison()
        )

    for address in itertools.cycle(balancers):
        try:
            async for status in _watch(address, pool, credentials, counts):
                if num_failures or not logged:
                    logged = f"following the ranks of {status.pool} at balancer {address}"
                    _log.info("%s", logged)
                num_failures = 0
                ranks.update(ranks_of_status(status))
        except TimeoutError:
            continue
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {credentials.explain(error.details())}"
        except (_NoRanksKnownError, TrustError) as error:
            why = str(error)
        else:
            why = "it ended the stream"
        message = f"cannot get the ranks of {pool} from balancer {address}: {why}; retrying"
        if message != logged:
            _log.warning("%s", message)
            logged = message
        num_failures += 1
        backoff_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(num_failures, 16))
        await asyncio.sleep(random.uniform(0, backoff_s))  # noqa: S311 - spreads retries


def ranks_of_status(status: status_pb2.PoolStatus) -> Iterator[RankInfo]:
    """A status's ranks; one with an invalid address is logged and left out.

    A rank in a state that this version does not know is closed.
    """
    for rank in status.ranks:
        try:
            address = checks.address("status", f"address of rank {rank.rank}", rank.address)
            name = checks.name("status", "worker", rank.worker or f"rank-{rank.rank}")
        except InvalidMessageError as error:
            _log.warning("ignoring a rank: %s", error)
            continue
        yield RankInfo(
            name=name,
            address=address,
            state=_STATE_OF.get(rank.state, RankState.CLOSED),
            num_requests=rank.active_requests + rank.queued_requests,
            max_requests=rank.max_requests,
            pending_tokens=rank.pending_prompt_tokens,
            pending_pairs=rank.pending_prompt_pairs,
            parity_tokens=rank.parity_tokens,
            kv_tokens_total=rank.cache_tokens,
            kv_tokens_used=rank.cache_tokens_used,
            report=rank.tokens_processed,
            boot_id=rank.boot_id,
            latent_form=rank.latent_form,
            block_tokens=rank.block_tokens,
        )


async def _watch(
    address: str,
    pool: str,
    credentials: Credentials,
    counts: Callable[[], gateway_link_pb2.GatewayLinkReportRequest],
) -> AsyncIterator[status_pb2.PoolStatus]:
    """Statuses with ranks from one balancer, which is told of `counts` that are not zero.

    Raises:
        TimeoutError: the stream is silent.
        _NoRanksKnownError: the balancer knows no ranks.
    """
    limit = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)
    async with credentials.balancer_channel(address, options=limit) as channel:
        call = status_pb2_grpc.StatusStub(channel).WatchStatus(
            status_pb2.WatchStatusRequest(pool=pool, min_interval_s=PACE_S),
            metadata=credentials.metadata(audience=BALANCER),
        )
        told = 0
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    response = await call.read()
                if not isinstance(response, status_pb2.WatchStatusResponse):
                    return
                if not response.status.ranks:
                    raise _NoRanksKnownError(response.status.health_reason or "it knows no ranks")
                yield response.status
                if (report := counts()).poison_requests != told:
                    # A balancer of an earlier version takes no reports.
                    with suppress(grpc.aio.AioRpcError):
                        await gateway_link_pb2_grpc.GatewayLinkStub(channel).Report(
                            report,
                            metadata=credentials.metadata(audience=BALANCER),
                            timeout=REPORT_TIMEOUT_S,
                        )
                    told = report.poison_requests
        finally:
            call.cancel()


class _NoRanksKnownError(Exception):
    """A balancer answers and knows no ranks; says why."""
