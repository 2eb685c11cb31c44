"""The gateway's HTTP server: its paths, how it starts, and its graceful shutdown."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from equipoise.gateway.access import ApiKeys
from equipoise.gateway.chat_template import ChatTemplate, tokenizer_info
from equipoise.gateway.completions import CompletionEndpoint
from equipoise.gateway.errors import (
    GatewayError,
    InvalidRequestError,
    RequestError,
    UnknownModelError,
)
from equipoise.gateway.fields import shown
from equipoise.gateway.http_server import http_server
from equipoise.gateway.metrics import GatewayCollector, RequestTally
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai_requests import RequestParser
from equipoise.gateway.openai_responses import (
    ChatForm,
    CompletionForm,
    error_object,
    model_object,
)
from equipoise.gateway.prompts import PromptReader
from equipoise.gateway.rank_channels import RankChannels
from equipoise.gateway.rank_load import RankInfo, RankState
from equipoise.gateway.rank_probe import RankProbe
from equipoise.gateway.rank_table import RankTable
from equipoise.gateway.relay import Relay
from equipoise.gateway.responses import ResponsesEndpoint
from equipoise.gateway.sampling_fields import SamplingDefaults
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenization import TokenizationEndpoint
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.gateway.watch import follow
from equipoise.telemetry.exposition import metrics_at, metrics_route, registry_of
from equipoise.telemetry.http import address_of, open_listener
from equipoise.trust.credentials import Credentials
from equipoise.trust.https import metrics_https
from equipoise.trust.metrics import CertificateCollector

_log = logging.getLogger(__name__)


async def serve(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event,
    listening: Callable[[str], None] | None = None,
    first_turn: int = 0,
) -> None:
    """Serve until `stop` is set, then drain. Calls `listening` with host:port.

    Ranks of equal cost take turns from `first_turn` on.

    Raises:
        GatewayError: the port cannot be listened on, or a file cannot be read.
    """
    model = await asyncio.to_thread(_Model, settings)
    credentials = Credentials(
        settings.tls,
        signing_key=settings.signing_key,
        worker_name=settings.tls_worker_name,
        balancer_name=settings.tls_balancer_name,
    )
    listener = _listener(settings)
    table = partial(
        RankTable,
        max_queued=settings.max_queued_requests,
        clock=time.monotonic,
        first_turn=first_turn,
    )
    ranks, prefill = table(), table() if settings.prefill_pool else None
    tally = RequestTally()
    open_requests = OpenRequests(max_open=settings.max_open_requests, tally=tally)
    channels = RankChannels(credentials)
    tables = {settings.pool: ranks} | ({settings.prefill_pool: prefill} if prefill else {})
    probes = [
        RankProbe(one, channels=channels, credentials=credentials, pool=pool)
        for pool, one in tables.items()
    ]
    server = http_server(
        _application(
            settings,
            model=model,
            ranks=ranks,
            prefill=prefill,
            open_requests=open_requests,
            tally=tally,
            credentials=credentials,
            channels=channels,
        ),
        idle_s=settings.idle_timeout_s,
        header_s=settings.client_timeout_s,
    )
    stopped = asyncio.create_task(stop.wait())
    watching = [
        asyncio.create_task(
            _follow(one, settings, pool=pool, stop=stop, credentials=credentials, tally=tally)
        )
        for pool, one in tables.items()
    ] + [asyncio.create_task(probe.run()) for probe in probes]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address = address_of(listener, listen=settings.listen)
    _log.info("listening on %s", address)
    if listening is not None:
        listening(address)
    try:
        async with metrics_at(
            settings.metrics,
            GatewayCollector(tally, ranks=ranks, prefill=prefill),
            CertificateCollector(credentials),
            tls=metrics_https(credentials, settings.metrics),
        ):
            done, _ = await asyncio.wait(
                {stopped, *watching, serving}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            _log.info("stopping; %d requests are open", open_requests.num_open)
            # Keep accepting, and answer 503 with the reason, while draining.
            await open_requests.drain(settings.drain_timeout_s)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        for task in (stopped, *watching):
            task.cancel()
        await asyncio.gather(stopped, *watching, return_exceptions=True)


def _listener(settings: GatewaySettings) -> socket.socket:
    try:
        listener = open_listener(settings.listen)
    except OSError as error:
        raise GatewayError(
            f"cannot listen on {settings.listen}: {error.strerror}; choose another address with "
            f"--listen"
        ) from error
    # A closed connection stays until its client has read the rest. Linux ends it if that stops.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = round(settings.client_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return listener


class _Model:
    """The model as its checkpoint folder describes it, and the API keys that may use it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.name = settings.model_name
        self.tokenizer = Tokenizer.of_checkpoint(settings.checkpoint)
        self.defaults = SamplingDefaults.of_checkpoint(settings.checkpoint)
        self.tokenizer_info = tokenizer_info(settings.checkpoint)
        template = ChatTemplate.of_checkpoint(settings.checkpoint)
        self.prompts = PromptReader(settings, tokenizer=self.tokenizer, template=template)
        self.keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)


