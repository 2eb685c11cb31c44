"""`RankChannels`: gRPC channels to ranks, shared by all calls to a rank."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from equipoise.gateway.errors import RankLostError
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise_api.v1 import worker_pb2_grpc as pb_grpc

_OPTIONS = (
    # Reconnect at once to a rank that returns; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


class RankChannels:
    """At most one channel per rank and version of the certificates; used from one event loop."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels: dict[tuple[str, int], _SharedChannel] = {}

    @asynccontextmanager
    async def stub(self, address: str) -> AsyncIterator["pb_grpc.InferenceAsyncStub"]:
        """A stub on the rank's channel, which is closed with its last user.

        Raises:
            RankLostError: the rank must not be dialled.
        """
        async with self.channel(address) as channel:
            yield pb_grpc.InferenceStub(channel)

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The rank's channel, which is closed with its last user.

        Raises:
            RankLostError: the rank must not be dialled.
        """
        key = (address, self._credentials.version())
        shared = self._channels.get(key)
        if shared is None:
            try:
                channel = self._credentials.worker_channel(address, options=_OPTIONS)
            except TrustError as error:
                raise RankLostError(str(error)) from error
            shared = self._channels[key] = _SharedChannel(channel=channel)
        shared.num_users += 1
        try:
            yield shared.channel
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                del self._channels[key]
                await shared.channel.close(None)


@dataclass(slots=True, kw_only=True)
class _SharedChannel:
    channel: grpc.aio.Channel
    num_users: int = 0
