"""Two worker processes over gloo with a scripted balancer: steps, switches and failures."""

import asyncio
import itertools
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from equipoise.cli.overlap.analysis import analyse
from equipoise.cli.overlap.names import Names
from equipoise.cli.overlap.timeline import Timeline
from equipoise.formats.trace import read_slices
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CheckpointSource, Move, RankSource
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.slowness import RankPace, find_slow, slowdowns
from equipoise.rank.errors import WorkerError
from equipoise.wire.messages import (
    GroupLost,
    LayoutRejected,
    Leaving,
    Report,
    Serving,
    Staged,
    Switched,
)
from equipoise.worker.alone import engine_alone
from equipoise.worker.hops import Hops
from equipoise.worker.sequence import Request
from equipoise.worker.settings import ReplicaChoice
from equipoise_api.v1 import worker_pb2 as pb
from equipoise_api.v1 import worker_pb2_grpc
from equipoise_model.checkpoint import save
from equipoise_model.config import Fp8Config
from equipoise_model.experts import checksum
from equipoise_model.plain.transformer import Transformer
from tests.support.forking import forking
from tests.support.fp8_models import NARROW
from tests.support.kernel_backends import use_backends
from tests.support.small_models import SMALL as CONFIG

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8))
FAILED = 3


def worker_process(settings):
    from equipoise.worker.__main__ import run

    try:
        sys.exit(run(settings))
    except WorkerError as error:
        print(error, file=sys.stderr)
        sys.exit(FAILED)


class Pool:
    """Both workers, in rank order, with their processes and streams."""

    def __init__(self, processes, links, restart):
        self.processes, self.links, self.restart = processes, links, restart

    def addresses(self):
        return [link.hello.address for link in self.links]

    async def exit_code(self, rank):
        await asyncio.to_thread(self.processes[rank].join, 60)
        return self.processes[rank].exitcode


@asynccontextmanager
async def two_ranks(balancer, settings, join_epoch, layout, *, has_nodes=False, **changes):
    context = forking()
    started = []

    def start(name):
        chosen = {
            "balancer": balancer.address,
            "worker": name,
            "num_ranks": 2,
            "slots_per_rank": 6,
            "step_timeout_s": 20.0,
            "drain_timeout_s": 0.0,
            "node": name if has_nodes else "",
        }
        chosen = settings(**chosen | changes)
        started.append(context.Process(target=worker_process, args=(chosen,), daemon=True))
        started[-1].start()
        return started[-1]

    processes = {name: start(name) for name in ("w-0", "w-1")}
    try:
        links = sorted(
            [await balancer.link(), await balancer.link()], key=lambda link: link.hello.worker
        )
        hellos = [link.hello for link in links]
        for rank, link in enumerate(links):
            link.say(join_epoch(hellos, layout, rank=rank))
        for link in links:
            await link.until(Serving)
        yield Pool([processes[hello.worker] for hello in hellos], links, start)
    finally:
        for process in started:
            process.kill()
            await asyncio.to_thread(process.join, 60)


async def generate(address, prompt, max_tokens, *, begun=None):
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=prompt, max_tokens=max_tokens), timeout=100
        )
        responses = []
        async for response in call:
            if response.is_waiting:
                continue  # It reports the latest step, not one of this request.
            responses.append(response)
            if begun is not None:
                begun.set()
    tokens = [token for response in responses for token in response.tokens]
    return tokens, {response.step: response.generation for response in responses}


async def test_ranks_switch_at_the_same_step_and_no_token_changes(
    balancer, settings, join_epoch, random_layout, stage_to, solo
):
    layouts = [random_layout(n, num_ranks=2, slots_per_rank=6) for n in range(1, 6)]
    async with two_ranks(balancer, settings, join_epoch, layouts[0]) as pool:
        generating = [
            asyncio.create_task(generate(address, prompt, 80))
            for address, prompt in zip(pool.addresses(), PROMPTS, strict=True)
        ]
        peer_bytes = 0
        for running, layout in itertools.pairwise(layouts):
            for rank, link in enumerate(pool.links):
                link.say(stage_to(running, layout, rank=rank, from_peers=True))
            for link in pool.links:
                staged = await link.until(Staged, _of(layout))
                assert staged.checkpoint_bytes == 0
                peer_bytes += staged.peer_bytes
            steps = {(await link.until(Switched, _of(layout))).step for link in pool.links}
            assert len(steps) == 1
        assert peer_bytes > 0
        generations = {}
        for task, prompt in zip(generating, PROMPTS, strict=True):
            tokens, seen = await task
            # Off the loop, so that the scripted balancer keeps answering.
            assert tokens == await asyncio.to_thread(solo, prompt, 80)
            for step, generation in seen.items():
                assert generations.setdefault(step, generation) == generation
        # An idle rank takes part in its peer's steps.
        tokens, _ = await generate(pool.addresses()[1], PROMPTS[0], 10)
        assert tokens == await asyncio.to_thread(solo, PROMPTS[0], 10)

        for process in pool.processes:
            os.kill(process.pid, signal.SIGTERM)
        for rank, link in enumerate(pool.links):
            assert await pool.exit_code(rank) == 0
            await link.until(Leaving)


