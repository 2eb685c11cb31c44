"""`BalancerClient`: questions to the balancer that leads. What gRPC raises becomes one sentence."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import grpc

from equipoise.cli.live.access import LEADER_METADATA, BalancerRefusedError, explained
from equipoise.cli.live.ask_settings import AskSettings
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise_api.v1 import status_pb2 as pb
from equipoise_api.v1 import status_pb2_grpc

_LIMIT = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)


@contextmanager
def asking(settings: AskSettings) -> Iterator["BalancerClient"]:
    """A client of the balancer that leads, where the one at `settings.address` names it.

    A follower knows the past only. Where its leader cannot be reached from here, and where nobody
    answers, the given one has the word.

    Raises:
        TrustError: a file of certificates or of the token cannot be used.
    """
    credentials = settings.access.credentials()
    address = _leader(settings, credentials)
    with credentials.blocking_channel(address, options=_LIMIT) as channel:
        yield BalancerClient(channel, replace(settings, address=address), credentials)


class BalancerClient:
    """Every method raises `BalancerRefusedError` if the balancer cannot be asked, or refuses."""

    def __init__(
        self, channel: grpc.Channel, settings: AskSettings, credentials: Credentials
    ) -> None:
        self._stub = status_pb2_grpc.StatusStub(channel)
        self._pool = settings.pool
        self._timeout_s = settings.timeout_s
        self._credentials = credentials
        self.address = settings.address

    def pools(self) -> list[pb.PoolSummary]:
        """Every pool in a line."""
        with self._explained():
            response = self._stub.ListPools(
                pb.ListPoolsRequest(), timeout=self._timeout_s, metadata=self._shown()
            )
        return list(response.pools)

    def status(self) -> pb.PoolStatus:
        """The pool's whole state."""
        with self._explained():
            response = self._stub.GetStatus(
                pb.GetStatusRequest(pool=self._pool),
                timeout=self._timeout_s,
                metadata=self._shown(),
            )
        return response.status

    def layout(self, generation: int = 0) -> pb.GetLayoutResponse:
        """A layout, the committed one for generation 0."""
        with self._explained():
            return self._stub.GetLayout(
                pb.GetLayoutRequest(pool=self._pool, generation=generation),
                timeout=self._timeout_s,
                metadata=self._shown(),
            )

    def loads(self) -> pb.GetLoadsResponse:
        """The loads that decisions rest on."""
        with self._explained():
            return self._stub.GetLoads(
                pb.GetLoadsRequest(pool=self._pool),
                timeout=self._timeout_s,
                metadata=self._shown(),
            )

    def decisions(self, *, limit: int) -> list[pb.Decision]:
        """Past verdicts, newest first."""
        with self._explained():
            response = self._stub.ListDecisions(
                pb.ListDecisionsRequest(pool=self._pool, limit=limit),
                timeout=self._timeout_s,
                metadata=self._shown(),
            )
        return list(response.decisions)

    def watch(self, take: Callable[[pb.PoolStatus], None]) -> str:
        """Hand every new status to `take` until the stream ends; returns why it did."""
        try:
            with self._explained():
                for response in self._stub.WatchStatus(
                    pb.WatchStatusRequest(pool=self._pool), metadata=self._shown()
                ):
                    take(response.status)
        except BalancerRefusedError as error:
            return str(error)
        return f"the balancer at {self.address} ended the stream"

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.address, self._credentials)

    def _shown(self) -> tuple[tuple[str, str], ...]:
        return self._credentials.metadata()


def _leader(settings: AskSettings, credentials: Credentials) -> str:
    try:
        with credentials.blocking_channel(settings.address) as channel:
            _, call = status_pb2_grpc.StatusStub(channel).ListPools.with_call(
                pb.ListPoolsRequest(), timeout=settings.timeout_s, metadata=credentials.metadata()
            )
        leader = str(dict(call.trailing_metadata()).get(LEADER_METADATA, settings.address))
        if leader != settings.address:
            with credentials.blocking_channel(leader) as channel:
                grpc.channel_ready_future(channel).result(timeout=settings.timeout_s)
    except (grpc.RpcError, grpc.FutureTimeoutError, TrustError):
        return settings.address
    return leader
