"""`equipoise worker --local-ranks N`: a process for each GPU of a machine or pod.

Processes of one container share its GPUs, its IPC namespace and /dev/shm, so collectives use NVLink
between them; separate pods only share a network. Each process is a worker of its own, with its own
name, ports and rank: one that ends is started again while the others form an epoch without it. This
process only starts, watches and stops them.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress

from equipoise.cli.tethered import tethered
from equipoise.settings.address import Address, parse_address
from equipoise.telemetry.logs import about, configure_logs
from equipoise.telemetry.probes import probes_at
from equipoise.worker.settings import PORT_STEP, WorkerSettings

PROBE_S = 1.0
"""Seconds between two probes of a process."""

ANSWER_S = 10.0
"""Seconds that a process has to answer a probe."""

SILENT_S = 60.0
"""Seconds without an answer after which a process that has answered before is killed."""

RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Seconds before an ended process is started again: the first time, and at most. The wait doubles
until the process is ready."""

STOP_S = 15.0
"""Seconds that a process has to stop, beyond those that it may wait for requests and latents."""

_log = logging.getLogger(__name__)


def run(settings: WorkerSettings) -> int:
    """Run the ranks until SIGTERM or Ctrl-C; returns the exit status 0.

    Raises:
        TelemetryError: the port of the probes cannot be opened.
    """
    configure_logs(settings.log_format, context=lambda: {"pool": settings.pool})
    command = [sys.executable, "-m", "equipoise.cli.main", *sys.argv[1:]]
    asyncio.run(_run(settings, command))
    return 0


async def _run(settings: WorkerSettings, command: Sequence[str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(settings, command=command, stop=stop)


async def serve(settings: WorkerSettings, *, command: Sequence[str], stop: asyncio.Event) -> None:
    """Run `command` for each rank, with options that set it apart, until `stop` is set.

    The pod is live once every rank has been, and ready while every rank is.

    Raises:
        TelemetryError: the port of the probes cannot be opened.
    """
    ranks = [LocalRank(settings, number, command=command) for number in range(settings.local_ranks)]
    probes = probes_at(
        settings.probes_listen,
        ready=lambda: all(rank.is_ready for rank in ranks),
        live=lambda: all(rank.was_live for rank in ranks),
    )
    async with probes:
        keeping = [asyncio.create_task(rank.keep()) for rank in ranks]
        stopped = asyncio.create_task(stop.wait())
        try:
            # A task that ends has failed: nothing else ends it.
            await asyncio.wait({stopped, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopped, *keeping):
                task.cancel()
            failures = await asyncio.gather(*keeping, return_exceptions=True)
            await asyncio.gather(*(rank.stop() for rank in ranks))
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure


def options_of(settings: WorkerSettings, number: int) -> list[str]:
    """Options that set the process of one rank apart, after those of the command.

    The last of repeated options is in force. Probes are for this process only.
    """
    options = [
        "--local-ranks=1",
        f"--worker={settings.worker}-{number}",
        f"--listen={_shifted(parse_address(settings.listen), number)}",
    ]
    if settings.rendezvous_port:
        options.append(f"--rendezvous-port={settings.rendezvous_port + number * PORT_STEP}")
    if settings.metrics.metrics_listen:
        metrics = parse_address(settings.metrics.metrics_listen)
        options.append(f"--metrics-listen={_shifted(metrics, number)}")
    if probes := probes_of(settings, number):
        options.append(f"--probes-listen={probes}")
    return options


def probes_of(settings: WorkerSettings, number: int) -> Address | None:
    """Where one rank answers probes; None if it answers none."""
    if not settings.probes_listen:
        return None
    port = parse_address(settings.probes_listen).port + (number + 1) * PORT_STEP
    return Address("127.0.0.1", port)


def _shifted(address: Address, number: int) -> Address:
    return address._replace(port=address.port + number * PORT_STEP if address.port else 0)


class LocalRank:
    """The process of one rank."""

    def __init__(self, settings: WorkerSettings, number: int, *, command: Sequence[str]) -> None:
        self.name = f"{settings.worker}-{number}"
        self.is_ready = False
        """Whether it accepted requests at its last probe."""
        self.was_live = not settings.probes_listen
        """Whether it has answered a probe, or has none."""
        self._number = number
        self._command = [*command, *options_of(settings, number)]
        self._probes = probes_of(settings, number)
        hold_s = settings.hold_s if settings.peer_pools else 0.0
        self._stop_s = settings.drain_timeout_s + hold_s + STOP_S
        self._process: Process | None = None
        self._retry_s = RETRY_S

    async def keep(self) -> None:
        """Start the process, and again whenever it ends."""
        while True:
            process = self._process = await self._start()
            watching = asyncio.create_task(self._watch(process))
            try:
                status = await process.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                self.is_ready = False
            _log.warning(
                "%s ended with status %d: starting it again in %g s",
                *(self.name, status, self._retry_s),
                extra=about(worker=self.name),
            )
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    async def stop(self) -> None:
        """Stop the process gracefully, or kill it if it takes too long."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._stop_s):
                await process.wait()
        except TimeoutError:
            _log.warning(
                "%s did not stop in %g s: killing it",
                *(self.name, self._stop_s),
                extra=about(worker=self.name),
            )
            process.kill()
            await process.wait()

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *tethered(self._command),
            stdin=DEVNULL,
            # Ctrl-C reaches this process only, which stops the others.
            process_group=0,
            # Without a number, --device is this GPU.
            env={**os.environ, "LOCAL_RANK": str(self._number)},
        )

    async def _watch(self, process: Process) -> None:
        """Probe the process, and kill it when it stops answering."""
        loop = asyncio.get_running_loop()
        answered_at: float | None = None
        while self._probes is not None:
            status = await _status_of(self._probes)
            self.is_ready = status == 200
            if status is not None:
                self.was_live, answered_at = True, loop.time()
            elif answered_at is not None and loop.time() - answered_at > SILENT_S:
                _log.warning(
                    "%s has not answered for %g s: killing it",
                    *(self.name, SILENT_S),
                    extra=about(worker=self.name),
                )
                process.kill()
                return
            if self.is_ready:
                self._retry_s = RETRY_S
            await asyncio.sleep(PROBE_S)


async def _status_of(probes: Address) -> int | None:
    """The HTTP status of /readyz; None without an answer."""
    with suppress(OSError, ValueError, IndexError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(probes.host, probes.port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: rank\r\nConnection: close\r\n\r\n")
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    return None