async def test_each_rank_writes_a_profile_of_its_steps_that_overlap_reads(
    balancer, settings, join_epoch, random_layout, solo, tmp_path
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    profiling = {"profile_steps": 5, "profile_folder": tmp_path / "new" / "traces"}
    async with two_ranks(balancer, settings, join_epoch, layout, **profiling) as pool:
        tokens, _ = await generate(pool.addresses()[0], PROMPTS[0], 20)
        assert tokens == await asyncio.to_thread(solo, PROMPTS[0], 20)
        for process in pool.processes:
            os.kill(process.pid, signal.SIGTERM)
        for rank in range(2):
            assert await pool.exit_code(rank) == 0
    names = {"default-w-0.trace.json.gz", "default-w-1.trace.json.gz"}
    assert {path.name for path in (tmp_path / "new" / "traces").iterdir()} == names
    for name in names:
        found = analyse(Timeline.of(read_slices(tmp_path / "new" / "traces" / name), Names()))
        assert (found.on_device, found.num_processes, found.num_steps) == (False, 1, 5)
        assert [layer for layer, _ in found.layers] == list(range(CONFIG.num_moe_layers))
        for _, times in found.layers:
            # Two exchanges, which hide nothing: the rank waits for each.
            assert times.communication_us > 0
            assert times.experts_us > 0
            assert times.attention_us > 0
        assert 0 < found.times.experts_us < found.times.computation_us
        assert 0 < found.experts_share < 1


async def make_the_same_tokens_and_stop(pool, solo):
    generating = [
        asyncio.create_task(generate(address, prompt, 40))
        for address in pool.addresses()
        for prompt in PROMPTS
    ]
    for task, prompt in zip(generating, PROMPTS * 2, strict=True):
        tokens, _ = await task
        assert tokens == await asyncio.to_thread(solo, prompt, 40)
    for process in pool.processes:
        os.kill(process.pid, signal.SIGTERM)
    for rank in range(2):
        assert await pool.exit_code(rank) == 0


@pytest.mark.parametrize("phase", [Phase.MIXED, Phase.DECODE])
async def test_ranks_that_cut_their_steps_make_the_same_tokens_and_show_it_in_their_profiles(
    balancer, settings, join_epoch, random_layout, solo, tmp_path, phase
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    changes = {
        "profile_steps": 5, "profile_folder": tmp_path, "micro_batches": 2, "phase": phase,
    }  # fmt: skip
    async with two_ranks(balancer, settings, join_epoch, layout, **changes) as pool:
        await make_the_same_tokens_and_stop(pool, solo)
    for path in tmp_path.iterdir():
        found = analyse(Timeline.of(read_slices(path), Names()))
        num_exchanges = sum(one.name == "gloo:all_to_all" for one in read_slices(path))
        # Two exchanges for each layer of an uncut step; in these, several requests were active.
        assert num_exchanges > 2 * CONFIG.num_moe_layers * found.num_steps
        assert found.times.hidden_us > 0


async def test_ranks_that_balance_replicas_make_the_same_tokens_and_exchange_their_counts(
    balancer, settings, join_epoch, random_layout, solo, tmp_path
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    changes = {
        "profile_steps": 5,
        "profile_folder": tmp_path,
        "replica_choice": ReplicaChoice.BALANCED,
    }
    async with two_ranks(balancer, settings, join_epoch, layout, **changes) as pool:
        await make_the_same_tokens_and_stop(pool, solo)
    for path in tmp_path.iterdir():
        found = analyse(Timeline.of(read_slices(path), Names()))
        num_gathered = sum(one.name == "gloo:all_gather" for one in read_slices(path))
        # The headers of each step, and the counts of each layer.
        assert num_gathered >= CONFIG.num_moe_layers * found.num_steps > found.num_steps + 2


@pytest.mark.parametrize("hops", list(Hops))
async def test_ranks_on_two_nodes_make_the_same_tokens_and_report_what_travels_between(
    balancer, settings, join_epoch, random_layout, solo, hops
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, layout, has_nodes=True, hops=hops) as pool:
        for address, prompt in zip(pool.addresses(), PROMPTS, strict=True):
            tokens, _ = await generate(address, prompt, 20)
            assert tokens == await asyncio.to_thread(solo, prompt, 20)
        for link in pool.links:
            said = await link.until(Report, lambda said: said.stats.steps >= 40)
            nodes = said.stats.nodes
            rows = sum(nodes.rows_by_nodes)
            assert rows == said.stats.tokens_processed * CONFIG.num_moe_layers > 0
            assert 0 < nodes.remote_nodes < rows
            # Two ranks send each other all rows, which two hops do not.
            assert nodes.direct_rows == rows
            # Too few rows for a measurement, before which rows travel directly.
            assert nodes.sent_rows == (nodes.remote_nodes if hops is Hops.TWO else rows)


async def test_ranks_that_were_sent_different_layouts_of_one_generation_do_not_form(
    balancer, settings, join_epoch, random_layout
):
    first = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, first) as pool:
        hellos = [link.hello for link in pool.links]
        layouts = [random_layout(2, num_ranks=2, slots_per_rank=6, seed=seed) for seed in (2, 3)]
        for rank, link in enumerate(pool.links):
            link.say(join_epoch(hellos, layouts[rank], rank=rank, epoch=2))
        for link in pool.links:
            lost = await link.until(GroupLost, lambda said: said.epoch == 2)
            assert "met but do not agree: ranks disagree about the layout" in lost.reason
            for name, layout in zip(("w-0", "w-1"), layouts, strict=True):
                assert f"{name}: {layout.digest()[:8].hex()}" in lost.reason
        # One layout for all heals them.
        for rank, link in enumerate(pool.links):
            link.say(join_epoch(hellos, layouts[0], rank=rank, epoch=3))
        for link in pool.links:
            await link.until(Serving, lambda said: said.epoch == 3)


async def test_ranks_that_staged_different_layouts_of_one_generation_reject_to_switch(
    balancer, settings, join_epoch, random_layout, stage_to, solo
):
    first = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, first) as pool:
        for rank, link in enumerate(pool.links):
            other = random_layout(2, num_ranks=2, slots_per_rank=6, seed=rank)
            link.say(stage_to(first, other, rank=rank))
        for link in pool.links:
            rejected = await link.until(LayoutRejected)
            assert rejected.generation == 2
            assert "disagree about the staged layout of generation 2" in rejected.reason
            assert "w-0: " in rejected.reason
        tokens, generations = await generate(pool.addresses()[1], PROMPTS[0], 10)
        assert tokens == await asyncio.to_thread(solo, PROMPTS[0], 10)
        assert set(generations.values()) == {1}
        # The number is free again, and one layout for all is switched to.
        same = random_layout(2, num_ranks=2, slots_per_rank=6)
        for rank, link in enumerate(pool.links):
            link.say(stage_to(first, same, rank=rank))
        for link in pool.links:
            await link.until(Switched, _of(same))


async def test_a_slow_rank_is_distinguished_from_the_rank_that_waits_for_it(
    balancer, settings, join_epoch, random_layout
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, layout) as pool:
        generating = [
            asyncio.create_task(generate(address, prompt, 80))
            for address, prompt in zip(pool.addresses(), PROMPTS, strict=True)
        ]
        async with slowed_down(pool.processes[1]):
            await asyncio.gather(*generating)
        steps = 80
        reports = [
            await link.until(Report, lambda said: said.stats.steps >= steps) for link in pool.links
        ]
        pace = RankPace(
            busy_us=np.array([said.stats.busy_us / said.stats.steps for said in reports]),
            load=np.array([said.load.assignments.sum() for said in reports], dtype=np.float64),
            steps=steps,
        )
        policy = Policy(slow_worker_windows=1, slow_worker_factor=1.5)
        assert set(find_slow([pace], policy=policy)) == {1}, slowdowns(pace)


@asynccontextmanager
async def slowed_down(process):
    """Let the process run a fifth of the time, however fast the machine is."""

    async def stutter():
        while True:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.04)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        os.kill(process.pid, signal.SIGCONT)


