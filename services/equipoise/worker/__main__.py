"""The worker's process: signals, logging, and nothing else. `equipoise worker` calls `run`."""

import asyncio
import gc
import signal

from opentelemetry.trace import Tracer

from equipoise.telemetry.logs import configure_logs
from equipoise.telemetry.tracing import tracing
from equipoise.worker.core import single_threaded
from equipoise.worker.errors import WorkerError
from equipoise.worker.lifecycle import serve
from equipoise.worker.settings import WorkerSettings


def run(settings: WorkerSettings) -> int:
    """Run one worker until SIGTERM or Ctrl-C; returns the exit status 0.

    Raises:
        WorkerError: it cannot start, is rejected, or its group is broken.
    """
    configure_logs(
        settings.log_format, context=lambda: {"pool": settings.pool, "worker": settings.worker}
    )
    single_threaded()
    failure = _serve_to_the_end(settings)
    # A process group of torch that is still alive when the interpreter ends aborts the process
    # now and then ("terminate called without an active exception").
    gc.collect()
    if failure is not None:
        raise failure
    return 0


def _serve_to_the_end(settings: WorkerSettings) -> WorkerError | None:
    """What ended the worker, if it was not asked to stop."""
    try:
        with tracing(settings.tracing_endpoint, service="equipoise-worker") as tracer:
            asyncio.run(_serve_until_signalled(settings, tracer))
    except WorkerError as error:
        # A new one, because the old one's traceback keeps alive all that it came through.
        return type(error)(str(error))
    return None


async def _serve_until_signalled(settings: WorkerSettings, tracer: Tracer) -> None:
    # The event loop has the main thread, because signals are handled there: a step that waits for
    # a hung peer cannot hold up a stop.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, stop=stop, tracer=tracer)
