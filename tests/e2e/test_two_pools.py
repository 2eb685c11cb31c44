"""A prefill pool and a decode pool of real processes answer as one pool, and latents travel.

The decode pool has the shared expert in slots, the prefill pool on every rank.
"""

import asyncio
import json
import random
import signal
from collections import Counter
from types import SimpleNamespace

import httpx2
import pytest
import pytest_asyncio

from equipoise.cli.demo.fleet import free_address
from equipoise.cli.handover.run import run as handover
from equipoise.cli.handover.settings import HandoverSettings
from equipoise.planning.warm_up import warm_up
from tests.support.forked_commands import ForkedFleet
from tests.support.scrapes import scrape, value_of

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BOUND_S = 200.0
B = 16
TOKEN_BYTES = 1600
"""Latents of the tiny model, in float32."""

CONTEXT, NUM_TOKENS = 256, 8
TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n" * 4
LENGTHS = (1, B - 1, B, B + 1, 3 * B, CONTEXT - NUM_TOKENS, CONTEXT - 1)
AT_ONCE = 4
KINDS = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 1},
    "penalties": {
        "temperature": 0.7, "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.4,
    },
    "two choices": {"temperature": 1.0, "seed": 5, "n": 2},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "grammar": {
        "temperature": 1.0, "seed": 9, "ignore_eos": False,
        "structured_outputs": {"regex": "[a-z]+"},
    },
    "biased": {
        "temperature": 1.0, "seed": 4, "ignore_eos": False, "stop_token_ids": [*range(32, 128)],
        "logit_bias": {"33": 4, "65": -100}, "min_tokens": 3,
    },
}  # fmt: skip


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[{"prefill": 2, "decode": 2}, {"prefill": 1, "decode": 3}],
    ids=["2+2", "1+3"],
)
async def rig(request, tmp_path_factory):
    """A balancer, the workers of each pool, a gateway over both and one over the first alone."""
    warm_up()  # Compiling the planner may take longer than the processes may.
    folder, num_ranks = tmp_path_factory.mktemp("two_pools"), request.param
    balancer, both, alone = (free_address("127.0.0.1:0") for _ in range(3))
    workers = {
        pool: {f"{pool}-{rank}": free_address("127.0.0.1:0") for rank in range(count)}
        for pool, count in num_ranks.items()
    }
    gateway = free_address("127.0.0.1:0")
    async with ForkedFleet(folder) as fleet:
        store = f"--store={folder / 'state.sqlite'}"
        await fleet.start("balancer", ["balancer", f"--listen={balancer}", store])
        for pool, peer, num_experts, options in (
            ("prefill", "decode", 32, []),
            ("decode", "prefill", 33, ["--shared-as-routed"]),
        ):
            slots = num_experts // num_ranks[pool] + 1
            for worker, metrics in workers[pool].items():
                await fleet.start(
                    worker,
                    [
                        "worker", f"--balancer={balancer}", f"--worker={worker}", f"--pool={pool}",
                        f"--phase={pool}", f"--peer-pools={peer}",
                        f"--num-ranks={num_ranks[pool]}", f"--slots-per-rank={slots}",
                        f"--context-length={CONTEXT}", "--step-timeout-s=30",
                        f"--metrics-listen={metrics}", *options,
                    ],
                )  # fmt: skip
        for name, listen, options in (
            (
                "both",
                both,
                ["--pool=decode", "--prefill-pool=prefill", "--metrics-listen", gateway],
            ),
            ("alone", alone, ["--pool=prefill"]),
        ):
            await fleet.start(
                name, ["gateway", f"--listen={listen}", f"--balancer={balancer}", *options]
            )
        async with (
            httpx2.AsyncClient(base_url=f"http://{both}", timeout=BOUND_S) as two,
            httpx2.AsyncClient(base_url=f"http://{alone}", timeout=BOUND_S) as one,
        ):
            rig = SimpleNamespace(fleet=fleet, two=two, one=one, workers=workers, gateway=gateway)
            await ready(rig)
            yield rig