def _of(layout):
    return lambda said: said.generation == layout.generation


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_rank_leaves_gracefully_and_its_peer_reports_who_left(
    balancer, settings, join_epoch, random_layout, number
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, layout) as pool:
        os.kill(pool.processes[1].pid, number)
        assert await pool.exit_code(1) == 0
        lost = await pool.links[0].until(GroupLost)
        assert "w-1 left the pool" in lost.reason
        assert await has_freed_its_group(pool.processes[0])
        np.testing.assert_array_equal(lost.expert_of_slot, layout.expert_of_slot[:, :6])
        await pool.links[1].until(Leaving, lambda said: "w-1 is shutting down" in said.reason)


async def test_a_rank_keeps_its_requests_for_the_next_epoch_when_its_peer_is_killed(
    balancer, settings, join_epoch, random_layout, solo, checkpoint
):
    layout = random_layout(1, num_ranks=2, slots_per_rank=6)
    async with two_ranks(balancer, settings, join_epoch, layout) as pool:
        begun = asyncio.Event()
        generating = asyncio.create_task(generate(pool.addresses()[0], PROMPTS[0], 80, begun=begun))
        await begun.wait()
        pool.processes[1].kill()
        survivor = pool.links[0]
        lost = await survivor.until(GroupLost)
        assert "a peer rank failed or hangs" in lost.reason
        assert await has_freed_its_group(pool.processes[0])

        pool.restart("w-1")
        returned = await balancer.link()
        hellos = [survivor.hello, returned.hello]
        second = random_layout(2, num_ranks=2, slots_per_rank=6)
        survivor.say(join_epoch(hellos, second, rank=0, epoch=2))
        moves = pull_from(0, layout, second, checkpoint)
        assert moves
        returned.say(join_epoch(hellos, second, rank=1, epoch=2, moves=moves))
        for link in (survivor, returned):
            await link.until(Serving, lambda said: said.epoch == 2)
        tokens, _ = await generating
        assert tokens == solo(PROMPTS[0], 80)
        tokens, _ = await generate(returned.hello.address, PROMPTS[1], 10)
        assert tokens == solo(PROMPTS[1], 10)


