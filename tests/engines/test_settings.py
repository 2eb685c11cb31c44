"""The settings of a plugin come from the environment; what is wrong is named by its variable."""

import re
from pathlib import Path

import pytest

from equipoise.engines.errors import UnsupportedEngineError, attempt
from equipoise.engines.port import PeerPort
from equipoise.engines.settings import VARIABLES, Mode, settings_from, with_variables

GUIDE = Path(__file__).parents[2] / "docs/engines.md"
WANTED = {
    "EQUIPOISE_BALANCER": "127.0.0.1:7070",
    "EQUIPOISE_POOL": "p",
    "EQUIPOISE_LISTEN": "127.0.0.1:0",
}


def test_settings_come_from_the_environment():
    changes = {
        "EQUIPOISE_MODE": "observe",
        "EQUIPOISE_WORKER": "w",
        "EQUIPOISE_TLS_TRUST_DOMAIN": "fleet",
    }
    settings = settings_from(WANTED | changes)
    assert (settings.pool, settings.mode, settings.worker) == ("p", Mode.OBSERVE, "w")
    assert settings.tls.tls_trust_domain == "fleet"
    assert not settings.tls.insecure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"EQUIPOISE_POOL": ""}, "set both"),
        ({"EQUIPOISE_BALANCER": ""}, "set both"),
        ({"EQUIPOISE_MODE": "dry"}, "set it to balance or observe"),
        ({"EQUIPOISE_MOD": "observe"}, "EQUIPOISE_MOD has no effect: did you mean EQUIPOISE_MODE?"),
        ({"EQUIPOISE_INSECURE": "please"}, "set it to 1 or unset it"),
        (
            {"EQUIPOISE_WORKER": "w\n"},
            "EQUIPOISE_WORKER is 'w.n': set it to 1 to 240 printable",
        ),
        ({"EQUIPOISE_POOL": " "}, "EQUIPOISE_POOL is ' ': set it to 1 to 240 bytes of printable"),
        ({"EQUIPOISE_ADVERTISE_HOST": "vm:80"}, "set it to a host name or an IP address"),
        ({"EQUIPOISE_ADVERTISE_HOST": "fe80::1"}, "an IPv6 one in brackets"),
        ({"EQUIPOISE_BALANCER": "nowhere"}, "EQUIPOISE_BALANCER"),
        ({"EQUIPOISE_LISTEN": "0.0.0.0:0"}, "other machines can reach"),
        (
            {"EQUIPOISE_BALANCER": "b:7070"},
            "add EQUIPOISE_TLS_CA to use TLS, or EQUIPOISE_INSECURE=1 if",
        ),
        ({"EQUIPOISE_TLS_CERT": "c"}, "EQUIPOISE_TLS_CERT and EQUIPOISE_TLS_KEY go together"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(UnsupportedEngineError, match=message):
        settings_from(WANTED | changes)


@pytest.mark.parametrize("host", ["vm-1.fleet", "10.0.0.1", "[fe80::1]"])
def test_a_host_may_be_a_name_or_an_address(host):
    settings_from(WANTED | {"EQUIPOISE_ADVERTISE_HOST": host})


@pytest.mark.parametrize("yes", ["1", "true", "True", "yes"])
def test_plain_text_is_allowed_in_the_words_of_the_command_line(yes):
    assert settings_from(WANTED | {"EQUIPOISE_INSECURE": yes}).tls.insecure


def test_an_empty_variable_is_like_one_that_is_not_set():
    empty = {f"EQUIPOISE_{name}": "" for name in VARIABLES}
    wanted = WANTED | {"EQUIPOISE_INSECURE": "1"}
    assert settings_from(empty | wanted) == settings_from(wanted)


def test_variables_of_other_programs_are_ignored():
    """Kubernetes adds some for a service; the command line and `make` have others."""
    others = ("BALANCER_PORT", "BALANCER_SERVICE_HOST", "ADDRESS", "KERNELS", "ENGINES")
    settings_from(WANTED | {f"EQUIPOISE_{name}": "x" for name in others} | {"MODE": "x"})


def test_the_guide_names_every_variable():
    table = GUIDE.read_text().partition("## Environment")[2]
    assert set(re.findall(r"`EQUIPOISE_(\w+)\b", table.partition("\n## ")[0])) == VARIABLES


@pytest.mark.parametrize("variable", ["SIGNING_KEY", "TLS_CA", "ACCEPTED_KEYS"])
def test_a_file_that_cannot_be_read_is_named_by_its_variable(variable, tmp_path):
    path = tmp_path / "tls_ca--key.pem"
    text = f"{variable.lower()} {path}: No such file or directory"
    assert with_variables(text) == f"EQUIPOISE_{variable} {path}: No such file or directory"


def test_an_unusable_key_leaves_the_engine_alone_by_name(caplog):
    settings = settings_from(WANTED | {"EQUIPOISE_SIGNING_KEY": "/nowhere/key"})
    assert attempt(lambda: PeerPort(settings)) is None
    assert "alone: EQUIPOISE_SIGNING_KEY /nowhere/key: No such file" in caplog.text


async def test_a_port_that_is_taken_is_named_with_the_remedy(unused_tcp_port):
    ports = [
        PeerPort(settings_from(WANTED | {"EQUIPOISE_LISTEN": f"127.0.0.1:{unused_tcp_port}"}))
        for _ in range(2)
    ]
    await ports[0].open("w-0")
    remedy = f"cannot listen on 127.0.0.1:{unused_tcp_port}: unset EQUIPOISE_LISTEN"
    with pytest.raises(UnsupportedEngineError, match=remedy):
        await ports[1].open("w-1")
    await ports[0].close()
