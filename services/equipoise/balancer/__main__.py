"""The balancer as a process: `run` puts the parts together and ends cleanly."""

import asyncio
import logging
import signal
import sys
from contextlib import suppress

from equipoise.balancer.errors import BalancerError
from equipoise.balancer.server import serving
from equipoise.balancer.settings import BalancerSettings
from equipoise.balancer.sqlite_store import SqliteStore
from equipoise.balancer.store import StoreError

_log = logging.getLogger("equipoise.balancer")


def run(settings: BalancerSettings) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status: 0, or 1 after one clear line."""
    logging.basicConfig(
        level=settings.log_level.value.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        asyncio.run(_serve(settings))
    except (BalancerError, StoreError) as error:
        print(f"equipoise balancer: {error}", file=sys.stderr)  # noqa: T201 - for a person
        return 1
    return 0


async def _serve(settings: BalancerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    store = SqliteStore(settings.state)
    try:
        async with serving(
            store,
            listen=settings.listen,
            policy=settings.policy,
            stop_grace_s=settings.stop_grace_s,
        ):
            await stop.wait()
            _log.info("stopping; workers serve on without a balancer")
    finally:
        with suppress(StoreError):
            await store.close()


if __name__ == "__main__":
    sys.exit(run(BalancerSettings()))