async def ready(rig):
    """Wait until both pools serve and the gateway knows the prefill pool."""
    async with asyncio.timeout(BOUND_S):
        for client in (rig.one, rig.two):
            while True:
                try:
                    if (await client.get("/readyz")).status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.2)
        while not await of_gateway(rig, "handovers"):
            await rig.two.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 2})
            await asyncio.sleep(0.2)
    await all_ended(rig)


async def of_gateway(rig, name, **labels):
    return value_of(await scrape(rig.gateway), f"equipoise_gateway_{name}_total", **labels)


async def of_pool(rig, pool, name, **labels):
    """The sum of a metric over a pool's workers."""
    families = await asyncio.gather(*map(scrape, rig.workers[pool].values()))
    return sum(value_of(one, f"equipoise_worker_{name}", **labels) for one in families)


async def counters(rig):
    return Counter(
        processed=await of_pool(rig, "decode", "tokens_total", kind="processed"),
        bytes=await of_pool(rig, "decode", "latent_bytes_total", direction="in"),
        missing=await of_pool(rig, "decode", "prefilled_tokens_total", why="missing"),
        own=await of_pool(rig, "decode", "prefilled_tokens_total", why="own"),
        fetched=await of_pool(rig, "prefill", "latent_holds_total", ended="fetched"),
        expired=await of_pool(rig, "prefill", "latent_holds_total", ended="expired"),
        short=await of_gateway(rig, "direct", reason="short"),
    )


async def all_ended(rig):
    """Wait until no rank holds or uses a block."""
    async with asyncio.timeout(BOUND_S):
        while True:
            in_use = [
                await of_pool(rig, pool, name)
                for pool in rig.workers
                for name in ("held_tokens", "cache_used_ratio")
            ]
            if not any(in_use):
                break
            await asyncio.sleep(0.1)
    taken = await of_pool(rig, "prefill", "latent_holds_taken_total")
    ends = ("fetched", "released", "expired")
    ended = [await of_pool(rig, "prefill", "latent_holds_total", ended=end) for end in ends]
    assert taken == sum(ended) > 0


async def answer(client, body):
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    # What was cached depends on the requests before it.
    found["usage"].pop("prompt_tokens_details", None)
    return found["choices"], found["usage"]


async def answers(client, bodies):
    """Answers to several requests, a few at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(body):
        async with room:
            return await answer(client, body)

    return await asyncio.gather(*map(one, bodies))


def prompts(seed):
    """Prompts of all lengths, which no other seed's share a block with."""
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def bodies_of(kind, *, seed=None):
    """A request of a kind for each length, with as many tokens as fit and no early end."""
    bodies = [
        {
            "prompt": prompt, "max_tokens": min(NUM_TOKENS, CONTEXT - len(prompt)),
            "ignore_eos": True, "return_token_ids": True, **KINDS[kind],
        }
        for prompt in prompts(seed or kind)
    ]  # fmt: skip
    for body in bodies:
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return bodies


