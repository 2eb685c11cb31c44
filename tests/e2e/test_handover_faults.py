"""Real ranks, gateways and clients fail at each stage of a handover: see docs/disaggregation.md.

One fleet suffers all of it. Each case has a prompt that no rank has cached, and its tokens must be
those of a model in one process.
"""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from equipoise.cli.demo.reference import ReferenceModel
from equipoise.cli.demo.traffic import Prompt
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.planning.warm_up import warm_up
from tests.support.chaos.arena import Arena, whole
from tests.support.chaos.gate import Stage
from tests.support.chaos.plan import Ground

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

BOUND_S = 120.0
NUM_PROMPT, NUM_TOKENS = 150, 16
NUM_SPARE = 24
PREFILL, DECODE = True, False
KILLED, STOPPED, HANGS = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP

CASES = [
    (Stage.PREFILL_ASKED, PREFILL, KILLED),
    (Stage.FIRST_TOKEN, PREFILL, KILLED),
    (Stage.FIRST_TOKEN, PREFILL, STOPPED),
    (Stage.DECODE_ASKED, DECODE, KILLED),
    (Stage.FETCH_ASKED, PREFILL, HANGS),
    (Stage.FETCHING, PREFILL, KILLED),
    (Stage.FETCHING, DECODE, KILLED),
    (Stage.FETCHED, DECODE, STOPPED),
    (Stage.GENERATING, DECODE, KILLED),
]


def prompts(number):
    draw = random.Random(19)
    return [
        Prompt(
            domain="random",
            tokens=tuple(draw.randrange(256) for _ in range(NUM_PROMPT + one)),
            max_tokens=NUM_TOKENS,
        )
        for one in range(number)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory):
    """Two prefill and two decode ranks, each of which holds all experts, and prompts to ask."""
    warm_up()
    model = ReferenceModel.load(packaged_checkpoint())
    answers = model.answer(prompts(len(CASES) + NUM_SPARE))
    folder = tmp_path_factory.mktemp("handover")
    async with (
        Arena(folder, ground=Ground.POOLS, answers=answers) as arena,
        arena.clients.resting(),
    ):
        yield arena, iter(answers)


@asynccontextmanager
async def handover_at(fleet, stage):
    """A handover that waits at a stage: the fleet, its gate, and the task that gets its answer."""
    arena, prompts_ = fleet
    await arena.until(whole, bound_s=BOUND_S)
    with arena.gate(stage) as gate:
        reached = asyncio.create_task(gate.reached.wait())
        while not reached.done():  # A gateway that has just started may not know both pools yet.
            asking = asyncio.create_task(arena.clients.ask(next(prompts_)))
            async with asyncio.timeout(BOUND_S):
                await asyncio.wait({asking, reached}, return_when=asyncio.FIRST_COMPLETED)
        yield arena, gate, asking
    await asyncio.wait([asking])
    await arena.until(whole, bound_s=BOUND_S)
    await arena.until_unused(bound_s=BOUND_S)


def assert_right(answer):
    assert (answer.rejection, answer.breakage) == ("", "")
    assert answer.tokens == answer.expected


@pytest.mark.parametrize(("stage", "of_prefill", "how"), CASES)
async def test_a_rank_that_fails_at_a_stage_costs_no_token(fleet, stage, of_prefill, how):
    async with handover_at(fleet, stage) as (arena, gate, asking):
        victim = gate.ranks[of_prefill]
        if how is HANGS:
            os.kill(arena.fleet.pid(victim), HANGS)
        else:
            stopping = asyncio.create_task(arena.fleet.stop(victim, with_signal=how))
            if how is KILLED:
                await stopping
        gate.opened.set()
        assert_right(await asking)
        if how is HANGS:
            os.kill(arena.fleet.pid(victim), signal.SIGCONT)
        else:
            await stopping
            await arena.start(victim)


@pytest.mark.parametrize("of_prefill", [PREFILL, DECODE])
async def test_a_pool_that_forms_a_new_epoch_amid_a_fetch_costs_no_token(fleet, of_prefill):
    async with handover_at(fleet, Stage.FETCHING) as (arena, gate, asking):
        peer = gate.peer(of_prefill=of_prefill)
        await arena.fleet.stop(peer, with_signal=KILLED)
        gate.opened.set()
        assert_right(await asking)
        await arena.start(peer)


@pytest.mark.parametrize(
    "stage", [Stage.PREFILL_ASKED, Stage.FIRST_TOKEN, Stage.FETCHING, Stage.GENERATING]
)
async def test_a_client_that_leaves_leaves_nothing_behind(fleet, stage):
    async with handover_at(fleet, stage) as (_, gate, asking):
        asking.cancel()
        await asyncio.wait([asking])
        gate.opened.set()


async def test_a_gateway_that_dies_amid_a_fetch_leaves_nothing_behind(fleet):
    async with handover_at(fleet, Stage.FETCHING) as (arena, gate, asking):
        await arena.fleet.stop("gateway", with_signal=KILLED)
        gate.opened.set()
        assert (await asking).breakage
        await arena.start("gateway")


async def test_blocks_that_are_damaged_on_the_way_are_computed_again(fleet):
    async with handover_at(fleet, Stage.FETCH_ASKED) as (arena, gate, asking):
        num_before = arena.num_latents
        for relay in arena.relays.values():
            relay.weather.latents_corrupted = 1.0
        gate.opened.set()
        assert_right(await asking)
        assert arena.num_latents > num_before
        for relay in arena.relays.values():
            relay.clear()
