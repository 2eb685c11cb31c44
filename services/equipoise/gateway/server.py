"""The gateway's HTTP server: its paths, how it starts, and how it stops without losing anybody."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from equipoise.gateway.attempt import Bounds
from equipoise.gateway.completions import Completions, HttpLimits
from equipoise.gateway.errors import GatewayError, InvalidRequestError, RequestError
from equipoise.gateway.open_requests import OpenRequests
from equipoise.gateway.openai import Limits, error_object, models
from equipoise.gateway.ranks import Ranks, ToldRank
from equipoise.gateway.relay import Relay, RelayPolicy
from equipoise.gateway.routing import Standing
from equipoise.gateway.settings import GatewaySettings
from equipoise.gateway.tokenizer import ByteTokenizer
from equipoise.gateway.watch import follow

_LAST_WORDS_S = 5
"""What was ended at the end of the grace has this long to tell its client."""

_log = logging.getLogger(__name__)


async def serve(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event,
    listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until `stop` is set, then let open requests end; `listening` is told host:port.

    Raises:
        GatewayError: the port cannot be listened on, or the checkpoint's config cannot be read.
    """
    tokenizer = await asyncio.to_thread(ByteTokenizer.of_checkpoint, settings.checkpoint)
    listener = _listen(settings.listen)
    ranks = Ranks(max_queued=settings.max_queued_requests, clock=time.monotonic)
    open_requests = OpenRequests()
    server = _server(
        application(settings, tokenizer=tokenizer, ranks=ranks, open_requests=open_requests)
    )
    stopped = asyncio.create_task(stop.wait())
    telling = asyncio.create_task(_tell(ranks, settings, stop=stop))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address = f"{settings.listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
    _log.info("listening on %s", address)
    if listening is not None:
        listening(address)
    try:
        done, _ = await asyncio.wait(
            {stopped, telling, serving}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        _log.info("stopping; %d requests are open", open_requests.num_open)
        # Doors stay open meanwhile: who comes now is told to go elsewhere, in words.
        await open_requests.drain(settings.stop_grace_s)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        stopped.cancel()
        telling.cancel()
        await asyncio.gather(stopped, telling, return_exceptions=True)


def application(
    settings: GatewaySettings,
    *,
    tokenizer: ByteTokenizer,
    ranks: Ranks,
    open_requests: OpenRequests,
) -> Starlette:
    """All that HTTP clients may ask."""
    model, started_s = settings.model_name, int(time.time())
    completions = Completions(
        Relay(ranks, vocab_size=tokenizer.vocab_size, policy=_relay_policy(settings)),
        tokenizer=tokenizer,
        model=model,
        limits=Limits(max_prompt_tokens=settings.max_prompt_tokens, max_tokens=settings.max_tokens),
        http_limits=HttpLimits(
            max_body_bytes=settings.max_body_bytes, client_timeout_s=settings.client_timeout_s
        ),
        open_requests=open_requests,
    )

    async def list_models(_: Request) -> JSONResponse:
        return JSONResponse(models(model, created_s=started_s))

    async def tell_alive(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def tell_ready(_: Request) -> JSONResponse:
        trouble = "this gateway is stopping" if open_requests.stopping else ranks.trouble()
        if trouble:
            return JSONResponse({"status": "not ready", "reason": trouble}, status_code=503)
        return JSONResponse({"status": "ready"})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/healthz", tell_alive),
            Route("/readyz", tell_ready),
        ],
        exception_handlers={
            RequestError: _answer_request_error,
            HTTPException: _answer_http_error,
            Exception: _answer_own_fault,
        },
    )


class _Server(uvicorn.Server):
    """uvicorn whose stop is ours to order: signals are the process's business."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _server(app: Starlette) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
    )


async def _tell(ranks: Ranks, settings: GatewaySettings, *, stop: asyncio.Event) -> None:
    """Say who the ranks are, now or for as long as the gateway lives."""
    if not settings.workers:
        return await follow(settings.balancer, pool=settings.pool, ranks=ranks)
    ranks.tell(
        ToldRank(name=worker, address=worker, standing=Standing.OPEN) for worker in settings.workers
    )
    await stop.wait()
    return None


def _relay_policy(settings: GatewaySettings) -> RelayPolicy:
    return RelayPolicy(
        bounds=Bounds(
            accept_s=settings.accept_timeout_s,
            first_token_s=settings.first_token_timeout_s,
            silence_s=settings.silence_timeout_s,
        ),
        queue_s=settings.queue_timeout_s,
        max_attempts=settings.max_attempts,
    )


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise GatewayError(
            f"cannot listen on {address}: {error.strerror}; choose another address with --listen"
        ) from error


async def _answer_request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Faults that routing finds: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    words = InvalidRequestError(f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(error_object(words), status_code=error.status_code, headers=error.headers)


async def _answer_own_fault(_: Request, __: Exception) -> JSONResponse:
    """The traceback is in the log; clients get none."""
    return JSONResponse(
        error_object(RequestError("the gateway failed: its log says why")), status_code=500
    )