async def test_prompts_of_every_length_are_prefilled_once_and_their_latents_travel(rig):
    bodies = [body for kind in ("greedy", "sampled", "penalties") for body in bodies_of(kind)]
    before = await counters(rig)
    found = await answers(rig.two, bodies)
    await all_ended(rig)
    after = await counters(rig)
    expected = Counter()
    for body in bodies:
        num_prompt, num_tokens = len(body["prompt"]), body["max_tokens"]
        if num_prompt < B:
            expected += Counter(short=1, own=num_prompt)
        elif num_tokens > 1:  # A single token is the prefill rank's.
            expected += Counter(bytes=TOKEN_BYTES * (num_prompt // B * B), fetched=1)
        if num_prompt < B or num_tokens > 1:
            expected += Counter(processed=num_prompt % B + num_tokens - 1)
    assert after - before == expected
    assert found == await answers(rig.one, bodies)
    assert all(
        usage["completion_tokens"] == body["max_tokens"]
        for body, (_, usage) in zip(bodies, found, strict=True)
    )


async def test_a_command_sees_that_latents_are_handed_over(rig, capsys):
    def checked(client, **options):
        settings = HandoverSettings(url=str(client.base_url), json=True, **options)
        return handover(settings), json.loads(capsys.readouterr().out)

    for num_prompt in (3 * B, 3 * B + 5):
        expected = {"prompt_tokens": num_prompt, "handed_over_tokens": 3 * B}
        assert await asyncio.to_thread(checked, rig.two, prompt_tokens=num_prompt) == (0, expected)
    expected = {"prompt_tokens": CONTEXT // 2, "handed_over_tokens": None}
    assert await asyncio.to_thread(checked, rig.one) == (3, expected)


@pytest.mark.parametrize("kind", ["two choices", "echo", "grammar", "biased"])
async def test_answers_are_those_of_one_pool(rig, kind):
    bodies = bodies_of(kind)
    before = await counters(rig)
    assert await answers(rig.two, bodies) == await answers(rig.one, bodies)
    await all_ended(rig)
    after = await counters(rig)
    assert (after - before)["missing"] == 0


async def test_a_prompt_that_is_handed_over_counts_once_for_all_its_choices(rig):
    options = {"max_tokens": 4, "n": 3, "ignore_eos": True}
    first, second = (prompts(seed)[-2] for seed in ("counted whole", "counted in a stream"))
    num_full = len(first) // B * B
    whole = (await rig.two.post("/v1/completions", json=options | {"prompt": first})).json()
    options |= {"prompt": second, "stream": True, "stream_options": {"include_usage": True}}
    streamed = (await rig.two.post("/v1/completions", json=options)).text
    *_, last, _ = (part for part in streamed.split("\n\n") if part)
    for usage in (whole["usage"], json.loads(last.removeprefix("data: "))["usage"]):
        assert usage["prompt_tokens_details"]["handed_over_tokens"] == num_full
    await all_ended(rig)


async def test_a_rank_that_has_a_prompt_cached_prefills_only_the_tokens_after_its_blocks(rig):
    prompt = [*prompts("repeated")[LENGTHS.index(3 * B)], *range(5)]
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    before = await counters(rig)
    # More often than there are decode ranks, one after the other.
    found = [await answer(rig.two, body) for _ in range(5)]
    await all_ended(rig)
    counted = await counters(rig) - before
    num_direct = counted["short"]
    assert num_direct >= 5 - len(rig.workers["decode"])
    num_fetched = 5 - num_direct
    assert counted == Counter(
        short=num_direct,
        own=5 * num_direct,
        fetched=num_fetched,
        bytes=num_fetched * TOKEN_BYTES * 3 * B,
        processed=5 * (5 + NUM_TOKENS - 1),
    )
    assert found == 5 * [await answer(rig.one, body)]


async def test_a_stop_string_over_the_boundary_ends_the_answer_alike(rig):
    whole = [
        {"prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for text in (TEXT[:length] for length in LENGTHS[:-1])
    ]
    bodies = []
    for body, (choices, _) in zip(whole, await answers(rig.one, whole), strict=True):
        # It begins with the first token, which the prefill pool generates.
        part = (slice(1), slice(2), slice(1, 3))[len(bodies) % 3]
        bodies.append({**body, "stop": choices[0]["text"][part]})
    stopped = await answers(rig.two, bodies)
    assert stopped == await answers(rig.one, bodies)
    assert {choices[0]["finish_reason"] for choices, _ in stopped} == {"stop"}


async def test_without_the_prefill_pool_decode_ranks_prefill_prompts_and_nothing_fails(rig):
    bodies = bodies_of("greedy", seed="not cached yet")
    expected = await answers(rig.one, bodies)
    for worker in rig.workers["prefill"]:
        await rig.fleet.stop(worker, with_signal=signal.SIGKILL)
    own = await of_pool(rig, "decode", "prefilled_tokens_total", why="own")
    assert await answers(rig.two, bodies) == expected
    own = await of_pool(rig, "decode", "prefilled_tokens_total", why="own") - own
    assert own == sum(LENGTHS)
    assert await of_gateway(rig, "direct", reason="no_prefill") >= 1
