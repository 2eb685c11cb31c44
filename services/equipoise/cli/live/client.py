"""`BalancerClient`: what the leader can be asked, and gRPC errors as one sentence each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

import grpc

from equipoise.cli.live.route import ROUTE, NoRouteError
from equipoise.cli.live.settings import Access, BalancerClientSettings
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.tokens import BALANCER
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2_grpc
from equipoise_api.v1 import status_pb2 as pb

LEADER_METADATA = "equipoise-leader"
"""Trailing metadata in which a follower names the leader's address."""

STREAM_S = 15.0
"""A watch is opened again at the leader this often, seconds: that of a follower does not end when
it learns who leads."""

_RETRY_S = 1.0
"""Seconds before a watch that has failed is opened again."""

_LIMIT = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_NOT_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
"""In the details of calls that were never sent."""

_R = TypeVar("_R")


class BalancerRejectedError(RuntimeError):
    """The balancer is unreachable or rejects the call; the message includes the remedy."""

    def __init__(self, message: str, *, leader_address: str = "") -> None:
        super().__init__(message)
        self.leader_address = leader_address
        """The leader's address, if a follower rejected the call and knows it."""


def credentials_of(access: Access) -> Credentials:
    """Read the files that `access` names.

    Raises:
        TrustError: a file cannot be used.
    """
    return Credentials(
        access.tls, signing_key=access.signing_key, balancer_name=access.tls_balancer_name
    )


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """Open a channel to the balancer that is known by `address`, host:port.

    Raises:
        NoRouteError: nothing reaches it from here.
        TrustError: plain text would leave this machine without `insecure`.
    """
    return credentials.blocking_channel(ROUTE.get()(address), options=_LIMIT)


@contextmanager
def explained(address: str, credentials: Credentials) -> Iterator[None]:
    """Turn gRPC errors of the block into one sentence.

    Raises:
        BalancerRejectedError: the sentence.
    """
    try:
        yield
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)  # noqa: PT017 - no test
        leader = dict(error.trailing_metadata() or ()).get(LEADER_METADATA, "")
        raise BalancerRejectedError(
            _message(error, address, credentials), leader_address=str(leader)
        ) from error


@contextmanager
def connected(settings: BalancerClientSettings) -> Iterator["BalancerClient"]:
    """Connect to the leader, if the balancer at `settings.address` names a reachable one.

    Otherwise the client connects to that balancer directly; a follower has past state only.

    Raises:
        NoRouteError: nothing reaches the balancer from here.
        TrustError: a certificate or token file cannot be used.
    """
    credentials = credentials_of(settings.access)
    with _connected(_leader(settings, credentials), settings, credentials) as client:
        yield client


def watch_leader(
    settings: BalancerClientSettings,
    take: Callable[["BalancerClient", pb.PoolStatus], None],
    *,
    report: Callable[[str], None],
) -> NoReturn:
    """Pass every new status of the pool to `take`, from whichever balancer leads, until Ctrl-C.

    `take` also gets the client that the status came from; a status may be repeated. `report` is
    told in one sentence why there is none for now.

    Raises:
        TrustError: a certificate or token file cannot be used.
    """
    credentials = credentials_of(settings.access)
    address = settings.address
    while True:
        try:
            address = _leader(settings, credentials, latest=address)
            with _connected(address, settings, credentials) as client:
                fault = client.watch(partial(take, client))
        except NoRouteError as error:
            fault = str(error)
        if fault:
            report(fault)
            time.sleep(_RETRY_S)


