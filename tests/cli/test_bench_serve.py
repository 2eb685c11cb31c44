"""A server is measured from outside: requests, counts and the report."""

import asyncio
import json

import numpy as np
import pytest

from equipoise.cli.bench.clients import RequestResult
from equipoise.cli.bench.report import report
from equipoise.cli.bench.requests import TimedRequest, timed_requests
from equipoise.cli.bench.serve import run
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.settings.errors import InvalidSettingsError
from tests.support.scripted_ranks import Fault


def settings(**changes):
    return BenchServeSettings(**({"requests": 6, "warm_up": 2, "concurrency": 3} | changes))


def asked(count=400, stream=0, **changes):
    return timed_requests(settings(**changes), count=count, stream=stream)


def test_requests_depend_on_the_seed_only():
    assert asked(seed=3) == asked(seed=3)
    assert asked(seed=3) != asked(seed=4)
    warm_up = {one.prompt for one in asked(count=50, stream=1)}
    assert len(warm_up & {one.prompt for one in asked(count=50)}) < 10


def test_kinds_of_text_have_their_parts_and_lengths_their_ranges():
    requests = asked(mix=("code=3", "arithmetic=1"), output_length=("5", "9"))
    counts = {name: sum(one.domain == name for one in requests) for name in ("code", "arithmetic")}
    assert counts["code"] + counts["arithmetic"] == 400
    assert 250 < counts["code"] < 350
    assert {one.max_tokens for one in requests} == set(range(5, 10))
    assert all(48 <= len(one.prompt) <= 96 for one in requests)


def test_begins_are_a_poisson_process_of_the_rate_that_is_asked_for():
    assert {one.begins_s for one in asked()} == {0.0}
    gaps_s = np.diff([one.begins_s for one in asked(count=2000, request_rate=10)])
    assert 0.09 < gaps_s.mean() < 0.11
    # Exponential: the spread is as large as the mean.
    assert 0.9 < gaps_s.std() / gaps_s.mean() < 1.1


async def test_a_run_counts_every_request_and_draws_a_picture(server, capsys, tmp_path):
    server.rank.faults.extend([None, None, None, Fault(after=1)])
    picture = tmp_path / "latencies.svg"
    chosen = settings(url=server.url, json=True, plot=picture, output_length=("4",))
    assert await asyncio.to_thread(run, chosen) == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["requests"], made["failed"], made["output_tokens"]) == (6, 1, 20)
    assert list(made["failures"].values()) == [1]
    assert made["ttft"]["count"] == 5
    assert made["itl"]["count"] == 15
    assert made["settings"]["model"] == "tiny"
    assert len(server.rank.requests) == 8
    assert "inter-token latency, ms" in picture.read_text()


async def test_no_more_requests_are_open_than_may_be(server, capsys):
    most = 0

    async def watch():
        nonlocal most
        async with server.rank.changed:
            while True:
                most = max(most, server.rank.num_open)
                await server.rank.changed.wait()

    watching = asyncio.create_task(watch())
    assert await asyncio.to_thread(run, settings(url=server.url, requests=9)) == 0
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert most <= 3
    assert "9 of 9" in capsys.readouterr().out


def served(begin_s, chunks_s, end_s, failure=""):
    return RequestResult(
        request=TimedRequest(domain="code", prompt="a", max_tokens=3, begins_s=0.0),
        began_s=begin_s,
        ended_s=end_s,
        chunks_s=tuple(chunks_s),
        num_prompt_tokens=1,
        num_tokens=len(chunks_s),
        text="",
        failure=failure,
    )


def test_a_report_is_of_those_that_ended_well():
    made = report(
        [
            served(10.0, [10.5, 10.6, 10.8], 11.0),
            served(11.0, [11.1], 12.0),
            served(11.0, [11.2], 14.0, failure="it broke"),
        ]
    )
    assert (made.requests, made.failed, made.failures) == (3, 1, {"it broke": 1})
    assert made.duration_s == 4.0
    assert made.output_tokens_per_s == 1.0
    assert made.ttft.mean_ms == pytest.approx(300)
    assert (made.itl.count, made.itl.mean_ms) == (2, pytest.approx(150))
    assert made.e2e.p50_ms == pytest.approx(1000)


def test_a_report_of_failures_alone_has_no_latencies():
    made = report([served(0.0, [], 1.0, failure="it broke")])
    assert (made.failed, made.ttft.p50_ms, made.output_tokens_per_s) == (1, None, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "here"}, "--url must begin"),
        ({"requests": 0}, "requests must be from 1"),
        ({"request_rate": 0}, "request_rate must be above 0"),
        ({"request_rate": float("nan")}, "request_rate must be above 0"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"temperature": 3}, "temperature"),
        ({"mix": ("code=x",)}, "'x' is not a number"),
        ({"mix": ("code=-1",)}, "at least 0"),
        ({"mix": ("code=0",)}, "a weight above 0"),
        ({"input_length": ("9", "3")}, "smaller first"),
        ({"output_length": ("a",)}, "one number, or two"),
        ({"url": "http://127.0.0.1:1"}, "--url http://127.0.0.1:1"),
        ({"mix": ("poems",)}, "--mix poems: kinds of text are code, english, arithmetic"),
    ],
)
def test_invalid_settings_raise_one_sentence(changes, words, tmp_path):
    with pytest.raises(InvalidSettingsError, match=words):
        run(settings(**changes))
