"""Values are explained and known to the schema, and invalid ones are rejected by name."""

import importlib.util
import itertools
import json
import re

import pytest
import yaml

from tests.support.helm_chart import CHART, ROOT, TLS, RenderError, render

VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

WRONG = {
    "a typo in a name": ({"balancer": {"replica": 2}}, "'replica' not allowed"),
    "a typo at the top": ({"balancr": {}}, "'balancr' not allowed"),
    "no balancer": ({"balancer": {"replicas": 0}}, "/balancer/replicas"),
    "a number as a word": ({"balancer": {"replicas": "2"}}, "/balancer/replicas"),
    "an unknown lease": ({"balancer": {"lease": "etcd"}}, "/balancer/lease"),
    "a lease too short": ({"balancer": {"leaseDurationSeconds": 0.5}}, "leaseDurationSeconds"),
    "a port too high": ({"balancer": {"port": 70000}}, "/balancer/port"),
    "an unknown log level": ({"balancer": {"logLevel": "loud"}}, "/balancer/logLevel"),
    "an address without a port": ({"balancer": {"externalAddress": "b"}}, "externalAddress"),
    "a URL as an address": (
        {"balancer": {"externalAddress": "http://b:7070"}},
        "externalAddress",
    ),
    "an empty command": ({"balancer": {"command": []}}, "/balancer/command"),
    "flags that are no list": ({"worker": {"extraArgs": "--x"}}, "/worker/extraArgs"),
    "environment as a map": ({"worker": {"extraEnv": {"A": "b"}}}, "/worker/extraEnv"),
    "environment without a name": ({"worker": {"extraEnv": [{"value": "b"}]}}, "extraEnv"),
    "an unknown kind": ({"worker": {"kind": "Deployment"}}, "/worker/kind"),
    "no slots": ({"worker": {"slotsPerRank": 0}}, "/worker/slotsPerRank"),
    "two GPUs a rank": ({"worker": {"gpu": {"count": 2}}}, "/worker/gpu/count"),
    "another form of weights": ({"worker": {"weights": "int4"}}, "/worker/weights"),
    "latents in float32": ({"worker": {"latents": "fp32"}}, "/worker/latents"),
    "a device that is none": ({"worker": {"device": "gpu"}}, "/worker/device"),
    "batch invariance as a word": ({"worker": {"batchInvariant": "yes"}}, "batchInvariant"),
    "three micro-batches": ({"worker": {"microBatches": 3}}, "/worker/microBatches"),
    "an unknown way": ({"worker": {"hops": "three"}}, "/worker/hops"),
    "fewer than no spare slots": ({"worker": {"spareSlots": -1}}, "/worker/spareSlots"),
    "an unknown model": ({"worker": {"checkpoint": {"model": "v3"}}}, "/worker/checkpoint/model"),
    "memory with a unit": ({"worker": {"gpu": {"memoryGiB": "78Gi"}}}, "/worker/gpu/memoryGiB"),
    "memory without a unit": ({"worker": {"sharedMemorySize": "2 GB"}}, "sharedMemorySize"),
    "resources of another kind": ({"gateway": {"resources": {"request": {}}}}, "'request'"),
    "a budget that is no map": ({"worker": {"podDisruptionBudget": True}}, "podDisruptionBudget"),
    "an unknown source of labels": ({"worker": {"topology": {"source": "aws"}}}, "source"),
    "an unknown update strategy": ({"worker": {"updateStrategy": "Recreate"}}, "updateStrategy"),
    "a Redis of another scheme": ({"redis": {"url": "http://redis"}}, "/redis/url"),
    "a password in a URL": ({"redis": {"url": "redis://:secret@r/0"}}, "/redis/url"),
    "root": ({"runAsUser": 0}, "/runAsUser"),
    "a digest that is none": ({"image": {"worker": {"digest": "latest"}}}, "digest"),
    "an unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    "a peer of no kind": ({"networkPolicy": {"balancerFrom": [{"pod": {}}]}}, "balancerFrom"),
    "a typo in a certificate's name": ({"tls": {"secrets": {"balancers": "b"}}}, "'balancers' not"),
    "a name with a port": ({"tls": {"balancerName": "b:7070"}}, "/tls/balancerName"),
    "a duration of days": ({"tls": {"certManager": {"duration": "90d"}}}, "/tls/certManager"),
    "a collector without a scheme": ({"tracing": {"endpoint": "otel:4317"}}, "/tracing/endpoint"),
    "a name that objects cannot have": ({"nameOverride": "Foo_Bar"}, "/nameOverride"),
    "a prefix that begins with a digit": ({"fullnameOverride": "3fs"}, "/fullnameOverride"),
    "a prefix that ends in a dash": ({"fullnameOverride": "eq-"}, "/fullnameOverride"),
    "a pool without a name": ({"pool": ""}, "/pool"),
    "an unknown phase": ({"phase": "training"}, "/phase"),
    "two peers in a string": ({"peerPools": ["a,b"]}, "/peerPools/0"),
    "a peer twice": ({"peerPools": ["a", "a"]}, "/peerPools"),
    "a hold without an end": ({"worker": {"holdSeconds": 0}}, "/worker/holdSeconds"),
    "a peer of a worker of no kind": ({"networkPolicy": {"workerFrom": [{}]}}, "workerFrom"),
    "a section without its values": ({"tls": None}, "missing property 'tls'"),
    "a removed value": ({"worker": {"port": None}}, "/worker': missing property 'port'"),
    "a typo in the policy": ({"policy": {"defaults": {"intervall": "9s"}}}, "'intervall' not"),
    "a duration without a unit": ({"policy": {"defaults": {"interval": 9}}}, "defaults/interval"),
    "a typo in a pool's policy": (
        {"policy": {"pools": {"decode": {"judging": {"minGian": 0.1}}}}},
        "'minGian' not allowed",
    ),
}


@pytest.mark.parametrize(("values", "words"), WRONG.values(), ids=WRONG)
def test_an_invalid_value_is_rejected_with_its_path(values, words):
    with pytest.raises(RenderError, match="values don't meet the specifications") as rejected:
        render(values)
    assert words in str(rejected.value)


def test_a_name_that_looks_like_a_number_stays_a_name():
    secret = {"existingSecret": {"name": "123", "key": "123"}}
    values = {
        **TLS,
        "nameOverride": "123",
        "tls": {**TLS["tls"], "secrets": dict.fromkeys(("balancer", "worker", "gateway"), "123")},
        "tokens": {"existingSecret": {"name": "123"}, "perWorkerSecret": {"name": "123"}},
        "policy": {"existingConfigMap": "123"},
        "redis": {"url": "redis://r:6379/0", **secret},
        "balancer": {"lease": "kubernetes", "serviceAccount": {"name": "123"}},
        "worker": {
            "serviceAccount": {"name": "123"},
            "topology": {"source": "nodeLabels"},
            "topologySpread": {"topologyKey": "123"},
        },
        "gateway": {
            "apiKeys": secret,
            "ingress": {"enabled": True, "className": "123", "hosts": ["123"], "tlsSecret": "123"},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "123"}},
        },
        "metrics": {
            "tls": {"enabled": True},
            "tokenSecret": {"name": "123", "key": "123"},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
        },
    }
    csi = {"enabled": True, "csiDriver": True, "issuerRef": {"name": "123"}}
    own = {"tls": {"enabled": True, "certManager": csi}}
    for one in (*render(values, namespace="123"), *render(own, namespace="123")):
        assert 123 not in _leaves(one), f"{one['kind']} {one['metadata']['name']}"


def test_every_value_is_explained_above_it():
    lines = VALUES.splitlines()
    unexplained = [
        line
        for above, line in itertools.pairwise(lines)
        if re.match(r" *[a-zA-Z]+: *[^&\s]", line)  # a leaf
        and not above.lstrip().startswith("#")
        and not _within_an_explained_value(lines, line)
    ]
    assert not unexplained


def test_values_and_schema_have_the_same_names():
    assert _names(yaml.safe_load(VALUES), SCHEMA) == []


def test_null_removes_only_what_may_be_empty():
    values = yaml.safe_load(VALUES)
    assert _not_required(values, SCHEMA) == []
    render(_emptied(values))


