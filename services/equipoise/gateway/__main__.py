"""The gateway's process: signals and logging. `equipoise gateway` calls `run`."""

import asyncio
import signal

from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from equipoise.telemetry.logs import configure_logs


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status 0.

    Raises:
        GatewayError: the gateway cannot start.
    """
    configure_logs(settings.log_format, context=lambda: {"pool": settings.pool})
    asyncio.run(_serve_until_signalled(settings))
    return 0


async def _serve_until_signalled(settings: GatewaySettings) -> None:
    # A second signal changes nothing: the shutdown is bounded.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, stop=stop)
