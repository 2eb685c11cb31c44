"""Ranks of vLLM's and SGLang's real code, with a real balancer: `make test-engines`.

An engine's forward pass is replaced by routed tokens. Its planner, mover, tables, counters,
dispatch rule and plugin mechanism are real, and compared with ours after every pass and switch.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.wheels import ENGINES_PYTHON, NEEDS_WHEELS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), NEEDS_WHEELS]

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("engine", ["vllm", "sglang"])
BALANCER = (
    *("--interval-s", "2", "--report-interval-s", "0.25", "--heartbeat-interval-s", "0.25"),
    *("--slow-half-life-s", "8", "--fast-half-life-s", "2", "--cooldown-s", "2"),
    *("--min-assignments", "500", "--payback-s", "86400"),
    *("--bandwidth-bytes-per-s", "100000000"),
)


class Balancer:
    """A balancer process that can be killed and started again on the same port and store."""

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        self.process = None

    @property
    def log(self):
        return (self.folder / "balancer.log").read_text()

    def start(self):
        terms = self.log.count("leads in term") if self.process else 0
        with (self.folder / "balancer.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-c",
                        "from equipoise.cli.entry import main; main()",
                        "balancer",
                    ),
                    *("--listen", f"127.0.0.1:{self.port}", "--store", self.folder / "store.db"),
                    *("--metrics-listen", "127.0.0.1:0", *BALANCER),
                ],
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + 300  # It compiles the planner once.
        while self.log.count("leads in term") == terms:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end_s, self.log
            time.sleep(0.2)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def engine_ranks(folder, port, **options):
    """Run the ranks; gives their process."""
    environment = os.environ | {
        "PYTHONPATH": ":".join(
            str(ROOT / place) for place in ("services", "model", "kernels", "protos", "")
        ),
        "OMP_NUM_THREADS": "1",
        "EQUIPOISE_BALANCER": f"127.0.0.1:{port}",
        "EQUIPOISE_POOL": "moe",
        "EQUIPOISE_WORKER": "engine",
        "EQUIPOISE_NODE": "node-0",
        "EQUIPOISE_ADVERTISE_HOST": "127.0.0.1",
        "EQUIPOISE_LISTEN": "127.0.0.1:0",
    }
    environment |= options.pop("environment", {})
    with (folder / "ranks.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(ENGINES_PYTHON, "-m", "tests.engines.rank_main"),
                json.dumps({"folder": str(folder)} | options),
            ],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def records(folder, process, *, ranks=4, stages=1):
    """What the ranks recorded; by stage if there are several."""
    assert process.wait(540) == 0, (folder / "ranks.log").read_text()[-4000:]
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert [one["faults"] for one in found] == [[]] * ranks
    of_stage = [
        found[first : first + ranks // stages] for first in range(0, ranks, ranks // stages)
    ]
    for one in of_stage:
        assert len({json.dumps([s[:2] for s in rank["switches"]]) for rank in one}) == 1
    return found if stages == 1 else of_stage


@pytest.fixture
def balancer(tmp_path, unused_tcp_port):
    one = Balancer(tmp_path, unused_tcp_port)
    try:
        one.start()
        yield one
    finally:
        one.kill()


def wait_for(folder, text, *, times=1, bound_s=240.0):
    end_s = time.monotonic() + bound_s
    while (folder / "ranks.log").read_text().count(text) < times:
        assert time.monotonic() < end_s, (folder / "ranks.log").read_text()[-4000:]
        time.sleep(0.2)


@BOTH
def test_loads_even_out_twice_with_the_engines_own_bytes_and_tables(tmp_path, balancer, engine):
    options = {"engine": engine, "passes": 1600, "equal": True}
    with engine_ranks(tmp_path, balancer.port, **options) as process:
        found = records(tmp_path, process)
    for one in found:
        assert len(one["switches"]) >= 2
        assert one["equal"] == [{"weights": True, "tables": True, "counts": True}] * len(
            one["switches"]
        )
        assert (one["planner_runs"], one["stopped"]) == (0, "")
        assert one["imbalance"][0] > 1.5
        assert min(one["imbalance"][:16]) < 1.1, "before the shift"
        assert one["imbalance"][17] > 1.3, "traffic has shifted"
        assert one["imbalance"][-1] < 1.1
        assert one["hook_us"]["median"] < 500
    print(json.dumps(found[0]))


def after_changes(imbalance):
    """Mean of busiest over mean rank, without the 400 passes after the start and the shift."""
    half = len(imbalance) // 2
    settled = [*imbalance[8:half], *imbalance[half + 8 :]]
    return sum(settled) / len(settled)


@BOTH
def test_five_thousand_passes_are_balanced_as_well_as_by_the_engine_itself(
    tmp_path, balancer, engine
):
    told = {}
    for planner, passes in (("equipoise", 5000), ("engine", 1600)):
        folder = tmp_path / planner
        folder.mkdir()
        options = {"engine": engine, "passes": passes, "pass_ms": 12.0, "planner": planner}
        with engine_ranks(folder, balancer.port, **options) as process:
            found = records(folder, process)
        one = found[0]
        told[planner] = {
            "settled": round(after_changes(one["imbalance"]), 3),
            "worst": max(
                one["imbalance"][8 : passes // 100] + one["imbalance"][passes // 100 + 8 :]
            ),
            "moves per 1000 passes": round(1000 * one["moves"] / passes),
            "switches": len(one["switches"]),
            "switch_us": sorted(switch[2] for switch in one["switches"]),
            "hook_us": [rank["hook_us"] for rank in found],
        }
        print(engine, planner, json.dumps(told[planner]))
    assert told["equipoise"]["settled"] < 1.1
    assert told["equipoise"]["settled"] < told["engine"]["settled"] + 0.05


@BOTH
def test_damaged_bytes_are_refused_and_nothing_switches(tmp_path, balancer, engine):
    options = {"engine": engine, "passes": 700, "corrupt": 1, "redundant": 0}
    with engine_ranks(tmp_path, balancer.port, **options) as process:
        found = records(tmp_path, process)
    log = (tmp_path / "ranks.log").read_text()
    assert "corrupted" in log
    assert [one["switches"] for one in found] == [[]] * 4
    assert [one["stopped"] for one in found] == [""] * 4


@BOTH
def test_a_balancer_that_is_killed_is_survived_and_followed_again(tmp_path, balancer, engine):
    with engine_ranks(tmp_path, balancer.port, engine=engine, passes=2600) as process:
        wait_for(tmp_path, "switched to generation", times=4)
        balancer.kill()
        time.sleep(3)
        balancer.start()
        found = records(tmp_path, process)
    assert len(found[0]["switches"]) >= 2
    assert found[0]["imbalance"][-1] < 1.15


@BOTH
def test_an_idle_engine_is_not_switched_behind_its_back(tmp_path, balancer, engine):
    options = {"engine": engine, "passes": 1400, "pause_at": 300, "pause_s": 45.0}
    with engine_ranks(tmp_path, balancer.port, **options) as process:
        found = records(tmp_path, process)
    assert found[0]["imbalance"][-1] < 1.15
    assert [one["stopped"] for one in found] == [""] * 4


@pytest.mark.parametrize("announced", [True, False])
@BOTH
def test_updated_weights_are_hashed_again_and_balanced_on(tmp_path, balancer, engine, announced):
    options = {"engine": engine, "passes": 1600, "update_at": 500, "announced": announced}
    with engine_ranks(tmp_path, balancer.port, **options, equal=True) as process:
        found = records(tmp_path, process)
    log = (tmp_path / "ranks.log").read_text()
    assert log.count("all ranks have hashed the updated weights") >= 4
    for one in found:
        assert one["stopped"] == ""
        assert max(step for _, step, _ in one["switches"]) > 500
        assert {tuple(same.values()) for same in one["equal"]} == {(True, True, True)}
        assert one["imbalance"][-1] < 1.15


@BOTH
def test_an_observer_reports_loads_and_moves_nothing(tmp_path, balancer, engine):
    environment = {"EQUIPOISE_MODE": "observe"}
    options = {"engine": engine, "passes": 700, "environment": environment}
    with engine_ranks(tmp_path, balancer.port, **options) as process:
        found = records(tmp_path, process)
    assert [one["switches"] for one in found] == [[]] * 4
    assert "only observes" in balancer.log


@BOTH
def test_pipeline_stages_are_pools_of_their_own(tmp_path, balancer, engine):
    """Two stages of two ranks; the second waits in each pass for what the first has computed."""
    options = {"engine": engine, "passes": 1200, "stages": 2}
    with engine_ranks(tmp_path, balancer.port, **options) as process:
        stages = records(tmp_path, process, stages=2)
    for stage in stages:
        for one in stage:
            assert one["switches"]
            assert (one["planner_runs"], one["stopped"]) == (0, "")
            assert one["imbalance"][0] > 1.2
            assert one["imbalance"][-1] < 1.1
    log = (tmp_path / "ranks.log").read_text()
    assert {"rank 0 of pool moe-stage0", "rank 1 of pool moe-stage1"} <= set(
        re.findall(r"rank \d of pool [\w-]+", log)
    )


@BOTH
def test_an_engine_whose_own_planner_is_active_is_left_alone(tmp_path, engine):
    options = {"engine": engine, "passes": 130, "planner": "both"}
    with engine_ranks(tmp_path, 1, **options) as process:
        found = records(tmp_path, process)
    assert all(one["planner_runs"] >= 1 for one in found)
    assert "own planner is active" in (tmp_path / "ranks.log").read_text()
