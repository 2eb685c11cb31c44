"""Every flag in the templates is an option of the program."""

import re
import subprocess
import sys

import pytest

from tests.support.helm_chart import CHART, FULL, READERS, TLS, WRITERS, containers, render

VARIANTS = [
    {},
    FULL,
    {
        "worker": {"topology": {"source": "podLabels"}},
        "redis": {"url": "redis://r:6379/0", "existingSecret": {"name": "redis"}},
    },
    TLS,
    {
        "worker": {
            "gpu": {"count": 1},
            "pullMiBPerSecond": 512,
            "sharedAsRouted": True,
            "sumsOnNodes": True,
        }
    },
    READERS | {"gateway": {"enabled": True}},
    WRITERS | {"balancer": {"enabled": True}},
]


OF_OTHERS = {
    # For commands of `kubectl exec` in a balancer's pod, which ask the balancer.
    "EQUIPOISE_ADDRESS",
    "EQUIPOISE_TLS_BALANCER_NAME",
    "EQUIPOISE_SIGNING_KEY",
}


@pytest.fixture(scope="module")
def options():
    """Options of a subcommand, as the program itself lists them."""
    found = {}

    def of(command):
        if command not in found:
            done = subprocess.run(
                [sys.executable, "-m", "equipoise.cli.main", command, "--help"],
                capture_output=True,
                text=True,
                env={"COLUMNS": "200", "PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)},
                check=True,
            )
            words = done.stdout.replace("]", " ").replace(";", " ").split()
            found[command] = {
                word for word in words if word.startswith(("--", "EQUIPOISE_", "OTEL_"))
            }
        return found[command]

    return of


@pytest.mark.parametrize(
    "values", VARIANTS, ids=["defaults", "full", "labels", "tls", "gpu", "prefill", "decode"]
)
def test_every_flag_of_the_chart_is_an_option_of_the_program(values, options):
    called = {}
    for name, container in containers(render(values)).items():
        if container["command"] == ["equipoise"]:
            subcommand, *arguments = container["args"]
            called.setdefault(subcommand, set())
            flags = {argument.partition("=")[0] for argument in arguments}
            assert flags <= options(subcommand), name
            assert _variables(container) <= options(subcommand) | OF_OTHERS, name
            called[subcommand] |= flags
    assert set(called) - {"handover"} == {"balancer", "worker", "gateway", "status"}


def _variables(container):
    """Environment variables that replace options."""
    names = {one["name"] for one in container["env"]}
    return {name for name in names if name.startswith(("EQUIPOISE_", "OTEL_"))}


def test_variables_in_arguments_are_set():
    for values in VARIANTS:
        for name, container in containers(render(values)).items():
            known = {variable["name"] for variable in container.get("env", [])}
            text = " ".join(container.get("args", []))
            used = {part.partition(")")[0] for part in text.split("$(")[1:]}
            assert used <= known, name


def test_a_value_in_seconds_has_the_words_of_its_option():
    templates = (path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    durations = r"--([a-z-]+)(?<!-per)-s=\{\{ \$?[\w.]*\.(\w+) \}\}"
    pairs = re.findall(durations, "".join(templates))
    assert len(pairs) >= 6
    for option, value in pairs:
        first, *rest = option.split("-")
        assert value == first + "".join(word.capitalize() for word in rest) + "Seconds"
