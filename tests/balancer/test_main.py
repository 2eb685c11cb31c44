"""The balancer as a process: how it ends, and what it says when it cannot start."""

import signal
import socket
import subprocess
import sys

import pytest

from equipoise.balancer.__main__ import run
from equipoise.balancer.settings import BalancerSettings, InvalidSettingsError

START = """
import sys
from equipoise.balancer.__main__ import run
from equipoise.balancer.settings import BalancerSettings
sys.exit(run(BalancerSettings(listen="127.0.0.1:0", store=sys.argv[1])))
"""


@pytest.fixture
def process(tmp_path):
    """A balancer that is listening."""
    with subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path / "state.sqlite")],
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            for line in started.stderr:
                if "listening on 127.0.0.1:" in line:
                    break
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(process, number):
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert "stopping; workers serve on" in said


def test_a_used_port_is_one_line_and_exit_status_1(tmp_path, capfd):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        address = f"127.0.0.1:{used.getsockname()[1]}"
        assert run(BalancerSettings(listen=address, store=str(tmp_path / "state.sqlite"))) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"equipoise balancer: cannot listen on {address}: Address already in use"
    )


def test_a_state_file_that_is_none_is_one_line_and_exit_status_1(tmp_path, capsys):
    path = tmp_path / "state.sqlite"
    path.write_text("this is a diary\n" * 1000)
    assert run(BalancerSettings(listen="127.0.0.1:0", store=str(path))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_state_file_in_no_folder_is_one_line_and_exit_status_1(tmp_path, capsys):
    path = tmp_path / "nowhere" / "state.sqlite"
    assert run(BalancerSettings(listen="127.0.0.1:0", store=str(path))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


@pytest.mark.parametrize("listen", ["", "7070", ":7070", "host:", "host:x", "host:70000"])
def test_listen_must_be_a_host_and_a_port(listen):
    with pytest.raises(InvalidSettingsError, match="listen must be host:port"):
        BalancerSettings(listen=listen)


@pytest.mark.parametrize("stop_grace_s", [-1.0, 61.0, float("nan")])
def test_the_grace_of_a_stop_is_bounded(stop_grace_s):
    with pytest.raises(InvalidSettingsError, match="stop_grace_s must be from 0 to 60"):
        BalancerSettings(stop_grace_s=stop_grace_s)
