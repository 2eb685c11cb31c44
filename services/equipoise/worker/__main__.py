"""The worker process: signals and logging. `equipoise worker` calls `run`."""

import asyncio
import signal
from collections.abc import Callable

from opentelemetry.trace import Tracer

from equipoise.rank.errors import WorkerError
from equipoise.telemetry.logs import configure_logs, log_causes_once
from equipoise.telemetry.open_files import raise_open_files_limit
from equipoise.telemetry.tracing import tracing
from equipoise.trust.handshakes import logging_handshakes
from equipoise.worker.core import single_threaded
from equipoise.worker.lifecycle import Worker, serve
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.torch_workarounds import collect_process_groups


def run(settings: WorkerSettings) -> int:
    """Run one worker until SIGTERM or Ctrl-C; returns the exit status 0.

    Raises:
        WorkerError: the worker cannot start, is rejected, or cannot continue.
    """
    fields = {"pool": settings.pool, "phase": settings.phase, "worker": settings.worker}
    started: list[Worker] = []
    with logging_handshakes(settings.tls):
        configure_logs(
            settings.log_format, context=lambda: {**fields, **(started[0].runs if started else {})}
        )
        raise_open_files_limit()
        single_threaded()
        failure = _serve_to_the_end(settings, on_start=started.append)
        collect_process_groups()
    if failure is not None:
        raise failure
    return 0


def _serve_to_the_end(
    settings: WorkerSettings, *, on_start: Callable[[Worker], None]
) -> WorkerError | None:
    """Return the error that ended the worker, or None after a graceful shutdown."""
    try:
        with tracing(settings.tracing_endpoint, service="equipoise-worker") as tracer:
            asyncio.run(_serve_until_signalled(settings, tracer, on_start))
    except WorkerError as error:
        # A new error, because the traceback of this one keeps the process group alive.
        return type(error)(str(error))
    return None


async def _serve_until_signalled(
    settings: WorkerSettings, tracer: Tracer, on_start: Callable[[Worker], None]
) -> None:
    # The event loop runs on the main thread, which handles signals, so a step that waits for a
    # hung peer does not delay a shutdown.
    stop = asyncio.Event()
    log_causes_once(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, stop=stop, tracer=tracer, on_start=on_start)