class BalancerClient:
    """The Status service of one balancer, and its audit records.

    Every method except `watch` raises `BalancerRejectedError` if the balancer is unreachable or
    rejects the call.
    """

    def __init__(
        self, channel: grpc.Channel, settings: BalancerClientSettings, credentials: Credentials
    ) -> None:
        self._stub = status_pb2_grpc.StatusStub(channel)
        self._admin = admin_pb2_grpc.AdminStub(channel)
        self._pool = settings.pool
        self._timeout_s = settings.timeout_s
        self._credentials = credentials
        self.address = settings.address

    def pools(self) -> pb.ListPoolsResponse:
        """A summary of every pool, and why the balancer accepts no workers yet."""
        return self._call(self._stub.ListPools, pb.ListPoolsRequest())

    def status(self, pool: str = "") -> pb.PoolStatus:
        """The status of a pool; by default of the settings' one."""
        request = pb.GetStatusRequest(pool=pool or self._pool)
        return self._call(self._stub.GetStatus, request).status

    def layout(self, generation: int = 0) -> pb.GetLayoutResponse:
        """A layout; generation 0 is the committed one."""
        request = pb.GetLayoutRequest(pool=self._pool, generation=generation)
        return self._call(self._stub.GetLayout, request)

    def loads(self) -> pb.GetLoadsResponse:
        """The loads that decisions are based on."""
        return self._call(self._stub.GetLoads, pb.GetLoadsRequest(pool=self._pool))

    def decisions(self, *, limit: int) -> list[pb.Decision]:
        """Past decisions, newest first."""
        request = pb.ListDecisionsRequest(pool=self._pool, limit=limit)
        return list(self._call(self._stub.ListDecisions, request).decisions)

    def audit(self, *, limit: int) -> list[pb.AuditRecord]:
        """Audit records, newest first."""
        request = admin_pb2.ListAuditRequest(pool=self._pool, limit=limit)
        return list(self._call(self._admin.ListAudit, request).entries)

    def watch(self, take: Callable[[pb.PoolStatus], None]) -> str:
        """Pass every new status to `take` for at most `STREAM_S`.

        Returns why there were none or it ended early; empty if it did not.
        """
        request = pb.WatchStatusRequest(pool=self._pool)
        try:
            with explained(self.address, self._credentials):
                stream = self._stub.WatchStatus(
                    request,
                    timeout=STREAM_S,
                    metadata=self._credentials.metadata(audience=BALANCER),
                )
                is_answered = False
                try:
                    for response in stream:
                        is_answered = True
                        take(response.status)
                except grpc.RpcError:
                    if is_answered and stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        return ""
                    raise
        except BalancerRejectedError as error:
            return str(error)
        return f"the balancer at {self.address} closed the stream"

    def _call(self, method: Callable[..., _R], request: object) -> _R:
        with explained(self.address, self._credentials):
            return method(
                request,
                timeout=self._timeout_s,
                metadata=self._credentials.metadata(audience=BALANCER),
            )


def is_unsent(error: grpc.Call, credentials: Credentials) -> bool:
    """Whether the call failed because no connection was made."""
    details = error.details() or ""
    return bool(credentials.problem(details)) or any(one in details for one in _NOT_CONNECTED)


@contextmanager
def _connected(
    address: str, settings: BalancerClientSettings, credentials: Credentials
) -> Iterator[BalancerClient]:
    with open_channel(address, credentials) as channel:
        yield BalancerClient(channel, replace(settings, address=address), credentials)


def _message(error: grpc.Call, address: str, credentials: Credentials) -> str:
    details = credentials.explain(error.details())
    if error.code() not in _UNREACHABLE:
        return f"the balancer at {address} rejected the request: {details}"
    if not error.details() or credentials.problem(error.details()):
        return f"cannot connect to the balancer at {address}: {details}"
    if is_unsent(error, credentials) or "Deadline" in details:
        return (
            f"no balancer answers at {address}: start one with `equipoise balancer`, or name "
            "another one with --address"
        )
    return f"the request to the balancer at {address} failed: {details}"


def _leader(settings: BalancerClientSettings, credentials: Credentials, *, latest: str = "") -> str:
    """The leader's address, or that of a balancer that answers if the leader is out of reach.

    Asks the balancer at `latest`, which names its successor, and, if it does not answer, the one at
    `settings.address`. If neither does, the latter's address is returned.
    """
    for address in dict.fromkeys((latest or settings.address, settings.address)):
        try:
            with open_channel(address, credentials) as channel:
                _, call = status_pb2_grpc.StatusStub(channel).ListPools.with_call(
                    pb.ListPoolsRequest(),
                    timeout=settings.timeout_s,
                    metadata=credentials.metadata(audience=BALANCER),
                )
        except (grpc.RpcError, NoRouteError, TrustError):
            continue
        leader = str(dict(call.trailing_metadata()).get(LEADER_METADATA, address))
        if leader == address or _is_reachable(leader, settings.timeout_s, credentials):
            return leader
        return address
    return settings.address


def _is_reachable(address: str, timeout_s: float, credentials: Credentials) -> bool:
    try:
        with open_channel(address, credentials) as channel:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except (grpc.FutureTimeoutError, NoRouteError, TrustError):
        return False
    return True
