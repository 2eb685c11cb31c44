"""Ranks are killed under structured output, drafts and scored prompts: no client notices."""

import asyncio
import json
import random
import re
import signal

import jsonschema
import pytest

from tests.support.json_schemas import random_regex, random_schema
from tests.support.serving_fleet import BOUND_S, serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

MAX_TOKENS = 120


def structured(number, dice):
    """A request whose output must match, and a check of a text.

    Every sixth has a regex and the others have a schema; half of each are sampled.
    """
    body = {
        "prompt": f"value {number} = ", "max_tokens": MAX_TOKENS, "temperature": number // 6 % 2,
        "seed": number, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    if number % 6 == 0:
        pattern = random_regex(dice)
        return {**body, "guided_regex": pattern}, lambda text: re.fullmatch(pattern, text)
    # The tiny model would fill its tokens with white space, where JSON may have it.
    schema = random_schema(dice) | {"x-guidance": {"whitespace_pattern": " ?"}}
    validator = jsonschema.Draft202012Validator(schema)
    return {**body, "guided_json": schema}, lambda text: validator.is_valid(json.loads(text))


def drafted(number):
    """Greedy Python code, whose drafts are usually right."""
    return {
        "prompt": f"def f{number}(self, x):\n    return ", "max_tokens": 64, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip


def scored(number):
    """A prompt whose tokens are scored, as lm-eval asks for it."""
    text = f"# number {number}\n" + "for index in range(10):\n    print(index)\n" * 10
    return {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}


class Clients:
    """Clients of a running fleet, and how many of their streams have begun."""

    def __init__(self, running):
        self._client = running.client
        self._num_begun = 0
        self._changed = asyncio.Condition()

    async def begun(self, count):
        """Wait until so many streams have begun."""
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: self._num_begun >= count)

    async def ask(self, body):
        """The whole answer: text, tokens and finish, or text and logprobs."""
        if not body.get("stream"):
            answer = await self._client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            return choice["text"], choice["logprobs"]["token_logprobs"]
        text, tokens, finish, is_done = "", (), None, False
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                is_done |= line == "data: [DONE]"
                if line and not is_done:
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    if not tokens and choice["token_ids"]:
                        async with self._changed:
                            self._num_begun += 1
                            self._changed.notify_all()
                    text, tokens = text + choice["text"], (*tokens, *choice["token_ids"])
                    finish = choice["finish_reason"] or finish
        assert is_done, "the stream has no end"
        return text, tokens, finish

    async def ask_all(self, bodies, *, at_a_time=32):
        turns = asyncio.Semaphore(at_a_time)

        async def in_turn(body):
            async with turns:
                return await self.ask(body)

        return await asyncio.gather(*(in_turn(body) for body in bodies))


def broken(running):
    """The tokens that requests had, and asked for, when the gateway lost their rank."""
    log = running.fleet.log_path("gateway").read_text()
    return [(int(had), int(of)) for had, of in re.findall(r"failed after (\d+) of (\d+)", log)]


async def kill(running, name, *, num_left):
    await running.fleet.stop(name, with_signal=signal.SIGKILL)
    await running.until_serving(num_left)


async def test_no_client_notices_a_rank_killed_under_masks_drafts_and_scored_prompts(tmp_path):
    dice = random.Random(7)
    structures = [structured(number, dice) for number in range(12)]
    bodies = [body for body, _ in structures]
    few = [drafted(0), drafted(1), *bodies[:4]]
    many = [*bodies, *(scored(number) for number in range(16))]
    options = ("--speculate=1", "--context-length=512", "--max-step-tokens=32")
    async with serving(tmp_path, *options, num_ranks=3) as running:
        undisturbed = await Clients(running).ask_all([*few, *many])
        texts = undisturbed[len(few) :][: len(structures)]
        for (body, matches), (text, _, finish) in zip(structures, texts, strict=True):
            assert finish == "length" or matches(text), (body, text)
        assert sum(finish == "stop" for _, _, finish in texts) >= 8
        await running.feed.until(
            lambda status: any(rank.drafts_accepted for rank in status.ranks), timeout_s=BOUND_S
        )
        # Ranks draft while few requests are active.
        clients = Clients(running)
        asked = asyncio.create_task(clients.ask_all(few))
        await clients.begun(len(few) - 1)
        await kill(running, "worker-2", num_left=2)
        assert await asked == undisturbed[: len(few)]
        num_broken = len(broken(running))
        clients = Clients(running)
        asked = asyncio.create_task(clients.ask_all(many))
        await clients.begun(len(structures) // 2)
        await kill(running, "worker-1", num_left=1)
        assert await asked == undisturbed[len(few) :]
    breaks = broken(running)
    print(f"requests whose rank was killed, tokens had and asked for: {breaks}")
    assert num_broken > 0
    assert any(had and of == MAX_TOKENS for had, of in breaks[num_broken:]), "under masks"
    assert any(of == 1 for _, of in breaks[num_broken:]), "under scored prompts"


async def test_a_request_under_which_three_ranks_die_is_rejected_and_the_status_counts_it(tmp_path):
    """Steps take long, so that each rank is killed before it proves that the request runs."""
    body = {"prompt": "d", "max_tokens": 99, "ignore_eos": True}
    async with serving(tmp_path, "--pace-us-per-row=100000", num_ranks=4) as running:
        asked = asyncio.create_task(running.client.post("/v1/completions", json=body))
        for _ in range(3):
            status = await running.feed.until(
                lambda status: sum(rank.active_requests for rank in status.ranks) == 1,
                timeout_s=BOUND_S,
            )
            (name,) = [rank.worker for rank in status.ranks if rank.active_requests]
            await running.fleet.stop(name, with_signal=signal.SIGKILL)
            await running.feed.until(
                lambda status: name not in [rank.worker for rank in status.ranks],  # noqa: B023
                timeout_s=BOUND_S,
            )
        answer = await asked
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["code"] == "poison_request"
        status = await running.feed.until(
            lambda status: status.poison_requests > 0, timeout_s=BOUND_S
        )
        assert status.poison_requests == 1
        await running.until_serving(1)
        small = {**body, "max_tokens": 1}
        assert (await running.client.post("/v1/completions", json=small)).status_code == 200


@pytest.mark.parametrize("count", [48, pytest.param(1200, marks=pytest.mark.benchmark)])
@pytest.mark.timeout(3600)
async def test_schemas_and_regexes_match_while_ranks_are_killed(tmp_path, count):
    """Sampled and greedy, with drafts in every batch; a rank is killed, and comes back, twice."""
    dice = random.Random(23)
    structures = [structured(number, dice) for number in range(count)]
    options = ("--speculate=1", "--speculate-up-to=16", "--context-length=512")
    async with serving(tmp_path, *options) as running:
        clients = Clients(running)
        bodies = [body for body, _ in structures]
        asked = asyncio.create_task(clients.ask_all(bodies))
        for share in (0.3, 0.6):
            await unless_done(asked, clients.begun(int(share * count)))
            await kill(running, "worker-1", num_left=1)
            await running.start_worker("worker-1")
            await running.until_serving(2)
        answers = await asked
        status = await running.feed.until(
            lambda status: any(rank.drafts_accepted for rank in status.ranks), timeout_s=BOUND_S
        )
    num_ended = 0
    for (body, matches), (text, _, finish) in zip(structures, answers, strict=True):
        num_ended += finish == "stop"
        assert finish == "length" or matches(text), (body, text)
    print(
        f"{num_ended} of {count} outputs ended within {MAX_TOKENS} tokens, all valid; "
        f"{len(broken(running))} requests lost their rank; accepted drafts since the restart: "
        f"{sum(rank.drafts_accepted for rank in status.ranks)}"
    )
    assert num_ended >= 0.7 * count
    assert broken(running)


async def unless_done(task, wait):
    """Wait, and fail if the task fails first."""
    waiting = asyncio.ensure_future(wait)
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        waiting.cancel()
        task.result()
    await waiting
