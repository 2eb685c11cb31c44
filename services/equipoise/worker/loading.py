"""`load_core`: loads the model, unless the worker is stopped meanwhile, and reports what hangs."""

import asyncio
import logging

from equipoise.daemon_thread import in_daemon_thread
from equipoise.settings.numbers import format_bytes
from equipoise.telemetry.loading import Loading
from equipoise.telemetry.logs import about
from equipoise.worker.core import ModelCore
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.waits import READ_TIMEOUT_S

_log = logging.getLogger(__name__)


async def load_core(settings: WorkerSettings, stop: asyncio.Event) -> ModelCore | None:
    """Load the model; None once `stop` is set.

    Reads cannot be interrupted, so they have a thread that the process does not wait for.

    Raises:
        WorkerError: as `ModelCore.load`.
    """
    loading = Loading(log_format=settings.log_format)
    load = asyncio.ensure_future(
        in_daemon_thread(lambda: ModelCore.load(settings, loading=loading), name="loading")
    )
    stopped = asyncio.create_task(stop.wait())
    watch = asyncio.create_task(_report_hangs(loading))
    try:
        await asyncio.wait({load, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else load.result()
    finally:
        for task in (load, stopped, watch):
            task.cancel()


async def _report_hangs(loading: Loading) -> None:
    """Log what is not read any further, until cancelled."""
    while True:
        before = loading.reached
        await asyncio.sleep(READ_TIMEOUT_S)
        what, num_bytes = loading.reached
        if what and (what, num_bytes) == before:
            _log.warning(
                "loading %s: nothing was read within %g s, after %s: the checkpoint's disk or file "
                "server hangs",
                *(what, READ_TIMEOUT_S, format_bytes(num_bytes)),
                extra=about(bytes_done=num_bytes),
            )
