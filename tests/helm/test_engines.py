"""The chart beside an engine's own pods, and the example of each engine."""

import re

import kubernetes_validate
import pytest
import yaml

from equipoise.engines import sglang, vllm
from equipoise.engines.settings import settings_from
from tests.support.helm_chart import ROOT, TLS, RenderError, render

KUBERNETES = "1.35"
EXAMPLES = ROOT / "helm" / "engines"
BOTH = pytest.mark.parametrize("engine", ["vllm", "sglang"])
SILENT = {"vllm": vllm.SILENT_PLANNER, "sglang": sglang.SILENT_PLANNER}


def values_of(engine):
    """The values that the example's comment installs the chart with."""
    text = (EXAMPLES / f"{engine}.yaml").read_text()
    values = {}
    for name, value in re.findall(r"([\w.]+)=([\w.]+)", re.search(r"--set (\S+)", text)[1]):
        at = values
        *sections, last = name.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = {"true": True, "false": False}.get(value, value)
    return values


def pod_of(engine):
    spec = yaml.safe_load((EXAMPLES / f"{engine}.yaml").read_text())["spec"]
    return spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]


def config_of(objects):
    (config,) = [
        one
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-engine")
    ]
    return config


@BOTH
def test_an_examples_pods_are_valid(engine):
    one = yaml.safe_load((EXAMPLES / f"{engine}.yaml").read_text())
    if one["kind"] == "Deployment":
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    pod = {"apiVersion": "v1", "kind": "Pod", **pod_of(engine)}
    kubernetes_validate.validate(pod | {"metadata": {"name": "p"}}, KUBERNETES, strict=True)


@BOTH
@pytest.mark.parametrize("trust", [{}, TLS], ids=["plain text", "certificates and tokens"])
def test_an_examples_pods_have_the_environment_that_the_plugin_needs(engine, trust):
    values = values_of(engine)
    assert values["worker"] == {"kind": "None", "engine": engine}
    objects = render({**trust, **values})
    config, (container,) = config_of(objects), pod_of(engine)["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
    own = {one["name"]: "10.0.0.1" for one in container["env"]}
    settings = settings_from(config["data"] | own)
    assert settings.pool == "deepseek"
    assert settings.balancer == "eq-equipoise-balancer.moe.svc:7070"
    assert (settings.worker, settings.node, settings.advertise_host) == ("10.0.0.1",) * 3
    assert settings.tls.is_mutual is bool(trust)
    assert bool(settings.signing_key) is bool(trust)
    assert bool(settings.accepted_keys) is bool(trust)


@BOTH
def test_the_certificates_and_names_of_an_examples_pods_are_those_of_the_chart(engine):
    objects = render({**TLS, **values_of(engine)})
    certificates = {
        one["spec"]["secretName"]: one["spec"] for one in objects if one["kind"] == "Certificate"
    }
    pod = pod_of(engine)["spec"]
    (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    data = config_of(objects)["data"]
    own = certificates[secret["secretName"]]
    assert own["uris"] == ["spiffe://cluster.local/equipoise/worker/deepseek/*"]
    assert data["EQUIPOISE_TLS_WORKER_NAME"] in own["dnsNames"]
    balancer = certificates["eq-equipoise-balancer-tls"]
    assert data["EQUIPOISE_TLS_BALANCER_NAME"] in balancer["dnsNames"]
    (mount,) = [
        one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "equipoise-tls"
    ]
    assert data["EQUIPOISE_TLS_CA"] == f"{mount['mountPath']}/ca.crt"


@BOTH
def test_the_network_policy_lets_an_examples_pods_reach_the_balancer(engine):
    labels = pod_of(engine)["metadata"]["labels"]
    (policy,) = [
        one
        for one in render(values_of(engine))
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-balancer")
    ]
    admitted = [one["podSelector"]["matchLabels"] for one in policy["spec"]["ingress"][0]["from"]]
    assert any(selector.items() <= labels.items() for selector in admitted)


@BOTH
def test_an_example_and_the_guide_silence_the_engines_own_planner(engine):
    wanted = SILENT[engine].replace(" R ", " 32 ").replace(": R,", ": 32,")
    (command,) = pod_of(engine)["spec"]["containers"][0]["args"]
    guide = (ROOT / "docs" / "engines.md").read_text()
    for text in (command, guide):
        assert wanted in re.sub(r" \\\n +", " ", text)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"worker": {"engine": "vllm"}}, "set worker.kind to None"),
        (
            {"worker": {"kind": "None", "engine": "vllm"}, "gateway": {"enabled": True}},
            "set gateway.enabled to false",
        ),
        ({"worker": {"engine": "tgi"}}, "/worker/engine"),
    ],
)
def test_an_engine_that_does_not_fit_the_other_values_is_rejected(values, remedy):
    with pytest.raises(RenderError, match=remedy):
        render({"gateway": {"enabled": False}, **values})


def test_a_release_without_an_engine_has_no_environment_for_one():
    names = [one["metadata"]["name"] for one in render({})]
    assert not any(name.endswith("-engine") for name in names)