def test_the_policy_of_a_phase_is_accepted():
    pools = {"readers": {"phase": "prefill", "planning": {"algorithm": "hierarchical"}}}
    (policy,) = [
        one["data"]["policy.yaml"]
        for one in render({"policy": {"pools": pools}})
        if one["kind"] == "ConfigMap" and "policy.yaml" in one["data"]
    ]
    assert yaml.safe_load(policy)["pools"] == pools
    with pytest.raises(RenderError, match="/policy/pools/readers/phase"):
        render({"policy": {"pools": {"readers": {"phase": "reading"}}}})


def test_the_policy_in_the_schema_is_the_published_one():
    spec = importlib.util.spec_from_file_location("embed", ROOT / "helm" / "embed_policy.py")
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)
    published = json.loads(embed.PUBLISHED.read_text())
    current = embed.written(embed.embedded(SCHEMA, published))
    assert embed.VALUES.read_text() == current, "python helm/embed_policy.py"


def test_every_object_of_the_schema_rejects_unknown_values():
    loose = {path for path, one in _maps(SCHEMA) if one.get("additionalProperties") is not False}
    free = {"labels", "properties", "peers", "environment", "resources"}
    assert {path for path in loose if not free & set(path.split("/"))} == {
        f"/{path}"
        for path in (
            # Kubernetes' own objects, which its server checks, and what others own.
            "global",
            "balancer/affinity", "balancer/tolerations/[]",
            "gateway/affinity", "gateway/tolerations/[]",
            "gateway/autoscaling/behavior", "gateway/autoscaling/metrics/[]",
            "balancer/readinessProbe", "gateway/readinessProbe", "worker/readinessProbe",
            "policy/pools",
            "metrics/podMonitor/relabelings/[]", "metrics/serviceMonitor/relabelings/[]",
            "worker/affinity", "worker/tolerations/[]", "worker/checkpoint/volume",
            *(f"{one}/extraVolumeMounts/[]" for one in ("balancer", "gateway", "worker")),
        )
    }  # fmt: skip


def _leaves(value):
    """Every scalar in an object."""
    if isinstance(value, dict | list):
        below = value.values() if isinstance(value, dict) else value
        return [leaf for one in below for leaf in _leaves(one)]
    return [value]


def _within_an_explained_value(lines, line):
    """Whether it is a line of a value of several lines, such as resources."""
    number = lines.index(line)
    indent = len(line) - len(line.lstrip())
    for above in reversed(lines[:number]):
        if above.strip() and len(above) - len(above.lstrip()) < indent:
            return lines[lines.index(above) - 1].lstrip().startswith("#") and "resources" in above
    return False


def _resolved(schema):
    if "$ref" in schema:
        return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def _names(values, schema, path=""):
    """Where one has a name that the other has not."""
    schema = _resolved(schema)
    known = schema.get("properties")
    if known is None or not isinstance(values, dict) or "resources" in path or not values:
        return []
    odd = [f"{path}/{name}" for name in set(known) ^ set(values)]
    for name in set(known) & set(values):
        odd += _names(values[name], known[name], f"{path}/{name}")
    return odd


def _may_be_empty(name, value):
    return name == "resources" or value in ({}, [])


def _not_required(values, schema, path=""):
    """Values without which the templates would fail, although the schema lets them be removed."""
    schema = _resolved(schema)
    known = schema.get("properties", {}) if isinstance(values, dict) else {}
    odd = []
    for name, value in values.items() if known else ():
        if not _may_be_empty(name, value):
            odd += [] if name in schema.get("required", []) else [f"{path}/{name}"]
            odd += _not_required(value, known[name], f"{path}/{name}")
    return odd


def _emptied(values):
    """The values that may be empty, as null."""
    return {
        name: None if _may_be_empty(name, value) else _emptied(value)
        for name, value in values.items()
        if _may_be_empty(name, value) or isinstance(value, dict)
    }


def _maps(schema, path=""):
    """Every schema of a map, with where it stands."""
    if "$ref" in schema:
        return
    if schema.get("type") == "object":
        yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from _maps(one, f"{path}/{name}")
    if isinstance(schema.get("items"), dict):
        yield from _maps(schema["items"], f"{path}/[]")
