"""`Guard`: authenticates and authorises every call of a gRPC port."""

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from equipoise.telemetry.logs import is_worth_logging
from equipoise.trust.errors import InvalidTokenError
from equipoise.trust.identity import Caller, Role, certified
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import AcceptedKeys

ANYBODY = None
"""Rights of a service that needs no credentials, such as a health probe."""

Rights = Mapping[str, frozenset[Role] | None]
"""Roles that may call each service, by full name; services not listed are closed."""

REQUEST_TIMEOUT_S = 10.0
"""Within this long after its call began, a caller must have sent its only request."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_SCHEME = "bearer "

_log = logging.getLogger(__name__)


def anonymous(context: _Context) -> Caller:
    """The caller of a port that requires no credentials."""
    return Caller(peer=context.peer())


class RejectedCallerError(Exception):
    """The caller may not do this; `code` is UNAUTHENTICATED or PERMISSION_DENIED."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs only are generic
    """Admits a call if every credential that the port requires allows its service.

    Only then is its request received and parsed; one that is malformed gets INVALID_ARGUMENT.

    A port requires a client certificate if its TLS is mutual, and a token for its `audience` if
    `accepted_keys` names a file. If it requires neither, it admits every call; `Tls` then allows
    the port on loopback only, or with `insecure`. Workers must belong to `pool`, if given; those of
    `peer_pools` may call the services in `for_peers`. A right for `service/method` precedes the
    service's.

    Raises:
        TrustError: the file of accepted keys is invalid.
    """

    def __init__(
        self,
        tls: Tls,
        *,
        accepted_keys: str,
        audience: str,
        rights: Rights,
        pool: str = "",
        peer_pools: Collection[str] = (),
        for_peers: Collection[str] = (),
    ) -> None:
        self._tls = tls
        self._keys = AcceptedKeys(accepted_keys) if accepted_keys else None
        self._audience = audience
        self._rights = rights
        self._pool = pool
        self._peer_pools = peer_pools
        self._for_peers = for_peers
        self.rejected: Counter[str] = Counter()

    def caller(self, context: _Context) -> Caller:
        """Authenticate the caller.

        Raises:
            RejectedCallerError: a required credential is missing or not accepted.
        """
        identities = []
        if self._keys is not None:
            token = _token(context)
            try:
                found = self._keys.identify(token, audience=self._audience, now=time.time())
            except InvalidTokenError as error:
                raise RejectedCallerError(
                    grpc.StatusCode.UNAUTHENTICATED, f"the token is rejected: {error}"
                ) from None
            identities.append(found)
        if self._tls.is_mutual:
            common_name, alternative_names = _certified_names(context)
            named = certified(
                common_name=common_name,
                alternative_names=alternative_names,
                trust_domain=self._tls.tls_trust_domain,
            )
            if named is not None:
                identities.append(named)
            elif not identities:
                raise RejectedCallerError(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"the certificate of {common_name!r} names no role: its common name, or its "
                    f"URI after spiffe://{self._tls.tls_trust_domain}/equipoise/, must be "
                    "worker/POOL/WORKER, gateway, reader or admin/NAME",
                )
        return Caller(peer=context.peer(), identities=tuple(identities))

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Check a call before its handler runs."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if isinstance(method, bytes):
            method = method.decode()
        method = method.strip("/")
        service = method.partition("/")[0]
        if handler is None:
            return handler

        async def admit(context: _Context) -> None:
            if service in self._rights and self._rights[service] is ANYBODY:
                return
            try:
                self._check(service, method, context)
            except RejectedCallerError as error:
                self._note(error, method, context)
                await context.abort(error.code, str(error))

        return _guarded(handler, admit)

    def _check(self, service: str, method: str, context: _Context) -> None:
        caller = self.caller(context)
        roles = self._rights.get(method, self._rights.get(service)) or frozenset()
        if not caller.may(roles):
            raise RejectedCallerError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{caller} may not call {service.rpartition('.')[2]}: allowed roles are "
                f"{', '.join(sorted(roles)) or 'none'}",
            )
        pools = (self._pool, *(self._peer_pools if service in self._for_peers else ()))
        if self._pool and not any(caller.may_speak_for(pool=pool) for pool in pools):
            names = " or ".join(pools)
            raise RejectedCallerError(
                grpc.StatusCode.PERMISSION_DENIED, f"{caller} does not belong to pool {names}"
            )

    def _note(self, error: RejectedCallerError, method: str, context: _Context) -> None:
        kind = error.code.name.lower()
        self.rejected[kind] += 1
        count = self.rejected[kind]
        if is_worth_logging(count):  # A caller that retries must not flood the log.
            peer = context.peer()
            _log.warning(
                "rejected (%s, %d so far): %s from %s: %s", kind, count, method, peer, error
            )


def _token(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if text.lower().startswith(_SCHEME):
                return text[len(_SCHEME) :].strip()
    raise RejectedCallerError(
        grpc.StatusCode.UNAUTHENTICATED,
        "this port requires a token: set --signing-key or EQUIPOISE_SIGNING_KEY",
    )


def _certified_names(context: _Context) -> tuple[str, list[str]]:
    """Common name and alternative names in the caller's certificate, verified by gRPC."""
    found = context.auth_context()
    names = [name.decode(errors="replace") for name in found.get("x509_common_name", ())]
    others = found.get("x509_subject_alternative_name", ())
    return "".join(names[:1]), [name.decode(errors="replace") for name in others]


def _guarded(handler: Any, admit: Callable[[_Context], Awaitable[None]]) -> Any:
    """The handler with `admit` called first; only then is a single request received and parsed.

    To gRPC all calls are streams, which looks the same to callers. It would receive a single
    request before it calls anything here, however long that takes and whoever sends it.
    """
    streams = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    inner, parse = getattr(handler, kind), handler.request_deserializer

    async def only_one(requests: AsyncIterator[Any], context: _Context) -> Any:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return parse(await anext(requests))
        except (DecodeError, StopAsyncIteration) as error:
            reason = str(error) or "there is none"
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {reason}"
            )
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no request arrived within {REQUEST_TIMEOUT_S:g} s",
            )

    async def answer(requests: AsyncIterator[Any], context: _Context) -> None:
        await admit(context)
        request = requests if handler.request_streaming else await only_one(requests, context)
        if inspect.isasyncgenfunction(inner):
            async for response in inner(request, context):
                await context.write(response)
            return
        response = await inner(request, context)
        if not handler.response_streaming:
            await context.write(response)

    return grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=parse if handler.request_streaming else None,
        response_serializer=handler.response_serializer,
    )
