"""A balancer process, a fleet of simulated ranks in others, and measurements of both."""

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

from equipoise_api.v1 import admin_pb2, admin_pb2_grpc
from tests.support.health import until_health
from tests.support.simulated_fleet import FleetSettings

ROOT = Path(__file__).parents[2]
FLEET = "tests.support.simulated_fleet"
MAX_WAIT_S = 240.0


@dataclass(kw_only=True)
class Progress:
    """Reports of the fleet's processes: ranks that joined, when the last one did, and answers.

    `answers` are (moment of sending, seconds until the answer) of each report with its heartbeat.
    """

    counts: list[dict[str, int]]
    last_s: list[dict[str, float]]
    answers: list[tuple[float, float]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time that the fleet's processes took so far."""
        return sum(cpu_s(pid) for pid in self.pids)

    def count(self, what: str) -> int:
        """Ranks, or times, of all processes."""
        return sum(counts.get(what, 0) for counts in self.counts)

    def latest_s(self, what: str) -> float:
        """When it happened last, on the monotonic clock."""
        return max(last_s.get(what, 0.0) for last_s in self.last_s)

    async def until(self, what: str, count: int) -> float:
        """Wait until it happened so often; gives the moment."""
        async with asyncio.timeout(MAX_WAIT_S):
            while self.count(what) < count:
                assert not self.troubles, self.troubles[:3]
                await asyncio.sleep(0.05)
        return self.latest_s(what)


@dataclass(frozen=True, kw_only=True)
class Ingest:
    """Seconds from the sending of reports until their answers, and what the balancer spent."""

    reports_per_s: float
    p50_s: float
    p99_s: float
    max_s: float
    cores: float
    cores_of_ranks: float


class BalancerProcess:
    """The real command, with what the system says of its process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address

    @property
    def pids(self) -> tuple[int, ...]:
        """Its own, and those of the processes that plan for it."""
        own = self.process.pid
        lists = [path.read_text() for path in Path(f"/proc/{own}/task").glob("*/children")]
        return own, *map(int, " ".join(lists).split())

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time so far, user and system, planning included."""
        return sum(cpu_s(pid) for pid in self.pids)

    def memory(self, name: str) -> int:
        """VmHWM (the most ever) or VmRSS (now) in bytes, without processes that plan."""
        return _number_in(f"/proc/{self.process.pid}/status", name)

    @property
    def memory_of_planners(self) -> int:
        """Bytes that the processes that plan have for themselves now."""
        return sum(
            _number_in(f"/proc/{pid}/smaps_rollup", name)
            for pid in self.pids[1:]
            for name in ("Private_Clean", "Private_Dirty")
        )

    @property
    def num_files(self) -> int:
        """Open file descriptors, sockets included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@asynccontextmanager
async def balancing(folder, *options, address):
    """A balancer on `address` with a store of its own, ready inside the block."""
    command = [sys.executable, "-m", "equipoise.cli.main", "balancer", f"--listen={address}"]
    with (folder / "balancer.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *command, f"--store={folder / 'state.sqlite'}", *options, stderr=log
        )
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                # The planner is compiled, or loaded, before workers are taken.
                await until_health(channel, "ready", timeout_s=MAX_WAIT_S)
            yield BalancerProcess(process, address)
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def fleet(address, *, num_pools, num_ranks, num_processes):
    """Simulated ranks in processes of their own; gives their `Progress`."""
    share = -(-num_pools // num_processes)
    progress = Progress(counts=[{}] * num_processes, last_s=[{}] * num_processes)
    processes, readers = [], []
    try:
        for number in range(num_processes):
            first = number * share
            settings = FleetSettings(
                address=address,
                first_pool=first,
                num_pools=max(0, min(share, num_pools - first)),
                num_ranks=num_ranks,
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", FLEET, json.dumps(asdict(settings))),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2**24,
            )
            processes.append(process)
            progress.pids.append(process.pid)
            readers.append(asyncio.create_task(_follow(process, progress, number)))
        yield progress
    finally:
        for process in processes:
            process.kill()
            await process.wait()
        for reader in readers:
            reader.cancel()


async def measured(balancer, progress, *, seconds):
    """Watch reports and their answers for a while; `Ingest` of those sent in that time."""
    began_s, before_s, ranks_s = time.monotonic(), balancer.cpu_s, progress.cpu_s
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    used_s, used_by_ranks_s = balancer.cpu_s - before_s, progress.cpu_s - ranks_s
    # Answers in flight, and the lines that report them.
    await asyncio.sleep(1.0)
    answers = sorted(
        delay_s for sent_s, delay_s in progress.answers if began_s <= sent_s < began_s + took_s
    )
    return Ingest(
        reports_per_s=len(answers) / took_s,
        p50_s=statistics.median(answers),
        p99_s=answers[int(0.99 * len(answers))],
        max_s=answers[-1],
        cores=used_s / took_s,
        cores_of_ranks=used_by_ranks_s / took_s,
    )


def _number_in(path: str, name: str) -> int:
    """Return a process's figure from /proc in bytes."""
    lines = Path(path).read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process so far, user and system."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


class Operator:
    """Gives orders to all pools, or to some."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._admin = admin_pb2_grpc.AdminStub(channel)

    async def rebalance(self, pools):
        """Order a plan and its rollout in each of `pools`."""
        request = admin_pb2.RebalanceAllRequest(pools=pools, reason="measuring", force=True)
        async for answer in self._admin.RebalanceAll(request, timeout=MAX_WAIT_S):
            assert answer.outcome.accepted, f"{answer.pool}: {answer.outcome.reason}"


async def _follow(process, progress, number):
    async for line in process.stdout:
        message = json.loads(line)
        match message.pop("what"):
            case "progress":
                progress.counts[number] = message["counts"]
                progress.last_s[number] = message["last_s"]
                progress.answers += message["acknowledged"]
            case trouble:
                progress.troubles.append(f"{trouble}: {message}")
