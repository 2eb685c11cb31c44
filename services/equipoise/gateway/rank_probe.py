"""`RankProbe`: asks ranks whether they serve, and how long their requests may be."""

import asyncio
import itertools
from collections.abc import Sequence

import grpc

from equipoise.gateway.errors import RankLostError
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankLoad
from equipoise.gateway.rank_table import RankTable
from equipoise.trust.credentials import Credentials
from equipoise.trust.tokens import worker_audience
from equipoise_api.v1 import worker_pb2 as pb

PROBE_INTERVAL_S = 0.5
"""Time between two rounds of probes, seconds."""

PROBE_TIMEOUT_S = 2.0
"""Time that a rank has to answer, seconds."""

MAX_PROBES = 16
"""Ranks per round. Those that are not known to serve come first, the others take turns."""


class RankProbe:
    """Keeps a rank table's knowledge of `pool` up to date; used from one event loop only."""

    def __init__(
        self, ranks: RankTable, *, channels: RankChannels, credentials: Credentials, pool: str
    ) -> None:
        self._ranks = ranks
        self._channels = channels
        self._credentials = credentials
        self._pool = pool

    async def run(self) -> None:
        """Probe until cancelled."""
        for turn in itertools.count():
            loads = self._ranks.loads()
            await asyncio.gather(*(self._probe(rank) for rank in _in_turn(loads, turn)))
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe(self, rank: RankLoad) -> None:
        audience = worker_audience(self._pool, rank.name)
        try:
            async with self._channels.stub(rank.address) as stub:
                limits = await stub.GetLimits(
                    pb.GetLimitsRequest(),
                    metadata=self._credentials.metadata(audience=audience),
                    timeout=PROBE_TIMEOUT_S,
                )
        except RankLostError as error:
            self._ranks.note_silence(rank.address, str(error))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                # A worker of an earlier version.
                self._ranks.note_answer(rank.address, context_length=0)
            else:
                details = self._credentials.explain(error.details())
                self._ranks.note_silence(rank.address, f"{error.code().name}: {details}")
        else:
            self._ranks.note_answer(rank.address, context_length=limits.context_length)


def _in_turn(ranks: Sequence[RankLoad], turn: int) -> Sequence[RankLoad]:
    start = turn * MAX_PROBES % max(1, len(ranks))
    rotated = [*ranks[start:], *ranks[:start]]
    return sorted(rotated, key=lambda rank: rank.answers is True)[:MAX_PROBES]
