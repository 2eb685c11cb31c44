"""Clients that connect and say nothing disable neither a port nor its process."""

import asyncio
import gzip
import itertools
import logging
import resource
import subprocess
import sys
import time

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.routing import Route

from equipoise.telemetry import exposition
from equipoise.telemetry.exposition import (
    MAX_CONNECTIONS,
    metrics_at,
    metrics_route,
    registry_of,
    serving_http,
)
from equipoise.telemetry.logs import log_causes_once
from equipoise.telemetry.metrics_settings import MetricsPort
from tests.support.scrapes import scrape

WAIT_S = 60.0
PORT = MetricsPort(metrics_listen="127.0.0.1:0")
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


async def connected(address):
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(exposition, "HEADER_S", 0.2)
    async with asyncio.timeout(WAIT_S), metrics_at(PORT) as address:
        silent, writer = await connected(address)
        slow, slow_writer = await connected(address)
        slow_writer.write(b"GET /metrics HTTP/1.1\r\nHost:")
        assert await silent.read() == b""
        assert await slow.read() == b""
        writer.close()
        slow_writer.close()


async def test_idle_connections_are_limited_and_keep_no_scraper_out():
    async with asyncio.timeout(WAIT_S), metrics_at(PORT) as address:
        idle = [await connected(address) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(3):
            assert "process_resident_memory_bytes" in await scrape(address)
        ended = [reader for reader, _ in idle if reader.at_eof() or reader.exception()]
        assert len(idle) - len(ended) <= MAX_CONNECTIONS
        for _, writer in idle:
            writer.close()


async def test_clients_that_take_no_response_keep_no_scraper_out():
    async def never(_):
        await asyncio.Event().wait()

    routes = [Route("/endless", never), metrics_route(registry_of())]
    async with asyncio.timeout(WAIT_S), serving_http(routes, listen="127.0.0.1:0") as address:
        stuck = [await connected(address) for _ in range(2 * MAX_CONNECTIONS)]
        for _, writer in stuck:
            writer.write(b"GET /endless HTTP/1.1\r\nHost: here\r\n\r\n")
        for _ in range(3):
            assert "process_resident_memory_bytes" in await scrape(address)
        for _, writer in stuck:
            writer.close()


class Slow(Collector):
    """Takes a moment, and counts."""

    def __init__(self):
        self.num_scrapes = 0

    def collect(self):
        self.num_scrapes += 1
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        yield from ()


async def test_a_scraper_waits_for_few_renderings_however_many_clients_scrape():
    slow = Slow()
    async with asyncio.timeout(WAIT_S), metrics_at(PORT, slow) as address:
        others = [await connected(address) for _ in range(MAX_CONNECTIONS - 1)]
        for _, writer in others:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n" * 20)
        for _ in range(3):
            before = slow.num_scrapes
            assert "process_resident_memory_bytes" in await scrape(address)
            assert slow.num_scrapes - before <= 3
        for _, writer in others:
            writer.close()


async def test_a_scrape_shows_what_is_true_when_it_is_asked_for():
    class Counter(Collector):
        value = 0

        def collect(self):
            yield GaugeMetricFamily("number", "A number.", value=self.value)

    counter = Counter()
    async with metrics_at(PORT, counter) as address:
        for counter.value in range(5):
            assert (await scrape(address))["number"].samples[0].value == counter.value


@pytest.mark.parametrize(
    ("accept", "encoding", "kind", "is_gzip"),
    [
        ("", "", "text/plain; version=0.0.4; charset=utf-8", False),
        ("text/html,*/*", "br", "text/plain; version=0.0.4; charset=utf-8", False),
        (PROMETHEUS_ACCEPTS, "gzip", "application/openmetrics-text", True),
        ("text/plain;version=1.0.0", "gzip, br", "text/plain; version=0.0.4", True),
    ],
)
async def test_a_scraper_gets_a_format_that_it_accepts(accept, encoding, kind, is_gzip):
    request = f"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\nAccept: {accept}\r\n"
    request += f"Accept-Encoding: {encoding}\r\n\r\n"
    async with asyncio.timeout(WAIT_S), metrics_at(PORT) as address:
        reader, writer = await connected(address)
        writer.write(request.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert f"content-type: {kind}" in head.decode()
    assert (b"content-encoding: gzip" in head) is is_gzip
    text = (gzip.decompress(body) if is_gzip else body).decode()
    assert "equipoise_build_info{" in text
    assert text.endswith("# EOF\n") is ("openmetrics" in kind)


async def test_others_have_a_turn_between_two_scrapes():
    events = []

    class Recorded(Collector):
        def collect(self):
            events.append("scrape")
            yield from ()

    async def others():
        while True:
            events.append("other")
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_S), metrics_at(PORT, Recorded()) as address:
        reader, writer = await connected(address)
        events.clear()
        other = asyncio.create_task(others())
        request = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"
        writer.write(request + b"\r\n" + request + b"Connection: close\r\n\r\n")
        assert (await reader.read()).count(b"# TYPE process_resident_memory_bytes ") == 2
        writer.close()
        other.cancel()
    assert events.count("scrape") == 2
    assert ("scrape", "scrape") not in itertools.pairwise(events)


def test_the_soft_limit_on_open_files_is_raised():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 256:
        pytest.skip(f"the hard limit is {hard}")
    program = (
        "import resource\n"
        "from equipoise.telemetry.open_files import raise_open_files_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "raise_open_files_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


@pytest.mark.parametrize(
    "arguments",
    [
        ("balancer", "--listen=127.0.0.1:0", "--store=state.db"),
        ("gateway", "--listen=127.0.0.1:0", "--balancer=127.0.0.1:1"),
        ("worker", "--listen=127.0.0.1:0", "--balancer=127.0.0.1:1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_process_raises_its_own_limit(arguments, tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 256:
        pytest.skip(f"the hard limit is {hard}")
    command = [sys.executable, "-m", "equipoise.cli.main", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        # Its imports take longer than this call.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, hard))
        deadline = time.monotonic() + 2 * WAIT_S
        while resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == 256:
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "the limit stayed"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


async def test_an_error_of_the_loop_is_logged_once_per_cause_and_power_of_two(caplog):
    loop = asyncio.get_running_loop()
    log_causes_once(loop)
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            error = OSError(24, "Too many open files")
            message = "socket.accept() out of system resource"
            loop.call_exception_handler({"message": message, "exception": error})
        loop.call_exception_handler({"message": "another cause"})
    lines = [one for one in caplog.records if one.name == "equipoise.telemetry.logs"]
    assert len(lines) == 11
    assert [one for one in lines if one.exc_info] == lines[:1]
    assert lines[9].getMessage().endswith("Too many open files (512 so far)")
