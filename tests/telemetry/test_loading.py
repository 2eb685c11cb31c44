"""Progress of loading: a bar on a terminal, otherwise lines with fields."""

import io
import logging

import pytest

from equipoise.telemetry.loading import LINES_EVERY_S, Loading
from equipoise.telemetry.logs import LogFormat

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines():
    """Runs a loading of ten MiB that takes a second per MiB; returns its lines."""
    said = []

    def run(**options):
        now = iter(range(1000))
        loading = Loading(
            stream=io.StringIO(),
            say=lambda line, *_: said.append(line),
            clock=lambda: next(now),
            **options,
        )
        with loading.of("experts") as progress:
            for done in range(1, 11):
                progress(done * MIB, 10 * MIB)
        return said

    return run


@pytest.mark.parametrize("log_format", LogFormat)
def test_without_a_terminal_there_are_periodic_lines_and_one_at_the_end(lines, log_format):
    assert LINES_EVERY_S == 5
    assert lines(log_format=log_format) == [
        "loading experts: 50 % of 10.0 MiB",
        "loaded experts: 10.0 MiB in 10.0 s",
    ]


def test_a_terminal_shows_a_bar_that_disappears(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal, said = Terminal(), []
    loading = Loading(stream=terminal, say=lambda *line: said.append(line))
    with loading.of("dense weights") as progress:
        progress(4 * MIB, 16 * MIB)
    shown = terminal.getvalue()
    assert "loading dense weights" in shown
    assert "25%" in shown
    assert "4.0/16.0 MiB" in shown
    assert shown.endswith("\x1b[2K")  # the line is wiped
    assert not said


def test_a_terminal_shows_no_bar_with_json_logs(monkeypatch, caplog):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with (
        caplog.at_level(logging.INFO),
        Loading(log_format=LogFormat.JSON, stream=terminal).of("experts") as progress,
    ):
        progress(3 * MIB, 3 * MIB)
    assert terminal.getvalue() == ""
    (record,) = caplog.records
    assert record.getMessage().startswith("loaded experts: 3.0 MiB in ")
    assert record.about == {"bytes_done": 3 * MIB, "bytes_total": 3 * MIB}
