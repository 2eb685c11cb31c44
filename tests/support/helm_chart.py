"""The chart as tests see it: rendered by the real helm into the objects a cluster would get."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "equipoise"
FULL = {
    "balancer": {"replicas": 2},
    "redis": {"trial": {"enabled": True, "persistent": True}},
    "gateway": {
        "replicas": 2,
        "autoscaling": {"enabled": True},
        "model": "tiny",
        "apiKeys": {"existingSecret": {"name": "keys"}},
    },
    "worker": {
        "topology": {"source": "nodeLabels"},
        "gpu": {"count": 1},
        "rdma": {"resourceName": "rdma/ib"},
        "checkpoint": {
            "path": "/models/v3",
            "volume": {"persistentVolumeClaim": {"claimName": "model"}},
        },
    },
    "networkPolicy": {
        "clientFrom": [{"namespaceSelector": {}}],
        "metricsFrom": [{"namespaceSelector": {}}],
    },
}
"""Values that turn on as much as goes together."""

TLS = {
    "tls": {
        "enabled": True,
        "certManager": {"enabled": True, "issuerRef": {"name": "fleet", "kind": "ClusterIssuer"}},
    },
    "tokens": {"existingSecret": {"name": "tokens"}},
    "tracing": {"endpoint": "http://otel.observability.svc:4317"},
}
"""Values of a release that authenticates with certificates and tokens."""

READERS = {
    "pool": "readers",
    "phase": "prefill",
    "peerPools": ["writers", 'a: "b" # c'],
    "gateway": {"enabled": False},
}
"""Values of a release that reads prompts."""

WRITERS = {
    "pool": "writers",
    "phase": "decode",
    "peerPools": ["readers"],
    "prefillPool": "readers",
    "balancer": {"enabled": False, "externalAddress": "eq-equipoise-balancer.moe.svc:7070"},
}
"""Values of the release that generates for them."""


class RenderError(Exception):
    """Helm rejected; the message is its own."""


def helm():
    """The binary: $EQUIPOISE_HELM, that of `make helm`, PATH's, or the mini cluster's."""
    places = [
        os.environ.get("EQUIPOISE_HELM"),
        ROOT / ".cache" / "tools" / "helm",
        shutil.which("helm"),
        Path.home() / ".cache" / "minicluster" / "helm",
    ]
    for place in places:
        if place and Path(place).exists():
            return str(place)
    missing = "helm is not here: `make helm` fetches it, or name it in $EQUIPOISE_HELM"
    if os.environ.get("EQUIPOISE_REQUIRE_HELM"):
        pytest.fail(missing)
    pytest.skip(missing)
    return None


def render(values=None, *, release="eq", namespace="moe"):
    """The objects of a release with these values.

    Raises:
        RenderError: schema or templates reject them.
    """
    text = _rendered(json.dumps(values or {}), release, namespace)
    return [one for one in yaml.load_all(text, Loader=_Strict) if one]


class _Strict(yaml.CSafeLoader):
    """Rejects repeated keys, as a cluster does."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        assert not repeated, f"line {node.start_mark.line}: repeated keys {repeated}"
        return super().construct_mapping(node, deep)


def pod_specs(objects):
    """Every pod that the objects would start, by what starts it."""
    found = {}
    for one in objects:
        name = f"{one['kind']}/{one['metadata']['name']}"
        spec = one.get("spec", {})
        if one["kind"] == "Pod":
            found[name] = spec
        elif one["kind"] == "LeaderWorkerSet":
            found[name] = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        elif "template" in spec:
            found[name] = spec["template"]["spec"]
    return found


def containers(objects):
    """Every container, init containers too, by pod and name."""
    return {
        f"{pod}/{container['name']}": container
        for pod, spec in pod_specs(objects).items()
        for container in [*spec.get("initContainers", []), *spec["containers"]]
    }


def one_of(objects, kind, name):
    """The object of a kind with a name."""
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def helm_command(*arguments):
    """What helm prints."""
    done = subprocess.run(
        [helm(), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


@functools.cache
def _rendered(values, release, namespace):
    done = subprocess.run(
        [helm(), "template", release, CHART, "--namespace", namespace, "--values", "-"]
        + [f"--api-versions={one}" for one in ("monitoring.coreos.com/v1", "cert-manager.io/v1")],
        input=values,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout
