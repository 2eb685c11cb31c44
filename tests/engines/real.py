"""What a test does with ranks of a real engine and a real balancer, each in processes of their own.

An engine's forward pass is replaced by routed tokens. Its planner, mover, tables, counters,
dispatch rule and plugin mechanism are real.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc

from equipoise.planning.rollout import State
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2, status_pb2_grpc
from tests.engines.rank_main import Controls, Options
from tests.engines.wheels import FOLDER
from tests.support import doomed
from tests.support.real_pool import mirrored

ROOT = Path(__file__).parents[2]
BOUND_S = 900.0
"""For whatever is waited for, on a machine that has too much to do."""

PHASES = (*State, "staged RankSwitched")
"""Of a rollout, in which a balancer dies. The last one: ranks have switched, and it dies before it
notes the first report."""

POLICY = (
    *("--interval-s", "2", "--report-interval-s", "0.25", "--heartbeat-interval-s", "0.25"),
    *("--slow-half-life-s", "8", "--fast-half-life-s", "2", "--cooldown-s", "2"),
    *("--min-assignments", "500", "--payback-s", "86400"),
    *("--bandwidth-bytes-per-s", "100000000"),
)


def until(condition, what):
    """Wait for a condition; `what` tells what is seen, if it does not come true."""
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)


class Balancer:
    """A balancer process that can be killed and started again on the same port and store."""

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        self.doom = folder / "doom"
        """Names the state of a rollout in which it dies."""
        self._log = folder / "balancer.log"
        self._process = None

    @property
    def log(self):
        return self._log.read_text() if self._log.exists() else ""

    def start(self):
        terms = self.log.count("leads in term")
        command = [sys.executable, doomed.__file__, self.doom, "balancer"]
        command += ["--listen", f"127.0.0.1:{self.port}", "--store", self.folder / "store.db"]
        command += ["--metrics-listen", "127.0.0.1:0", *POLICY]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self.log.count("leads in term") > terms, lambda: self.log)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait_for_death(self):
        """Wait until it has died of its doom."""
        assert self._process.wait(BOUND_S) == -signal.SIGKILL, self.log

    def lose_store(self):
        """Delete what it has stored."""
        for path in self.folder.glob("store.db*"):
            path.unlink()

    def status(self, pool="moe"):
        request = status_pb2.GetStatusRequest(pool=pool)
        return self._ask("GetStatus", request, status_pb2.GetStatusResponse()).status

    def until(self, condition):
        until(lambda: condition(self.status()), lambda: f"{self.status()}\n{self.log[-4000:]}")

    def decisions(self):
        """All decisions, the oldest first."""
        request = status_pb2.ListDecisionsRequest(limit=1000)
        found = self._ask("ListDecisions", request, status_pb2.ListDecisionsResponse()).decisions
        return sorted(found, key=lambda decision: decision.sequence)

    def layout(self):
        request = status_pb2.GetLayoutRequest()
        return self._ask("GetLayout", request, status_pb2.GetLayoutResponse()).layout

    def _ask(self, method, request, nothing):
        """Ask the balancer; returns `nothing` while no rank has connected."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = getattr(status_pb2_grpc.StatusStub(channel), method)
            try:
                return call(request, timeout=BOUND_S, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return nothing
                raise

    def pin(self, layout):
        """Pin the pool to a layout; the balancer may die before it answers."""
        request = admin_pb2.PinRequest(reason="to be rolled out", layout=layout)

        def is_pinned():
            with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
                try:
                    admin_pb2_grpc.AdminStub(channel).Pin(request, timeout=BOUND_S)
                except grpc.RpcError as error:
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        return False
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
            return True

        until(is_pinned, lambda: self.log[-4000:])

    def pause(self):
        """Pause the pool, and wait until its rollout has ended."""
        self._admin("Pause", admin_pb2.PauseRequest(reason="an update"))
        self.until(lambda status: not status.HasField("rollout"))

    def resume(self):
        self._admin("Resume", admin_pb2.ResumeRequest(reason="the update is over"))

    def _admin(self, method, request):
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=BOUND_S)

    def die_in_every_phase(self, serve_on):
        """Die in each phase of a rollout and start again; `serve_on` has the ranks take passes.

        The next balancer ends the rollout in the ranks' epoch, and rolls out what is pinned.
        """
        self.pin(self.layout())  # From here on only pinned layouts are rolled out.
        self.until(lambda status: status.hold.at_pin and not status.HasField("rollout"))
        before = self.status()
        generation = before.generation
        for phase in PHASES:
            wanted = mirrored(self.layout())
            self.doom.write_text(phase)
            self.pin(wanted)
            self.wait_for_death()
            self.doom.write_text("")
            serve_on()
            self.start()
            self.until(
                lambda status: (
                    status.health == status_pb2.POOL_HEALTH_SERVING
                    and status.hold.at_pin
                    and status.generation > generation  # noqa: B023 - asked within the turn
                    and not status.HasField("rollout")
                )
            )
            after = self.status()
            assert self.layout().expert_of_slot == wanted.expert_of_slot, phase
            assert after.epoch == before.epoch, phase
            generation = after.generation