async def has_freed_its_group(process):
    """Whether gloo's threads, and so its sockets, end soon, long before a collection of garbage."""
    for _ in range(100):
        if not any("gloo" in name for name in thread_names(process.pid)):
            return True
        await asyncio.sleep(0.05)
    return False


def thread_names(pid):
    names = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # It has ended.
            names.append((thread / "comm").read_text())
    return names


def pull_from(holder, before, after, checkpoint):
    """Moves that fill rank 1, which holds nothing, from what its peer held before."""
    moves = []
    for layer, slot in np.ndindex(after.expert_of_slot.shape):
        expert = int(after.expert_of_slot[layer, slot])
        if slot >= 6 and expert in before.expert_of_slot[layer, :6]:
            moves.append(
                Move(
                    layer=layer,
                    slot=slot,
                    expert=expert,
                    checksum=checksum(checkpoint.read_expert(layer, expert)),
                    sources=(RankSource(rank=holder), CheckpointSource()),
                )
            )
    return tuple(moves)


@pytest.fixture
def in_fp8(tmp_path, monkeypatch):
    """Settings of a worker in FP8, on the torch twins, as on any machine without a GPU."""
    torch.manual_seed(7)
    model = Transformer(NARROW).requires_grad_(requires_grad=False)
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            tensor.normal_(std=0.2)
    save(model, tmp_path / "fp8", fp8=Fp8Config())
    # Test processes interpret kernels; workers do not.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    use_backends(monkeypatch, "reference")
    return {
        "checkpoint": tmp_path / "fp8",
        "weights": "fp8",
        "batch_invariant": False,
        "slots_per_rank": 3,
        "context_length": 64,
        # On a busy machine, a restarted worker may take longer than this to load.
        "outage_timeout_s": 120.0,
    }


def tokens_alone(settings, prompt, max_tokens):
    made = []

    def publish(result):
        made.extend(emission.token for emission in result.emissions)
        if any(emission.finish for emission in result.emissions):
            engine.leave()

    engine = engine_alone(settings, publish=publish)
    engine.submit(Request(key=1, prompt=prompt, max_tokens=max_tokens))
    engine.run()
    return made


def layout_in_fp8(generation, row):
    table = np.array([row], dtype=np.int32)
    return Layout(generation=generation, num_experts=4, num_ranks=2, expert_of_slot=table)


async def test_fp8_ranks_serve_together_and_re_form_after_one_was_killed(
    balancer, settings, join_epoch, in_fp8
):
    first, second = layout_in_fp8(1, [0, 1, 2, 3, 0, 1]), layout_in_fp8(2, [3, 1, 0, 2, 3, 0])
    expected = [tokens_alone(settings(**in_fp8), prompt, 40) for prompt in PROMPTS]
    async with two_ranks(balancer, settings, join_epoch, first, **in_fp8) as pool:
        tokens, _ = await generate(pool.addresses()[1], PROMPTS[1], 40)
        assert tokens == expected[1]
        begun = asyncio.Event()
        generating = asyncio.create_task(generate(pool.addresses()[0], PROMPTS[0], 40, begun=begun))
        await begun.wait()
        pool.processes[1].kill()
        survivor = pool.links[0]
        assert "a peer rank failed or hangs" in (await survivor.until(GroupLost)).reason

        pool.restart("w-1")
        returned = await balancer.link()
        hellos = [survivor.hello, returned.hello]
        for rank, link in enumerate((survivor, returned)):
            link.say(join_epoch(hellos, second, rank=rank, epoch=2))
        for link in (survivor, returned):
            serving = await link.until(Serving, lambda said: said.epoch == 2)
            assert serving.steps == (
                "launched one by one: cpu has no CUDA graphs; rows by reference"
            )
        tokens, _ = await generating
        assert tokens == expected[0]
