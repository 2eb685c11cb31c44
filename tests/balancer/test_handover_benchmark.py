"""Time without a leader after the leading balancer dies: real processes, real Redis."""

import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import grpc
import pytest

from tests.support.health import NOT_SERVING, SERVING, until_health
from tests.support.redis_server import free_port

pytestmark = pytest.mark.benchmark

HANDOVERS = 6
TARGET_S = 5.0
WAIT_S = 60.0


async def test_handover(redis_server, capsys):
    took = {"killed": [], "paused": []}
    for how, seconds in took.items():
        for _ in range(HANDOVERS // 2):
            seconds.append(await _handover(redis_server.url, how=how))
    with capsys.disabled():
        for how, seconds in took.items():
            print(
                f"\nhand-over, leader {how}: min {min(seconds):.2f} s, "
                f"median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s "
                f"(target {TARGET_S:g} s)"
            )


async def _handover(store, *, how):
    """Seconds from the leader's end until the other one takes workers."""
    with _process(store) as first:
        await _until_leading(first.address)
        with _process(store) as second:
            await _until_leading(second.address, wanted=False)
            began_s = time.perf_counter()
            first.kill() if how == "killed" else first.send_signal(signal.SIGSTOP)
            await _until_leading(second.address)
            return time.perf_counter() - began_s


@contextmanager
def _process(store):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "equipoise.cli.main", "balancer"]
    with subprocess.Popen([*command, f"--listen={address}", f"--store={store}"]) as process:
        process.address = address
        try:
            yield process
        finally:
            process.kill()


async def _until_leading(address, *, wanted=True):
    service = "equipoise_api.v1.WorkerLink"
    async with grpc.aio.insecure_channel(address) as channel:
        await until_health(channel, service, SERVING if wanted else NOT_SERVING, timeout_s=WAIT_S)
