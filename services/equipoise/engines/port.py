"""`PeerPort`: where a rank inside an engine gives its experts to the other ranks."""

from typing import Any

import grpc

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.settings import EngineSettings, with_variables
from equipoise.rank.transfer import ExpertTransferService
from equipoise.trust.credentials import MAX_RANK_CALLS, RANK_PORT_OPTIONS, Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.guard import Guard, Rights
from equipoise.trust.identity import Caller, Role
from equipoise.trust.tokens import worker_audience
from equipoise_api.v1 import worker_pb2_grpc

_RIGHTS: Rights = {"equipoise_api.v1.ExpertTransfer": frozenset({Role.WORKER})}


class PeerPort:
    """A rank's gRPC server; `transfer` says which experts it gives."""

    def __init__(self, settings: EngineSettings) -> None:
        """Nothing is opened before `open`.

        Raises:
            UnsupportedEngineError: a certificate or key is unusable; names the variable.
        """
        self._settings = settings
        self.transfer = ExpertTransferService(caller=self._caller)
        """The service that gives experts."""
        self.address = ""
        """host:port for peers; empty until the port is open."""
        try:
            self.credentials = Credentials(
                settings.tls,
                signing_key=settings.signing_key,
                worker_name=settings.tls_worker_name,
                balancer_name=settings.tls_balancer_name,
            )
            """What this process presents to others."""
        except TrustError as error:
            raise UnsupportedEngineError(with_variables(str(error))) from error

    async def open(self, worker: str) -> None:
        """Listen, as the rank's worker of this name.

        Raises:
            UnsupportedEngineError: the port cannot be opened, or the file of accepted keys is
                unusable; names the variable.
        """
        settings = self._settings
        try:
            self._guard = Guard(
                settings.tls,
                accepted_keys=settings.accepted_keys,
                audience=worker_audience(settings.pool, worker),
                rights=_RIGHTS,
                pool=settings.pool,
            )
        except TrustError as error:
            raise UnsupportedEngineError(with_variables(str(error))) from error
        self._server = grpc.aio.server(
            options=RANK_PORT_OPTIONS,
            interceptors=[self._guard],
            maximum_concurrent_rpcs=MAX_RANK_CALLS,
        )
        worker_pb2_grpc.add_ExpertTransferServicer_to_server(self.transfer, self._server)
        try:
            port = self.credentials.bind(self._server, settings.listen)
        except RuntimeError as error:
            raise UnsupportedEngineError(
                f"cannot listen on {settings.listen}: unset EQUIPOISE_LISTEN, or give it port 0, "
                "with which each rank of a host takes a free port"
            ) from error
        await self._server.start()
        self.address = f"{settings.advertise_host}:{port}"

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        return self._guard.caller(context)  # Nobody calls before the port is open.

    async def close(self) -> None:
        """Stop listening; requests in progress are cut off."""
        await self._server.stop(None)
