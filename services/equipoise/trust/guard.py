"""`Guard`: stands before every call of a port, and says who called and what he may."""

import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from equipoise.trust.errors import RefusedCallerError
from equipoise.trust.identity import Caller, Role, certified
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import AcceptedTokens

ANYBODY = None
"""For a service that needs no proof: a probe has none."""

Rights = Mapping[str, frozenset[Role] | None]
"""Who may call each service, by its full name; a service that is not in it is closed."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_SCHEME = "bearer "

_log = logging.getLogger(__name__)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs only are generic
    """Lets a call in if every proof that the port asks for allows its service.

    A port asks for a certificate if its TLS is mutual, and for a token if `tokens` names a file;
    if it asks for neither, everybody is let in, and where he may come from is `Tls`'s business.
    Workers must be of `pool`, if that is given.

    Raises:
        TrustError: the file of tokens makes no sense.
    """

    def __init__(self, tls: Tls, *, tokens: str, rights: Rights, pool: str = "") -> None:
        self._tls = tls
        self._tokens = AcceptedTokens(tokens) if tokens else None
        self._rights = rights
        self._pool = pool
        self.refused: Counter[str] = Counter()

    def caller(self, context: _Context) -> Caller:
        """Who is on the other end of a call that was let in.

        Raises:
            RefusedCallerError: nobody that this port knows.
        """
        proofs = []
        if self._tokens is not None:
            found = self._tokens.find(_token(context))
            if found is None:
                raise RefusedCallerError(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the token is not one that is accepted here: was it renewed?",
                )
            proofs.append(found)
        if self._tls.is_mutual:
            common_name, alternative_names = _certified_names(context)
            named = certified(common_name=common_name, alternative_names=alternative_names)
            if named is not None:
                proofs.append(named)
            elif not proofs:
                raise RefusedCallerError(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"the certificate of {common_name!r} names no role: its common name or URI "
                    "must be like worker/POOL/WORKER, gateway, reader or admin/NAME",
                )
        return Caller(peer=context.peer(), proofs=tuple(proofs))

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Put the check before the handler of a call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if isinstance(method, bytes):
            method = method.decode()
        service = method.strip("/").partition("/")[0]
        if handler is None or (service in self._rights and self._rights[service] is ANYBODY):
            return handler

        async def admit(context: _Context) -> None:
            try:
                self._check(service, context)
            except RefusedCallerError as error:
                self._note(error, method, context)
                await context.abort(error.code, str(error))

        return _guarded(handler, admit)

    def _check(self, service: str, context: _Context) -> None:
        caller = self.caller(context)
        roles = self._rights.get(service) or frozenset()
        if not caller.may(roles):
            raise RefusedCallerError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{caller} may not call {service.rpartition('.')[2]}: that is for "
                f"{', '.join(sorted(roles)) or 'nobody'}",
            )
        if self._pool and not caller.may_speak_for(pool=self._pool):
            raise RefusedCallerError(
                grpc.StatusCode.PERMISSION_DENIED, f"{caller} is not of pool {self._pool}"
            )

    def _note(self, error: RefusedCallerError, method: str, context: _Context) -> None:
        kind = error.code.name.lower()
        self.refused[kind] += 1
        count = self.refused[kind]
        if count & (count - 1) == 0:
            # The 1st, 2nd, 4th, 8th: whoever tries on must not fill the log.
            _log.warning(
                "refused (%s, time %d): %s of %s: %s", kind, count, method, context.peer(), error
            )


def _token(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if text.lower().startswith(_SCHEME):
                return text[len(_SCHEME) :].strip()
    raise RefusedCallerError(
        grpc.StatusCode.UNAUTHENTICATED,
        "a token is needed here: name a file that has it with --token-file",
    )


def _certified_names(context: _Context) -> tuple[str, list[str]]:
    """Common name and alternative names of a caller's certificate, which gRPC has verified."""
    found = context.auth_context()
    names = [name.decode(errors="replace") for name in found.get("x509_common_name", ())]
    others = found.get("x509_subject_alternative_name", ())
    return "".join(names[:1]), [name.decode(errors="replace") for name in others]


def _guarded(handler: Any, admit: Callable[[_Context], Awaitable[None]]) -> Any:
    """The handler, with the check before its first line."""
    if handler.request_streaming and handler.response_streaming:
        inner, wrap = handler.stream_stream, grpc.stream_stream_rpc_method_handler
    elif handler.request_streaming:
        inner, wrap = handler.stream_unary, grpc.stream_unary_rpc_method_handler
    elif handler.response_streaming:
        inner, wrap = handler.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        inner, wrap = handler.unary_unary, grpc.unary_unary_rpc_method_handler

    async def answer(request: Any, context: _Context) -> Any:
        await admit(context)
        return await inner(request, context)

    async def generate(request: Any, context: _Context) -> AsyncIterator[Any]:
        await admit(context)
        async for response in inner(request, context):
            yield response

    behavior = generate if inspect.isasyncgenfunction(inner) else answer
    return wrap(
        behavior,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
