"""A prefill pool and a decode pool of real processes answer as one pool, and latents travel."""

import asyncio
import signal
from types import SimpleNamespace

import httpx2
import pytest
import pytest_asyncio

from equipoise.cli.demo.fleet import free_address
from equipoise.planning.warm_up import warm_up
from tests.support.forked_commands import ForkedFleet
from tests.support.scrapes import scrape, value_of

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BOUND_S = 200.0
B = 16
TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\nprint("
NUM_TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    """A balancer, a worker of each pool, a gateway over both and one over the first alone."""
    warm_up()  # Compiling the planner may take longer than the processes may.
    folder = tmp_path_factory.mktemp("two_pools")
    balancer, both, alone = (free_address("127.0.0.1:0") for _ in range(3))
    metrics = {pool: free_address("127.0.0.1:0") for pool in ("prefill", "decode", "gateway")}
    async with ForkedFleet(folder) as fleet:
        store = f"--store={folder / 'state.sqlite'}"
        await fleet.start("balancer", ["balancer", f"--listen={balancer}", store])
        for pool, peer in (("prefill", "decode"), ("decode", "prefill")):
            await fleet.start(
                pool,
                [
                    "worker", f"--balancer={balancer}", f"--worker={pool}-0", f"--pool={pool}",
                    f"--phase={pool}", f"--peer-pools={peer}", "--num-ranks=1",
                    "--slots-per-rank=32", f"--metrics-listen={metrics[pool]}",
                ],
            )  # fmt: skip
        measured = f"--metrics-listen={metrics['gateway']}"
        for name, listen, options in (
            ("both", both, ["--pool=decode", "--prefill-pool=prefill", measured]),
            ("alone", alone, ["--pool=prefill"]),
        ):
            await fleet.start(
                name, ["gateway", f"--listen={listen}", f"--balancer={balancer}", *options]
            )
        async with (
            httpx2.AsyncClient(base_url=f"http://{both}", timeout=BOUND_S) as two,
            httpx2.AsyncClient(base_url=f"http://{alone}", timeout=BOUND_S) as one,
        ):
            rig = SimpleNamespace(fleet=fleet, two=two, one=one, metrics=metrics)
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
        while not await handed_over(rig):
            await rig.two.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 2})
            await asyncio.sleep(0.2)


async def handed_over(rig):
    families = await scrape(rig.metrics["gateway"])
    return value_of(families, "equipoise_gateway_handovers_total")


async def counters(rig):
    decode = await scrape(rig.metrics["decode"])

    def value(name, **labels):
        return value_of(decode, f"equipoise_worker_{name}_total", **labels)

    return {
        "processed": value("tokens", kind="processed"),
        "bytes": value("latent_bytes", direction="in"),
        "missing": value("prompt_tokens_read", why="missing"),
        "own": value("prompt_tokens_read", why="own"),
    }


async def answer(client, body):
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    # What was cached depends on the requests before it.
    found["usage"].pop("prompt_tokens_details", None)
    return found["choices"], found["usage"]


async def test_one_prompt_is_read_once_and_its_latents_travel(rig):
    for number, length in enumerate((B, B + 1, 3 * B, 70)):
        body = {
            "prompt": f"{number}{TEXT}"[:length], "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "logprobs": 2, "return_token_ids": True,
        }  # fmt: skip
        before = await counters(rig)
        found = await answer(rig.two, body)
        after = await counters(rig)
        num_prompt = found[1]["prompt_tokens"]
        grown = {name: after[name] - before[name] for name in after}
        per_token = grown.pop("bytes") / (B * (num_prompt // B))
        assert per_token == 1600, "float32 latents of the tiny model"
        assert grown == {
            "processed": num_prompt % B + NUM_TOKENS - 1,
            "missing": 0,
            "own": 0,
        }
        assert found == await answer(rig.one, body)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.4},
        {"temperature": 1.0, "seed": 5, "n": 2},
        {"temperature": 0, "max_tokens": 1},
    ],
)
@pytest.mark.parametrize("length", [1, B - 1, 40])
async def test_every_kind_of_request_is_answered_as_by_one_pool(rig, options, length):
    body = {"prompt": TEXT[-length:], "max_tokens": NUM_TOKENS, "return_token_ids": True, **options}
    assert await answer(rig.two, body) == await answer(rig.one, body)


async def test_a_stop_string_over_the_boundary_ends_the_answer_alike(rig):
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    ((whole,), _) = await answer(rig.one, body)
    # It begins with the first token, which the prefill pool generates.
    for stop in (whole["text"][:1], whole["text"][:2], whole["text"][1:3]):
        stopped = {**body, "stop": stop}
        (choices, usage) = await answer(rig.two, stopped)
        assert (choices, usage) == await answer(rig.one, stopped)
        assert choices[0]["finish_reason"] == "stop"


async def test_without_the_prefill_pool_decode_ranks_read_prompts_and_nothing_fails(rig):
    body = {"prompt": f"again {TEXT}", "max_tokens": NUM_TOKENS, "temperature": 0}
    expected = await answer(rig.one, body)
    before = await counters(rig)
    await rig.fleet.stop("prefill", with_signal=signal.SIGKILL)
    assert await answer(rig.two, body) == expected
    after = await counters(rig)
    assert after["own"] > before["own"]
    families = await scrape(rig.metrics["gateway"])
    assert value_of(families, "equipoise_gateway_direct_total", reason="no_prefill") >= 1
