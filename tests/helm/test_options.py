"""docs/options.md is current, and says what sets each option in the chart."""

import importlib.util
import re

import pytest
import yaml

from equipoise.planning.policy import Policy
from equipoise.policy.setting import SETTINGS
from equipoise.pool.counters import Timeouts
from equipoise.wire.messages import Wait
from tests.helm.test_flags import VARIANTS
from tests.support.helm_chart import CHART, ROOT, containers, render


@pytest.fixture(scope="module")
def reference():
    """helm/options_reference.py, which belongs to no package."""
    path = ROOT / "helm" / "options_reference.py"
    spec = importlib.util.spec_from_file_location("options_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(reference):
    assert reference.WRITTEN.read_text() == reference.page(), "python helm/options_reference.py"


def test_every_option_that_the_chart_sets_says_by_what(reference):
    unnamed = set()
    for values in VARIANTS:
        for container in containers(render(values)).values():
            if container["command"] == ["equipoise"] and container["args"][0] in reference.SERVERS:
                server, *arguments = container["args"]
                flags = {re.match("--(?:no-)?([a-z-]+)", one)[1] for one in arguments}
                unnamed |= {
                    (server, one) for one in flags if not reference.chart_value(one, server)
                }
    assert not unnamed


def test_every_chart_value_on_the_page_exists(reference):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = re.findall(r"^\| `--[^|]*\| ([^|]*) \|", reference.page(), re.MULTILINE)
    paths = {path for row in rows for path in re.findall("`([^`]+)`", row)}
    assert len(paths) > 40
    for path in paths:
        inner = values
        for name in path.split("."):
            inner = inner[name]


KUBERNETES = {
    "accepted-keys": "tokensExistingSecret",
    "api-keys": "apiKeysExistingSecret",
    "balancer": "externalAddress",
    "checkpoint": "checkpointPath",
    "listen": "port",
    "metrics-listen": "metricsPort",
    "metrics-token-file": "metricsTokenSecret",
    "node": "source",
    "num-ranks": "replicas",
    "signing-key": "tokensExistingSecret",
    "store": "redisUrl",
    "store-password-file": "redisExistingSecret",
    "tls-ca": "tls",
    "tls-cert": "tls",
    "tls-key": "tls",
    "zone": "source",
}
"""What a chart names otherwise: ports, replicas, Secrets in place of files, and where to look."""


def test_a_chart_value_has_the_words_of_its_option(reference):
    rows = re.findall(r"^\| `--([a-z-]+)`[^|]*\| [^|`]*`([^`|]+)`", reference.page(), re.MULTILINE)
    assert len(rows) > 60
    for option, path in rows:
        spelt = re.sub("-mib-per-s$", "-MiBPerSecond", option)
        words = re.sub("-s$", "-seconds", spelt).split("-")
        expected = words[0] + "".join(word[0].upper() + word[1:] for word in words[1:])
        steps = path.removesuffix(".enabled").split(".")
        if steps[0] in {"balancer", "worker", "gateway"}:
            steps = [one for one in steps[1:] if one != "topology"]
        value = steps[0] + "".join(step[0].upper() + step[1:] for step in steps[1:])
        assert value == KUBERNETES.get(option, expected), option


def test_a_wait_has_the_name_of_what_sets_its_timeout(reference):
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:balancer|worker) \| ([^|]*) \|", text, re.MULTILINE))
    waits = {one.name for one in Timeouts(Policy()).all()} | {str(one) for one in Wait}
    assert set(rows) == waits
    of_policy = {one.path for one in SETTINGS}
    for wait, source in rows.items():
        named = f"`timeouts.{wait}`" if f"timeouts.{wait}" in of_policy else None
        if f"`--{wait}-timeout-s`" in reference.page():
            named = f"`--{wait}-timeout-s`"
        assert source == named or (named is None and not source.startswith("`")), wait
