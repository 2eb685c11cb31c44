import asyncio
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from equipoise.cli.demo.fleet import Fleet, FleetError, free_address
from equipoise.cli.tethered import tethered

BOUND_S = 120.0
SLEEPER = ("-c", "import signal; signal.pause()")
FAULTY = ("-c", "import sys; print('no such checkpoint: /nowhere'); sys.exit(3)")
SERVER = (
    "-c",
    """
import signal, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
address, answer = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = grpc.server(ThreadPoolExecutor(1))
servicer = health.HealthServicer()
servicer.set("", getattr(health_pb2.HealthCheckResponse, answer))
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(address)
server.start()
server.wait_for_termination()
""",
)


async def test_leaving_the_block_ends_every_process(tmp_path):
    async with Fleet(tmp_path, program=SLEEPER) as fleet:
        for name in ("balancer", "worker-0"):
            await fleet.start(name, [])
        pids = [fleet.pid("balancer"), fleet.pid("worker-0")]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_process_that_ignores_the_request_to_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.cli.demo.fleet.STOP_TIMEOUT_S", 0.05)
    address = free_address("127.0.0.1:0")
    async with Fleet(tmp_path, program=SERVER) as fleet:
        await fleet.start("balancer", [address, "SERVING"])
        await fleet.until_serving("balancer", address, timeout_s=BOUND_S)
        assert await fleet.stop("balancer") == -signal.SIGKILL


async def test_a_process_that_exits_unexpectedly_is_named_with_its_last_log_lines(tmp_path):
    async with Fleet(tmp_path, program=FAULTY) as fleet:
        await fleet.start("worker-1", [])
        with pytest.raises(FleetError, match=r"(?s)worker-1 .*status 3.*no such checkpoint"):
            async with asyncio.timeout(BOUND_S):
                await fleet.watch()


async def test_a_process_that_was_stopped_on_purpose_is_no_fault(tmp_path):
    async with Fleet(tmp_path, program=SLEEPER) as fleet:
        await fleet.start("balancer", [])
        await fleet.start("worker-0", [])
        watching = asyncio.create_task(fleet.watch())
        await fleet.stop("balancer")
        await fleet.stop("worker-0", with_signal=signal.SIGKILL)
        await asyncio.sleep(0)
        assert not watching.done()
        watching.cancel()


async def test_a_name_whose_process_was_stopped_can_be_started_again(tmp_path):
    async with Fleet(tmp_path, program=SLEEPER) as fleet:
        await fleet.start("balancer", [])
        first = fleet.pid("balancer")
        await fleet.stop("balancer")
        await fleet.start("balancer", [])
        assert fleet.pid("balancer") != first
        assert psutil.pid_exists(fleet.pid("balancer"))


async def test_a_process_that_never_serves_is_reported_after_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.cli.demo.fleet.STOP_TIMEOUT_S", 0.05)
    address = free_address("127.0.0.1:0")
    async with Fleet(tmp_path, program=SERVER) as fleet:
        await fleet.start("balancer", [address, "NOT_SERVING"])
        with pytest.raises(FleetError, match=r"balancer was not serving at 127.0.0.1:\d+ after"):
            await fleet.until_serving("balancer", address, timeout_s=0.2)


async def test_memory_counts_the_children_and_remembers_the_peak(tmp_path):
    async with Fleet(tmp_path, program=SLEEPER) as fleet:
        alone = fleet.memory_bytes()
        await fleet.start("balancer", [])
        assert fleet.memory_bytes() > alone
        await fleet.stop("balancer")
        assert fleet.memory_bytes() < fleet.peak_memory_bytes


def test_an_address_in_use_gives_way_to_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        assert free_address(used) != used
    assert free_address(used) == used


def test_an_address_of_another_machine_is_rejected():
    with pytest.raises(FleetError, match=r"no free port on 192\.0\.2\.1"):
        free_address("192.0.2.1:7070")


def test_a_tethered_process_dies_with_its_parent_even_when_that_is_killed():
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    parent = (
        "import subprocess, sys; from equipoise.cli.tethered import tethered\n"
        f"subprocess.run(tethered([sys.executable, '-c', {child!r}]))"
    )
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        orphan = psutil.Process(int(process.stdout.readline()))
        process.kill()
    orphan.wait(timeout=BOUND_S)


def test_a_process_whose_parent_is_gone_already_does_not_start(tmp_path):
    command = tethered([sys.executable, "-c", "print('started')"])
    command[3] = str(os.getpid() + 1)  # another process's child
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
