"""Planted faults: each check finds its own, and nothing in a healthy run."""

import asyncio
import time
from dataclasses import replace

import pytest
from prometheus_client import Metric

from equipoise.cli.demo.traffic import Prompt
from tests.support.chaos.arena import in_use
from tests.support.chaos.checks import CHECKS, NEXT_TOKEN_BOUND_S, violations
from tests.support.chaos.clients import Clients
from tests.support.chaos.history import Answer, History, StepSeen

PROMPT = Prompt(domain="code", tokens=(1,), max_tokens=1)
WHOLE = Answer(prompt="code: def", tokens=(7, 8, 9), expected=(7, 8, 9), longest_wait_s=1.0)


def well() -> History:
    """A run in which everything held, a rejection and a broken epoch included."""
    return History(
        answers=[WHOLE, replace(WHOLE, tokens=(), rejection="the pool is down")],
        steps=[
            StepSeen(1, 5, 2, "worker-0"),
            StepSeen(1, 5, 2, "worker-1"),
            StepSeen(1, 6, 3, "worker-0"),
            StepSeen(2, 1, 2, "worker-0"),  # Another epoch counts its steps from 0.
            StepSeen(1, 6, 1, "worker-2", "writers"),  # And another pool its generations.
        ],
        layouts={("default", 2): {11}, ("default", 3): {12}, ("writers", 2): {12}},
    )


def test_a_healthy_run_violates_nothing():
    assert violations(well()) == []


PLANTED = {
    "a token differs": lambda history: history.answers.append(replace(WHOLE, tokens=(7, 9, 9))),
    "an accepted request was lost": lambda history: history.answers.append(
        replace(WHOLE, tokens=(7,), breakage="the stream ended")
    ),
    "two generations in one step": lambda history: history.steps.append(
        StepSeen(1, 6, 2, "worker-1")
    ),
    "a generation went back": lambda history: history.steps.append(StepSeen(1, 7, 2, "worker-0")),
    "a generation was reused": lambda history: history.layouts["default", 3].add(13),
    "a wait beyond its bound": lambda history: history.overdue.append("not whole within 60 s"),
    "an expert without a verified copy": lambda history: history.unverified.append("expert 3"),
    "a process died by itself": lambda history: history.died.append("worker-1 ended"),
}


def test_every_check_has_a_planted_fault():
    assert PLANTED.keys() == CHECKS.keys()


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found_and_named(what):
    history = well()
    PLANTED[what](history)
    assert [violation.what for violation in violations(history)] == [what]


def test_an_answer_that_is_too_short_is_a_loss():
    history = well()
    history.answers.append(replace(WHOLE, tokens=(7, 8)))
    (violation,) = violations(history)
    assert violation.message.endswith("2 of 3 tokens came")


def test_a_client_that_waited_too_long_was_not_served_in_time():
    history = well()
    history.answers.append(replace(WHOLE, longest_wait_s=NEXT_TOKEN_BOUND_S + 1))
    assert [violation.what for violation in violations(history)] == ["a wait beyond its bound"]


def metrics_of(**changes):
    family = Metric("equipoise_worker", "", "unknown")
    gauges = ("active_requests", "queued_requests", "held_tokens", "cache_used_ratio")
    values = {**dict.fromkeys(gauges, 0), "latent_holds_taken_total": 6, **changes}
    for name, value in values.items():
        family.add_sample(f"equipoise_worker_{name}", {}, value)
    for ended, count in (("fetched", 3), ("released", 2), ("expired", 1)):
        family.add_sample("equipoise_worker_latent_holds_total", {"ended": ended}, count)
    return {family.name: family}


def test_a_held_block_is_in_use_and_so_is_a_hold_without_blocks():
    assert in_use(metrics_of()) == ""
    assert in_use(metrics_of(cache_used_ratio=0.25)) == "cache_used_ratio 0.25"
    assert in_use(metrics_of(queued_requests=1)) == "queued_requests 1"
    assert in_use(metrics_of(latent_holds_taken_total=7)) == "open_holds 1"


async def test_clients_rest_once_their_requests_have_ended(monkeypatch):
    history, asked, answered = History(), asyncio.Event(), asyncio.Event()
    clients = Clients("nowhere", answers={PROMPT: ()}, history=history)

    async def ask(http, prompt):
        asked.set()
        await answered.wait()
        await asyncio.sleep(0.01)
        return WHOLE

    monkeypatch.setattr(clients, "_ask", ask)
    running = asyncio.create_task(clients.run(1))
    await asked.wait()
    asyncio.get_running_loop().call_later(0.2, answered.set)
    async with clients.resting():
        assert answered.is_set()
        asked.clear()
        await asyncio.sleep(0.3)
        assert not asked.is_set()
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_clients_that_receive_tokens_slowly_are_waited_for():
    history = History()
    clients = Clients("nowhere", answers={PROMPT: ()}, history=history)

    async def answer_slowly():
        for _ in range(25):
            await asyncio.sleep(0.1)
            history.token_times_s.append(time.monotonic())
        clients.num_whole += 1

    answering = asyncio.create_task(answer_slowly())
    await clients.until_whole(1, timeout_s=2.0)
    await answering
    with pytest.raises(TimeoutError):
        await clients.until_whole(1, timeout_s=0.3)