def _application(
    settings: GatewaySettings,
    *,
    model: _Model,
    ranks: RankTable,
    prefill: RankTable | None,
    open_requests: OpenRequests,
    tally: RequestTally,
    credentials: Credentials,
    channels: RankChannels,
) -> Starlette:
    """All paths."""

    def context_length() -> int:
        return settings.context_length or ranks.context_length

    parser = RequestParser(
        settings,
        tokenizer=model.tokenizer,
        prompts=model.prompts,
        defaults=model.defaults,
        context_length=context_length,
    )
    relay = Relay(
        ranks,
        channels=channels,
        vocab_size=model.tokenizer.vocab_size,
        settings=settings,
        tally=tally,
        credentials=credentials,
        prefill=prefill,
    )
    endpoint = partial(
        CompletionEndpoint,
        settings,
        relay=relay,
        tokenizer=model.tokenizer,
        open_requests=open_requests,
    )
    completions = endpoint(parse=parser.completion, form=CompletionForm())
    chats = endpoint(parse=parser.chat, form=ChatForm())
    responses = ResponsesEndpoint(
        settings,
        relay=relay,
        tokenizer=model.tokenizer,
        open_requests=open_requests,
        parse=parser.response,
        prefix="resp_",
    )
    application = Starlette(
        routes=[
            Route("/v1/completions", _BehindKey(completions, model.keys), methods=["POST"]),
            Route("/v1/chat/completions", _BehindKey(chats, model.keys), methods=["POST"]),
            Route("/v1/responses", _BehindKey(responses, model.keys), methods=["POST"]),
            *_tokenizer_routes(settings, model, parser, open_requests),
            *_model_routes(model, context_length),
            *_probes(ranks, open_requests),
            _metrics_route(GatewayCollector(tally, ranks=ranks, prefill=prefill), model),
        ],
        exception_handlers={
            RequestError: _answer_request_error,
            HTTPException: _answer_http_error,
            Exception: _answer_internal_error,
        },
    )
    # A redirect would lead to the host that the client's header names.
    application.router.redirect_slashes = False
    return application


def _tokenizer_routes(
    settings: GatewaySettings, model: _Model, parser: RequestParser, open_requests: OpenRequests
) -> list[Route]:
    endpoint = partial(TokenizationEndpoint, settings, open_requests=open_requests)
    return [
        Route(path, _BehindKey(endpoint(answer=answer), model.keys), methods=["POST"])
        for path, answer in (("/tokenize", parser.tokenized), ("/detokenize", parser.detokenized))
    ]


def _model_routes(model: _Model, context_length: Callable[[], int]) -> list[Route]:
    """The one model that is served."""
    started_s = int(time.time())

    def entry() -> dict[str, Any]:
        return model_object(model.name, created_s=started_s, context_length=context_length())

    async def list_models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [entry()]})

    async def show_model(request: Request) -> JSONResponse:
        if (wanted := request.path_params["name"]) != model.name:
            raise UnknownModelError(
                f"the model {shown(wanted)} is not served here; use {model.name}"
            )
        return JSONResponse(entry())

    async def show_tokenizer(_: Request) -> JSONResponse:
        return JSONResponse(model.tokenizer_info)

    return [
        Route(path, _BehindKey(request_response(answer), model.keys), methods=["GET"])
        for path, answer in (
            ("/v1/models", list_models),
            ("/v1/models/{name:path}", show_model),
            # lm-eval's remote tokenizer asks for it, as vLLM has it.
            ("/tokenizer_info", show_tokenizer),
        )
    ]


def _metrics_route(collector: GatewayCollector, model: _Model) -> Route:
    """The metrics on the clients' port, where vLLM has them; behind a key, if there are any."""
    metrics = metrics_route(registry_of(collector))
    return Route(metrics.path, _BehindKey(metrics.app, model.keys), methods=["GET"])


def _probes(ranks: RankTable, open_requests: OpenRequests) -> list[Route]:
    """Probes without authentication. Unlike `telemetry`'s they give the reason."""

    async def live(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> JSONResponse:
        trouble = "this gateway is stopping" if open_requests.stopping else ranks.unready()
        if trouble:
            return JSONResponse({"status": "not ready", "reason": trouble}, status_code=503)
        return JSONResponse({"status": "ready"})

    return [
        *(Route(path, live) for path in ("/livez", "/healthz")),
        # vLLM's clients wait for /health before they send requests.
        *(Route(path, ready) for path in ("/readyz", "/health")),
    ]


class _BehindKey:
    """An ASGI application that requires an API key, unless none are configured."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise UnauthorizedError."""
        if self._keys is not None:
            self._keys.check(Request(scope).headers.get("authorization"))
        await self._app(scope, receive, send)


async def _follow(
    ranks: RankTable,
    settings: GatewaySettings,
    *,
    pool: str,
    stop: asyncio.Event,
    credentials: Credentials,
    tally: RequestTally,
) -> None:
    """Keep the ranks of `pool` up to date: from the balancers, or once from the settings."""
    if not settings.workers:
        return await follow(
            settings.balancer,
            pool=pool,
            ranks=ranks,
            credentials=credentials,
            num_poison=lambda: tally.poison if pool == settings.pool else 0,
        )
    ranks.update(
        RankInfo(name=worker, address=worker, state=RankState.OPEN) for worker in settings.workers
    )
    await stop.wait()
    return None


async def _answer_request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.ends_connection:
        headers["Connection"] = "close"
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of routing: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    invalid = InvalidRequestError(f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(error_object(invalid), status_code=error.status_code, headers=error.headers)


async def _answer_internal_error(_: Request, __: Exception) -> JSONResponse:
    """The traceback is in the log only."""
    return JSONResponse(
        error_object(RequestError("internal error: see the gateway's log")), status_code=500
    )
