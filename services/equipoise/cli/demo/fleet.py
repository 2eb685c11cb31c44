"""`Fleet`: starts, watches, measures and stops the processes of a fleet on this machine."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.cli.tethered import tethered
from equipoise.settings.address import parse_address

STOP_TIMEOUT_S = 10.0
"""How long a process may take to stop before it is killed."""

# One compute thread each, because the processes share few cores.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 16 * 1024


class FleetError(RuntimeError):
    """A process exited unexpectedly or did not become ready; the message has its last log lines."""


class Fleet:
    """Processes that live as long as an `async with` block.

    Each runs `python PROGRAM... ARGUMENTS...` with one compute thread and writes its output to
    `folder/NAME.log`. It has its own process group, so that Ctrl-C reaches this process only, which
    stops the others in order; `tethered` ends it if this process is killed.
    """

    def __init__(
        self, folder: Path, *, program: Sequence[str] = ("-m", "equipoise.cli.main")
    ) -> None:
        self._folder = folder
        self._program = tuple(program)
        self._processes: dict[str, Process] = {}
        self._expected_ends: set[str] = set()
        self._changed = asyncio.Event()
        self.peak_memory_bytes = 0
        """Highest value that `memory_bytes` has returned."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A second cancellation must not interrupt the stop.
        await asyncio.shield(self._stop_all())

    async def start(
        self, name: str, arguments: Sequence[str], *, program: Sequence[str] | None = None
    ) -> None:
        """Start a program, the fleet's by default, under a name that no running process has."""
        running = self._processes.get(name)
        assert running is None or running.returncode is not None, f"{name} is running"
        with self.log_path(name).open("ab") as log:
            self._processes[name] = await self._launch(
                [*(program or self._program), *arguments],
                output=log,
                env={**os.environ, **dict.fromkeys(_THREADS, "1"), "PYTHONUNBUFFERED": "1"},
            )
        self._expected_ends.discard(name)
        self._changed.set()

    async def _launch(
        self, command: Sequence[str], *, output: BinaryIO, env: Mapping[str, str]
    ) -> Process:
        return await asyncio.create_subprocess_exec(
            *tethered([sys.executable, *command]),
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            process_group=0,
            env=env,
        )

    async def stop(self, name: str, *, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """Stop a process and return its exit status; kill it after `STOP_TIMEOUT_S`."""
        self._expected_ends.add(name)
        return await _end(self._processes[name], with_signal=with_signal)

    async def watch(self) -> None:
        """Wait until a process exits that was not stopped.

        Raises:
            FleetError: one did. The message has its name, exit status and last log lines.
        """
        while True:
            self._changed.clear()
            waits = {
                asyncio.create_task(process.wait()): name
                for name, process in self._processes.items()
                if name not in self._expected_ends
            }
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({*waits, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*waits, changed):
                    task.cancel()
            self.check()

    async def until_serving(self, name: str, address: str, *, timeout_s: float) -> None:
        """Wait until the gRPC health service at `address` reports SERVING.

        Raises:
            FleetError: the process exited, or was not serving within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s), grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                while True:
                    self.check()
                    with suppress(grpc.aio.AioRpcError):
                        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise FleetError(
                f"{name} was not serving at {address} after {timeout_s:g} s\n{self.log_tail(name)}"
            ) from None

    def pid(self, name: str) -> int:
        """Process id of a process."""
        return self._processes[name].pid

    def memory_bytes(self) -> int:
        """Resident memory of this process and the fleet; shared pages count in each process."""
        pids = [os.getpid()]
        pids += [process.pid for process in self._processes.values() if process.returncode is None]
        total = 0
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                total += psutil.Process(pid).memory_info().rss
        self.peak_memory_bytes = max(self.peak_memory_bytes, total)
        return total

    def log_path(self, name: str) -> Path:
        """File with everything that the process printed."""
        return self._folder / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """Last lines that the process printed, each prefixed with its name."""
        with self.log_path(name).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = text.splitlines()[-_LOG_TAIL_LINES:] or ["(no output)"]
        return "\n".join(f"  {name} | {line}" for line in lines)

    def check(self) -> None:
        """Raise FleetError if a process exited that was not stopped."""
        for name, process in self._processes.items():
            if process.returncode is not None and name not in self._expected_ends:
                raise FleetError(
                    f"{name} exited unexpectedly with status {process.returncode}; "
                    f"its last lines:\n{self.log_tail(name)}"
                )

    async def _stop_all(self) -> None:
        """Stop all workers at once, as a leaving rank fails others' steps; then the balancer."""
        self._expected_ends.update(self._processes)
        for wave in (self._processes.keys() - {"balancer"}, self._processes.keys() & {"balancer"}):
            await asyncio.gather(
                *(_end(self._processes[name], with_signal=signal.SIGTERM) for name in wave)
            )


def free_address(preferred: str) -> str:
    """Return `preferred`, host:port, or a free port of the same host if it is in use."""
    host, port = parse_address(preferred)
    for candidate in (port, 0):
        with socket.socket() as probe:
            # Like gRPC, treat a port whose connections are in TIME_WAIT as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError:
                continue
            return f"{host}:{probe.getsockname()[1]}"
    raise FleetError(f"no free port on {host}: check that it is an address of this machine")


async def _end(process: Process, *, with_signal: signal.Signals) -> int:
    with suppress(ProcessLookupError):
        process.send_signal(with_signal)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
