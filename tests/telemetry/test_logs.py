"""JSON and text logs."""

import asyncio
import io
import json
import logging
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.logs import MOST_CAUSES, Causes, LogFormat, about, configure_logs
from equipoise.telemetry.metrics_settings import MetricsPort


@contextmanager
def logging_anew():
    """The root logger as in a process that has just started."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_a_json_line_has_the_fields_of_its_context_and_call():
    stream = io.StringIO()
    with logging_anew():
        configure_logs(LogFormat.JSON, context=lambda: {"pool": "tiny", "rank": 3}, stream=stream)
        logging.getLogger("equipoise.test").info(
            "generation %d is staged", 7, extra=about(generation=7, epoch=None)
        )
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "equipoise.test",
        "message": "generation 7 is staged",
        "pool": "tiny",
        "rank": 3,
        "generation": 7,
    }


def test_a_traceback_stays_on_its_line():
    stream = io.StringIO()
    with logging_anew():
        configure_logs(LogFormat.JSON, stream=stream)
        error = ValueError("two\nlines")
        logging.getLogger("equipoise.test").error("it failed", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


def test_text_lines_are_human_readable():
    stream = io.StringIO()
    with logging_anew():
        configure_logs(LogFormat.TEXT, stream=stream)
        logging.getLogger("equipoise.test").warning("look", extra=about(pool="tiny"))
    assert stream.getvalue().endswith(" WARNING equipoise.test: look\n")


async def test_malformed_requests_are_logged_rarely():
    stream = io.StringIO()
    with logging_anew():
        configure_logs(LogFormat.TEXT, stream=stream)
        async with asyncio.timeout(60), metrics_at(MetricsPort(metrics_listen="127.0.0.1:0")) as at:
            host, _, port = at.rpartition(":")
            for _ in range(5):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"no request\r\n\r\n")
                assert b"400 Bad Request" in await reader.read()
                writer.close()
    lines = [line for line in stream.getvalue().splitlines() if "Invalid HTTP request" in line]
    assert [line.rpartition("(")[2] for line in lines] == [f"{n} so far)" for n in (1, 2, 4)]


def test_a_new_cause_is_logged_however_many_there_were_and_the_oldest_is_forgotten():
    causes = Causes()
    assert [causes.count(f"cause {number}") for number in range(MOST_CAUSES)] == [1] * MOST_CAUSES
    assert causes.count("cause 0") == 2
    assert causes.count("a new one") == 1
    assert causes.count("cause 0") == 0  # The third, which is not worth a line.
    assert causes.count("cause 2") == 2
    assert causes.count("cause 1") == 1  # The one not seen for longest made room.


def test_a_balancer_with_json_logs_writes_nothing_else(tmp_path):
    command = [sys.executable, "-m", "equipoise.cli.main", "balancer", "--log-format", "json"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--listen", address, "--store", str(tmp_path / "state.sqlite")]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    *lines, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert last.startswith(f"equipoise balancer: cannot listen on {address}")
    assert all(json.loads(line)["message"] for line in lines)


FORGED = "it died\n2026-01-01 00:00:00,000 ERROR equipoise.balancer: all is lost\u2028\x1b[2J\u202e"


@pytest.mark.parametrize("log_format", LogFormat)
def test_no_message_or_traceback_forges_a_line(log_format):
    stream = io.StringIO()
    with logging_anew():
        configure_logs(log_format, stream=stream)
        logging.getLogger("equipoise.test").error("peer: %s", FORGED)
        logging.getLogger("equipoise.test").error("failed", exc_info=ValueError(FORGED))
    assert all(mark not in stream.getvalue() for mark in ("\x1b", "\u2028", "\u202e"))
    starts = [line for line in stream.getvalue().split("\n") if line.startswith(("{", "20"))]
    assert len(starts) == 2
    if log_format is LogFormat.TEXT:
        assert "peer: it died\\n2026" in starts[0]
    else:
        assert json.loads(starts[0])["message"] == f"peer: {FORGED}"
