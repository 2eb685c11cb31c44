"""The main job with real processes: a balancer, workers, shifting traffic, and all shutdowns."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import psutil
import pytest

from equipoise.cli.demo.fleet import free_address
from equipoise.cli.live.status_feed import StatusFeed
from equipoise_api.v1 import status_pb2, worker_pb2, worker_pb2_grpc
from tests.support.collector import Collector
from tests.support.forked_commands import ForkedFleet

pytestmark = pytest.mark.e2e

BOUND_S = 240.0
EQUIPOISE = (sys.executable, "-m", "equipoise.cli.main")


@contextmanager
def demo(*, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A small demo in its own process, a rank on each node; killed if it still runs at the end."""
    command = [*EQUIPOISE, "demo", "--plain", "--listen", free_address("127.0.0.1:0")]
    ranks = [f"--workers={workers}", f"--nodes={workers}", f"--slots-per-rank={40 // workers}"]
    with subprocess.Popen(
        [*command, *ranks, "--prompts-per-domain=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The process's output up to a line with this text; pytest's timeout bounds it."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"it ended without saying {words!r}:\n{''.join(lines)}")


def one_line_of(*arguments: str) -> str:
    """The single line on stderr of a command that must fail at once."""
    done = subprocess.run(
        [*EQUIPOISE, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("equipoise")
    return line


async def serving_pool(address: str) -> status_pb2.PoolStatus:
    """The status of the default pool as soon as all its ranks serve."""
    feed = StatusFeed(address, pool="default")
    following = asyncio.create_task(feed.run())
    try:
        return await feed.until(
            lambda status: status.health == status_pb2.POOL_HEALTH_SERVING, timeout_s=BOUND_S
        )
    finally:
        following.cancel()


async def generate(
    address: str, max_tokens: int, *, begun: asyncio.Event | None = None
) -> list[int]:
    """Tokens of one request; `begun` is set with the first of them."""
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            worker_pb2.GenerateRequest(prompt=b"def ", max_tokens=max_tokens)
        )
        async for response in call:
            tokens += response.tokens
            if begun is not None and tokens:
                begun.set()
    return tokens


@pytest.fixture(scope="module")
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def figures(tmp_path_factory, collector):
    """What a short run of the whole demo reports: four ranks, two domains, windows of 2.5 s."""
    document = tmp_path_factory.mktemp("demo") / "figures.json"
    done = subprocess.run(
        [
            *EQUIPOISE, "demo", "--plain", "--json", str(document),
            "--listen", free_address("127.0.0.1:0"),
            "--domains", "code,arithmetic", "--interval-s", "2.5", "--seconds-per-domain", "15",
            "--prompts-per-domain", "24",
        ],
        capture_output=True, text=True, timeout=2 * BOUND_S, check=False,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(document.read_text())


def test_no_request_fails_and_no_token_changes(figures):
    assert figures["failed_requests"] == 0
    assert figures["tokens_compared"] > 1000
    assert figures["tokens_identical"] == figures["tokens_compared"]


def test_no_step_runs_in_two_generations(figures):
    assert figures["steps_of_two_generations"] == 0


def test_a_rollout_restores_the_balance_that_a_shift_destroys(figures):
    (shift,) = figures["shifts"]
    # Windows of 2.5 s still contain earlier traffic; the demo's own contain less of it.
    assert shift["max_over_mean_after"] >= 1.2 > shift["max_over_mean_before"]
    assert shift["max_over_mean_recovered"] < shift["max_over_mean_after"]
    assert shift["max_over_mean_recovered"] <= 1.2
    assert shift["intervals_to_recover"] <= 3
    assert any(switch["span"][1] > shift["at_s"] for switch in figures["switches"])
    assert figures["balancedness_recovered"] > figures["balancedness_after_shift"]


def test_a_plan_and_its_rollout_on_all_ranks_are_one_trace(figures, collector):
    assert figures["rollouts"] > 0
    spans = collector.spans
    roots = {span.id: span for span in spans if span.name == "rebalance" and not span.fault}
    waves = [span for span in spans if span.name == "wave" and span.parent in roots]
    assert waves
    for wave in waves:
        below = [span for span in spans if span.parent == wave.id]
        assert {span.trace for span in below} == {wave.trace}
        counts = Counter((span.service, span.name) for span in below)
        assert counts == {
            **{("equipoise-balancer", name): 1 for name in ("stage", "switch", "commit")},
            **{("equipoise-worker", f"rank {name}"): 4 for name in ("stage", "switch")},
        }
        steps = {span.attributes["step"] for span in below if span.name == "rank switch"}
        assert len(steps) == 1
        root = roots[wave.parent]
        assert not root.parent
        (plan,) = [span for span in spans if span.parent == root.id and span.name == "plan"]
        assert plan.attributes["accepted"]
        assert root.began_ns <= plan.began_ns <= plan.ended_ns <= wave.began_ns
        assert wave.ended_ns <= root.ended_ns


def test_the_figures_have_the_documented_keys(figures):
    assert set(figures) >= {
        "balancedness_before_shift",
        "balancedness_after_shift",
        "balancedness_recovered",
        "intervals_to_recover",
        "rollouts",
        "failed_requests",
        "tokens_identical",
        "tokens_compared",
        "max_switch_stall_ms",
        "median_step_ms",
        "p95_inter_token_ratio_during_rollout",
        "peak_memory_bytes",
    }
    assert figures["rollouts"] >= 1
    assert figures["peak_memory_bytes"] < 6 * 2**30
    assert figures["max_switch_stall_ms"] > 0
    assert figures["median_step_ms"] > 0


@pytest.mark.parametrize(
    ("workers", "moment"), [(1, "balancer: "), (2, "ranks on 2 nodes are serving")]
)
def test_an_interrupt_at_any_moment_shuts_everything_down_cleanly(workers, moment):
    with demo(workers=workers) as process:
        read_until(process, moment)
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=BOUND_S)
        assert process.returncode == 130
        assert "Traceback" not in rest
        _, alive = psutil.wait_procs(family, timeout=0)
        assert not alive


def test_nothing_outlives_a_demo_that_is_killed():
    with demo(workers=1) as process:
        read_until(process, "code traffic")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=BOUND_S)
    assert not alive


async def test_workers_keep_serving_without_a_balancer_and_reconnect_to_it(tmp_path):
    address = free_address("127.0.0.1:0")
    balancer = [
        "balancer", f"--listen={address}", f"--store={tmp_path / 'state.sqlite'}", "--interval-s=1",
    ]  # fmt: skip
    async with ForkedFleet(tmp_path) as fleet, asyncio.timeout(BOUND_S):
        await fleet.start("balancer", balancer)
        for rank in range(2):
            await fleet.start(
                f"worker-{rank}",
                [
                    "worker", f"--balancer={address}", f"--worker=worker-{rank}",
                    "--num-ranks=2", "--slots-per-rank=20",
                ],
            )  # fmt: skip
        before = await serving_pool(address)
        workers = [rank.address for rank in before.ranks]

        begun = asyncio.Event()
        running = asyncio.create_task(generate(workers[0], 150, begun=begun))
        await begun.wait()
        await fleet.stop("balancer", with_signal=signal.SIGKILL)
        assert len(await running) == 150
        assert [len(await generate(worker, 8)) for worker in workers] == [8, 8]

        await fleet.start("balancer", balancer)
        after = await serving_pool(address)
        assert [len(await generate(worker, 8)) for worker in workers] == [8, 8]
    assert after.epoch == before.epoch
    assert [rank.worker for rank in after.ranks] == [rank.worker for rank in before.ranks]


def test_a_missing_checkpoint_is_reported_in_one_line(tmp_path):
    line = one_line_of("worker", "--checkpoint", str(tmp_path / "nowhere"))
    assert "nowhere" in line


def test_a_port_in_use_is_reported_in_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = one_line_of("balancer", "--listen", address, "--store", str(tmp_path / "state"))
    assert address in line


def test_an_unreachable_balancer_is_reported_in_one_line():
    address = free_address("127.0.0.1:0")
    assert address in one_line_of("status", "--address", address)
