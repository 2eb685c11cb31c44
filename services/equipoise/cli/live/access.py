"""`Access`: how every command that asks a balancer proves who asks, and what a refusal means."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from equipoise.trust.credentials import Credentials
from equipoise.trust.settings import Tls, or_environment

LEADER_METADATA = "equipoise-leader"
"""Trailing metadata in which a follower names the balancer that leads."""


class BalancerRefusedError(RuntimeError):
    """The balancer cannot be asked, or refuses; the message says what to do.

    `leader_address` is set by a follower that knows who leads.
    """

    def __init__(self, message: str, *, leader_address: str = "") -> None:
        super().__init__(message)
        self.leader_address = leader_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What is shown to a balancer."""

    tls: Tls = field(default_factory=Tls)
    """Certificates to dial the balancer with."""

    tls_balancer_name: str = or_environment("EQUIPOISE_TLS_BALANCER_NAME")
    """Name in the certificates of balancers, where they are dialled by addresses that are not, as
    behind `kubectl port-forward`."""

    token_file: str = or_environment("EQUIPOISE_TOKEN_FILE")
    """File with the token to show to the balancer."""

    def credentials(self) -> Credentials:
        """What the files say.

        Raises:
            TrustError: a file cannot be used.
        """
        return Credentials(
            self.tls, token_file=self.token_file, balancer_name=self.tls_balancer_name
        )


@contextmanager
def explained(address: str, credentials: Credentials) -> Iterator[None]:
    """Turn what gRPC raises in the block into one sentence.

    Raises:
        BalancerRefusedError: the sentence.
    """
    try:
        yield
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)  # noqa: PT017 - no test
        leader = dict(error.trailing_metadata() or ()).get(LEADER_METADATA, "")
        raise BalancerRefusedError(
            _words(error, address, credentials), leader_address=str(leader)
        ) from error


def _words(error: grpc.Call, address: str, credentials: Credentials) -> str:
    details = error.details() or ""
    if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        if (words := credentials.explain(details)) != details:
            return f"the balancer at {address} cannot be asked: {words}"
        if "failed to connect" in details or not details or "Deadline" in details:
            return (
                f"no balancer answers at {address}: start one with `equipoise balancer`, or name "
                "another with --address"
            )
    return f"the balancer at {address} answers: {details}"
