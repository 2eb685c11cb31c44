"""What tests fork is as what they execute."""

import asyncio
import json
import os
import signal

import psutil
import pytest

from equipoise.balancer.planner.__main__ import NICENESS
from equipoise.cli.demo.fleet import Fleet, FleetError, free_address
from tests.support.forked_commands import ForkedFleet, is_planner

pytestmark = pytest.mark.e2e

# Prints what of a process its program can see.
PROGRAM = """\
import ctypes, json, os, signal, sys
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
ignored = [one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN]
files = [os.readlink(f"/proc/self/fd/{number}").rpartition("/")[2] for number in range(3)]
seen = {
    "arguments": sys.argv, "name": __name__, "folder": os.getcwd(), "env": dict(os.environ),
    "parent": os.getppid(), "leads its group": os.getpgid(0) == os.getpid(),
    "dies with its parent by": death.value, "ignored": ignored, "files": files,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "open": sorted(number for number in map(int, os.listdir("/proc/self/fd")) if number < 16),
}
print(json.dumps(seen, sort_keys=True))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


async def seen_in(fleet_class, folder):
    """What the program sees, and how its end is reported."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    async with fleet_class(folder) as fleet, asyncio.timeout(120.0):
        log = fleet.log_path("same")
        log.unlink(missing_ok=True)
        await fleet.start("same", ["--an=argument"], program=[str(program)])
        with pytest.raises(FleetError) as end:
            await fleet.watch()
    return json.loads(log.read_text().splitlines()[0]), str(end.value)


async def test_a_forked_balancer_plans_in_forked_processes(tmp_path):
    address = free_address("127.0.0.1:0")
    async with ForkedFleet(tmp_path) as fleet, asyncio.timeout(120.0):
        store = tmp_path / "state.sqlite"
        await fleet.start("balancer", ["balancer", f"--listen={address}", f"--store={store}"])
        await fleet.until_serving("balancer", address, timeout_s=120.0)
        balancer = psutil.Process(fleet.pid("balancer"))
        while not (planners := [one for one in balancer.children() if is_planner(one)]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (planner,) = planners
        while planner.nice() != balancer.nice() + NICENESS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert os.getpgid(planner.pid) == planner.pid
        assert await fleet.stop("balancer", with_signal=signal.SIGKILL) == -signal.SIGKILL
        await asyncio.to_thread(planner.wait, 60.0)


async def test_a_forked_process_sees_what_an_executed_one_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_TEST", "of now")
    seen, end = await seen_in(ForkedFleet, tmp_path)
    assert "exited unexpectedly with status 3" in end
    assert (seen, end) == await seen_in(Fleet, tmp_path)
