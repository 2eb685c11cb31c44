"""`equipoise worker --local-ranks`: processes that share a machine's GPUs."""

import asyncio
import json
import os
import signal
import socket
import sys
import types
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from equipoise.cli import local_ranks
from equipoise.cli.local_ranks import options_of, serve
from equipoise.cli.main import app
from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.worker.settings import WorkerSettings

WAIT_S = 120.0

# A worker that answers probes and says in a file what it was started with. A file of its name with
# a suffix changes what it does.
PROGRAM = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
options = dict(one.lstrip("-").partition("=")[::2] for one in sys.argv[1:])
folder, name = options["folder"], options["worker"]
def is_set(what):
    return os.path.exists(f"{folder}/{name}.{what}")
def end(*_):
    open(f"{folder}/{name}.stopped", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if is_set("stubborn") else end)
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        while is_set("hangs"):
            time.sleep(0.01)
        self.send_response(503 if is_set("busy") else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
host, _, port = options["probes-listen"].rpartition(":")
server = HTTPServer((host, int(port)), Answer)
with open(f"{folder}/{name}.new", "w") as file:
    json.dump({**options, "pid": os.getpid(), "LOCAL_RANK": os.environ["LOCAL_RANK"]}, file)
os.replace(f"{folder}/{name}.new", f"{folder}/{name}.json")
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(local_ranks, "PROBE_S", 0.02)
    monkeypatch.setattr(local_ranks, "ANSWER_S", 0.3)
    monkeypatch.setattr(local_ranks, "SILENT_S", 0.6)
    monkeypatch.setattr(local_ranks, "RETRY_S", 0.05)
    monkeypatch.setattr(local_ranks, "STOP_S", 0.5)


def free_ports(count, *, step):
    """The first of `count` ports, `step` apart, that are free now."""
    for first in range(20_000 + os.getpid() % 997 * 20, 60_000, step):
        with ExitStack() as taken:
            try:
                for number in range(count):
                    address = "127.0.0.1", first + number * step
                    taken.enter_context(socket.create_server(address))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


class Machine:
    """Two ranks under a parent, as files and probes show them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = WorkerSettings(
            worker="pod",
            local_ranks=2,
            probes_listen=f"127.0.0.1:{free_ports(3, step=10)}",
            drain_timeout_s=0.0,
        )
        (folder / "worker.py").write_text(PROGRAM)
        self.command = [sys.executable, str(folder / "worker.py"), f"--folder={folder}"]

    def set(self, rank, what):
        (self.folder / f"pod-{rank}.{what}").touch()

    def unset(self, rank, what):
        (self.folder / f"pod-{rank}.{what}").unlink()

    def is_set(self, rank, what):
        return (self.folder / f"pod-{rank}.{what}").exists()

    def told(self, rank):
        """What a rank was started with; empty before."""
        try:
            return json.loads((self.folder / f"pod-{rank}.json").read_text())
        except FileNotFoundError:
            return {}

    async def status(self, path):
        async with httpx2.AsyncClient(timeout=WAIT_S) as client:
            return (await client.get(f"http://{self.settings.probes_listen}{path}")).status_code

    async def until(self, condition):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)

    async def until_status(self, path, status):
        async def reached():
            try:
                return await self.status(path) == status
            except httpx2.TransportError:
                return False

        await self.until(reached)

    async def until_restarted(self, rank, *, pid):
        async def restarted():
            return self.told(rank)["pid"] != pid

        await self.until(restarted)

    async def __aenter__(self):
        self._stop = asyncio.Event()
        self._serving = asyncio.create_task(
            serve(self.settings, command=self.command, stop=self._stop)
        )
        return self

    async def __aexit__(self, *_):
        self._stop.set()
        async with asyncio.timeout(WAIT_S):
            await self._serving


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


async def test_each_rank_has_its_own_name_gpu_and_ports(machine):
    async with asyncio.timeout(WAIT_S), machine:
        await machine.until_status("/readyz", 200)
        told = [machine.told(rank) for rank in range(2)]
    assert [one["worker"] for one in told] == ["pod-0", "pod-1"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1"]
    assert {one["local-ranks"] for one in told} == {"1"}
    assert len({one["probes-listen"] for one in told}) == 2
    assert all(machine.is_set(rank, "stopped") for rank in range(2))


async def test_the_pod_is_live_once_every_rank_was_and_ready_while_every_rank_is(machine):
    machine.set(1, "hangs")
    async with asyncio.timeout(WAIT_S), machine:
        await machine.until_status("/livez", 503)
        await machine.until_status("/readyz", 503)
        machine.set(1, "busy")
        machine.unset(1, "hangs")
        await machine.until_status("/livez", 200)
        assert await machine.status("/readyz") == 503
        machine.unset(1, "busy")
        await machine.until_status("/readyz", 200)
        machine.set(0, "busy")
        await machine.until_status("/readyz", 503)
        assert await machine.status("/livez") == 200


async def test_a_rank_that_ends_is_started_again_and_the_others_stay(machine):
    async with asyncio.timeout(WAIT_S), machine:
        await machine.until_status("/readyz", 200)
        first, second = (machine.told(rank)["pid"] for rank in range(2))
        os.kill(second, signal.SIGKILL)
        await machine.until_restarted(1, pid=second)
        await machine.until_status("/readyz", 200)
        assert machine.told(0)["pid"] == first
        assert await machine.status("/livez") == 200


async def test_a_rank_that_stops_answering_is_killed_and_started_again(machine, caplog):
    async with asyncio.timeout(WAIT_S), machine:
        await machine.until_status("/readyz", 200)
        pid = machine.told(0)["pid"]
        machine.set(0, "hangs")
        await machine.until_status("/readyz", 503)
        await machine.until_restarted(0, pid=pid)
        machine.unset(0, "hangs")
        await machine.until_status("/readyz", 200)
    assert "pod-0 has not answered for 0.6 s: killing it" in caplog.text


async def test_a_rank_that_does_not_stop_is_killed(machine, caplog):
    machine.set(0, "stubborn")
    async with asyncio.timeout(WAIT_S):
        async with machine:
            await machine.until_status("/readyz", 200)
            pid = machine.told(0)["pid"]
    assert machine.is_set(1, "stopped")
    assert not machine.is_set(0, "stopped")
    assert "pod-0 did not stop in 0.5 s: killing it" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_last_of_repeated_options_is_in_force(monkeypatch):
    seen = []
    fake = types.SimpleNamespace(run=lambda settings: seen.append(settings) or 0)
    monkeypatch.setitem(sys.modules, "equipoise.worker.__main__", fake)
    settings = WorkerSettings(
        worker="pod",
        local_ranks=4,
        listen="127.0.0.1:7071",
        rendezvous_port=7072,
        metrics=MetricsPort(metrics_listen="127.0.0.1:9090"),
        probes_listen="0.0.0.0:9091",
    )
    given = ["--local-ranks=4", "--worker=pod", "--listen=127.0.0.1:7071", "--num-ranks=8"]
    for number in range(4):
        arguments = ["worker", *given, *options_of(settings, number)]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert [one.worker for one in seen] == ["pod-0", "pod-1", "pod-2", "pod-3"]
    assert {(one.local_ranks, one.num_ranks) for one in seen} == {(1, 8)}
    assert [one.listen for one in seen][1:3] == ["127.0.0.1:7081", "127.0.0.1:7091"]
    assert [one.rendezvous_port for one in seen] == [7072, 7082, 7092, 7102]
    assert seen[3].metrics.metrics_listen == "127.0.0.1:9120"
    assert seen[0].probes_listen == "127.0.0.1:9101", "9091 is the parent's"


def test_the_command_runs_several_ranks(monkeypatch):
    seen = []
    monkeypatch.setattr(local_ranks, "run", lambda settings: seen.append(settings.local_ranks) or 0)
    assert CliRunner().invoke(app, ["worker", "--local-ranks=2"]).exit_code == 0
    assert seen == [2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda:1"}, "device cuda:1 is one GPU: set it to cuda"),
        ({"probes_listen": "0.0.0.0:0"}, "probes_listen needs a port other than 0"),
        ({"listen": "127.0.0.1:65530"}, "listen of the last rank is port 65540"),
        (
            {"listen": "127.0.0.1:7071", "rendezvous_port": 7081},
            "port 7081 is both listen's and rendezvous_port's",
        ),
        (
            {
                "metrics": MetricsPort(metrics_listen="127.0.0.1:9101"),
                "probes_listen": "127.0.0.1:9091",
            },
            "port 9101 is both metrics_listen's and probes_listen's",
        ),
    ],
)
def test_settings_that_ranks_cannot_share_are_errors(settings, words):
    with pytest.raises(InvalidSettingsError, match=words):
        WorkerSettings(local_ranks=2, **settings)
    if "device" not in settings:
        WorkerSettings(**settings)