class EngineProcess:
    """Has imported a release, and forks its ranks for one run after the other."""

    def __init__(self, release):
        self.release = release
        self.engine = release.partition("=")[0]
        # The plugin is the installed wheel; nothing else of this repository but the tests.
        path = [str(FOLDER / release), str(FOLDER / "plugin"), str(ROOT)]
        self._process = subprocess.Popen(
            [FOLDER / "bin/python", "-m", "tests.engines.rank_main", self.engine],
            env=os.environ | {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder, *, port, environment=None, **options):
        """Start the ranks of a run, in a folder of its own."""
        wanted = Options(engine=self.engine, folder=str(folder), **options)
        variables = {
            "EQUIPOISE_BALANCER": f"127.0.0.1:{port}",
            "EQUIPOISE_POOL": "moe",
            "EQUIPOISE_WORKER": "engine",
            "EQUIPOISE_NODE": "node-0",
            "EQUIPOISE_ADVERTISE_HOST": "127.0.0.1",
            "EQUIPOISE_LISTEN": "127.0.0.1:0",
        } | (environment or {})
        request = {"options": vars(wanted), "environment": variables}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()  # It imports the engine first.
        assert answer, f"{self.release} cannot be imported: see above"
        return Run(wanted, group=int(answer))

    def close(self):
        self._process.kill()
        self._process.communicate()


class Run:
    """Ranks that take passes; `group` is their process group."""

    def __init__(self, options, *, group):
        self.options, self.folder = options, Path(options.folder)
        self._group, self._controls = group, Controls()
        self._looked_at = 0

    @property
    def log(self):
        path = self.folder / "ranks.log"
        return path.read_text() if path.exists() else ""

    def control(self, **changes):
        """Change what the ranks do, from the same pass on; ends what `until_balanced` looks at."""
        self._controls, path = replace(self._controls, **changes), self.folder / "controls"
        path.write_text(json.dumps(vars(self._controls)))
        path.rename(path.with_suffix(".json"))
        self._looked_at = len(self.windows())

    def windows(self, stage=0):
        """The imbalance of each window so far."""
        path = self.folder / f"windows{stage}"
        return [float(line) for line in path.read_text().split()] if path.exists() else []

    def until(self, condition):
        def is_reached():
            assert not (self.folder / "ended").exists(), self.log[-4000:]
            return condition()

        until(is_reached, lambda: f"{self.windows()}\n{self.log[-4000:]}")

    def until_balanced(self, *, below=1.1, windows=3):
        """Wait until some windows in a row, begun after the latest controls, are balanced."""
        since = self._looked_at + 1

        def is_balanced():
            last = [self.windows(stage)[since:][-windows:] for stage in range(self.options.stages)]
            return all(len(one) == windows and max(one) < below for one in last)

        self.until(is_balanced)

    def until_windows(self, count):
        """Wait for so many more windows."""
        wanted = len(self.windows()) + count
        self.until(lambda: len(self.windows()) >= wanted)

    def until_said(self, text, *, times=1):
        """Wait until the ranks' log has a text."""
        self.until(lambda: self.log.count(text) >= times)

    def pids(self):
        return json.loads((self.folder / "pids.json").read_text())

    def wait(self):
        """Wait for the end; returns the exit status of each rank."""
        until((self.folder / "ended").exists, lambda: f"{self.windows()}\n{self.log[-4000:]}")
        return json.loads((self.folder / "ended").read_text())

    def kill(self):
        if not (self.folder / "ended").exists():
            os.killpg(self._group, signal.SIGKILL)

    def records(self):
        """End, and return what each rank recorded, without faults; by stage if there are any."""
        if not self.options.passes:
            self.control(is_over=True)
        assert self.wait() == [0] * self.options.ranks, self.log[-4000:]
        found = [
            json.loads((self.folder / f"rank{rank}.json").read_text())
            for rank in range(self.options.ranks)
        ]
        num = self.options.stage_ranks
        stages = [found[first : first + num] for first in range(0, len(found), num)]
        for ranks in stages:
            assert [one["faults"] for one in ranks] == [[]] * num
            for what in ("tables", "imbalance", "passes"):
                assert all(one[what] == ranks[0][what] for one in ranks), what
            assert len({json.dumps([s[:2] for s in one["switches"]]) for one in ranks}) == 1
            check_reports([one["reports"] for one in ranks])
        return found if len(stages) == 1 else stages


def check_reports(of_rank):
    """All assignments are in the reports of all ranks, once."""
    by_passes = [{row[0]: row[1:] for row in rows} for rows in of_rank]
    for passes in set.intersection(*map(set, by_passes)):
        counted, routed = (sum(one[passes][column] for one in by_passes) for column in (0, 1))
        assert counted == routed, f"of {passes} passes"
