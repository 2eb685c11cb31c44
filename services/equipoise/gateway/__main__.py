"""The gateway's process: signals and logging. `equipoise gateway` calls `run`."""

import asyncio
import random
import signal

from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from equipoise.telemetry.logs import configure_logs, log_causes_once
from equipoise.telemetry.open_files import raise_open_files_limit
from equipoise.trust.handshakes import logging_handshakes


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status 0.

    Raises:
        GatewayError: the gateway cannot start.
    """
    with logging_handshakes(settings.tls):
        configure_logs(settings.log_format, context=lambda: {"pool": settings.pool})
        raise_open_files_limit()
        asyncio.run(_serve_until_signalled(settings))
    return 0


async def _serve_until_signalled(settings: GatewaySettings) -> None:
    # A second signal changes nothing: the shutdown is bounded.
    stop = asyncio.Event()
    log_causes_once(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Gateways that start together do not go through equal ranks in step.
    await serve(settings, stop=stop, first_turn=random.randrange(2**16))  # noqa: S311
