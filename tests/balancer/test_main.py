"""The balancer as a process: how it stops, and its error if it cannot start."""

import gc
import signal
import socket
import subprocess
import sys

import pytest
from redis import Redis

from equipoise.balancer.__main__ import run
from equipoise.balancer.leadership.lease import LeaseTiming
from equipoise.balancer.settings import BalancerSettings, LeaseKind
from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.settings import Tls
from tests.support.redis_server import RedisServer, free_port, require_redis

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
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert "stopping; workers keep serving" in said


def test_after_a_used_port_of_the_metrics_nothing_is_left_to_complain(tmp_path, capfd):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        address = f"127.0.0.1:{used.getsockname()[1]}"
        settings = BalancerSettings(
            listen="127.0.0.1:0",
            store=str(tmp_path / "state.sqlite"),
            metrics=MetricsPort(metrics_listen=address),
        )
        assert run(settings) == 1
    gc.collect()
    said = capfd.readouterr().err
    assert f"cannot serve metrics on {address}" in said
    assert "Traceback" not in said


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


@pytest.mark.parametrize("drain_timeout_s", [-1.0, 61.0, float("nan")])
def test_the_grace_of_a_stop_is_bounded(drain_timeout_s):
    with pytest.raises(InvalidSettingsError, match="drain_timeout_s must be from 0 to 60"):
        BalancerSettings(drain_timeout_s=drain_timeout_s)


WAITING = START.replace("sys.argv[1])", "sys.argv[1], store_wait_s=60.0)")


def test_a_redis_that_waits_for_its_replicas_is_waited_for(tmp_path):
    require_redis()
    with (
        RedisServer(tmp_path, options={"min-replicas-to-write": 1}) as server,
        subprocess.Popen(
            [sys.executable, "-c", WAITING, server.url], stderr=subprocess.PIPE, text=True
        ) as started,
    ):
        try:
            said = next(line for line in started.stderr if "waiting for the store" in line)
            assert "accepts no writes without its replicas" in said
            with Redis.from_url(server.url) as client:
                client.config_set("min-replicas-to-write", 0)
            assert any("listening on" in line for line in started.stderr)
        finally:
            started.kill()


def test_a_redis_that_starts_later_is_waited_for(tmp_path):
    require_redis()
    server = RedisServer(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, server.url], stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            said = next(line for line in started.stderr if "waiting for the store" in line)
            assert "cannot be reached" in said
            with server:
                assert any("listening on" in line for line in started.stderr)
                started.send_signal(signal.SIGTERM)
                started.communicate(timeout=120)
                assert started.returncode == 0
        finally:
            started.kill()


def test_a_redis_that_is_not_there_is_one_line_and_exit_status_1(capsys):
    store = f"redis://127.0.0.1:{free_port()}/0"
    assert run(BalancerSettings(listen="127.0.0.1:0", store=store)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"equipoise balancer: {store} cannot be reached: check that it is running"
    )


def test_a_wrong_password_is_one_line_without_the_password(tmp_path, capsys):
    require_redis()
    with RedisServer(tmp_path / "redis", password="open-sesame") as server:
        path = tmp_path / "password"
        path.write_text("open-barley\n")
        store = f"redis://127.0.0.1:{server.port}/0"
        settings = BalancerSettings(
            listen="127.0.0.1:0", store=store, store_password_file=str(path)
        )
        assert run(settings) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "rejects the credentials: check user and password" in line
    assert "barley" not in line


@pytest.mark.parametrize(
    "store",
    [
        "redis://:open-sesame@r:6379/0",
        "rediss://user:open-sesame@r/0",
        "redis://:open-sesame/with/slashes@r/0",
        "redis://:open-sesame@with@signs@r/0",
        "redis://r:6379/0?password=open-sesame",
    ],
)
def test_a_password_in_the_command_line_is_rejected_and_not_repeated(store):
    with pytest.raises(InvalidSettingsError, match="set store_password_file") as caught:
        BalancerSettings(store=store)
    assert "sesame" not in str(caught.value)


def test_a_user_in_the_command_line_is_no_secret():
    assert BalancerSettings(store="redis://balancer@r:6379/0").is_shared


def test_a_cluster_that_is_not_there_is_one_line_and_exit_status_1(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none")
    )
    settings = BalancerSettings(store="redis://127.0.0.1:1/0", lease=LeaseKind.KUBERNETES)
    assert run(settings) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("equipoise balancer: no Kubernetes cluster is configured")


def test_a_missing_kubernetes_client_is_named_with_the_command_that_installs_it(
    capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "equipoise.balancer.leadership.kubernetes_register", None)
    settings = BalancerSettings(store="redis://127.0.0.1:1/0", lease=LeaseKind.KUBERNETES)
    assert run(settings) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("run pip install '.[kubernetes]' in a checkout")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"store": ""}, "store must be a file or redis://"),
        ({"advertise": "here"}, "advertise must be host:port"),
        (
            {"store": "redis://r/0", "listen": "0.0.0.0:7070", "tls": Tls(insecure=True)},
            "advertise must be set",
        ),
        ({"store_password_file": "password"}, "store_password_file is for a Redis store"),
        ({"lease": LeaseKind.KUBERNETES}, "needs a shared store"),
        ({"lease_duration_s": 0.5}, "lease_duration_s must be from 1 to 60"),
        ({"lease_duration_s": float("nan")}, "lease_duration_s must be from 1 to 60"),
    ],
)
def test_settings_that_could_not_work_are_rejected_with_the_range(wrong, words):
    with pytest.raises(InvalidSettingsError, match=words):
        BalancerSettings(**wrong)


def test_every_duration_of_a_lease_that_may_be_chosen_is_safe():
    for duration_s in (1.0, 3.0, 7.7, 60.0):
        timing = LeaseTiming.lasting(BalancerSettings(lease_duration_s=duration_s).lease_duration_s)
        assert timing.duration_s == duration_s
    assert LeaseTiming.lasting(3.0) == LeaseTiming()
