"""The certificates, tokens and probes of the chart."""

import re

import pytest
import yaml

from equipoise.trust.identity import Identity, Role, certified
from equipoise.trust.settings import TRUST_DOMAIN
from tests.support.helm_chart import (
    FULL,
    ROOT,
    TLS,
    RenderError,
    containers,
    pod_specs,
    render,
)

POD_OF = {
    "balancer": "Deployment/eq-equipoise-balancer",
    "worker": "StatefulSet/eq-equipoise-worker",
    "gateway": "Deployment/eq-equipoise-gateway",
    "test": "Pod/eq-equipoise-test-serving",
}


@pytest.fixture(scope="module")
def objects():
    return render(TLS)


@pytest.fixture(scope="module")
def certificates(objects):
    return {
        one["metadata"]["name"].removeprefix("eq-equipoise-"): one["spec"]
        for one in objects
        if one["kind"] == "Certificate"
    }


def certified_here(names):
    return certified(common_name="", alternative_names=names, trust_domain=TRUST_DOMAIN)


def test_the_processes_expect_the_trust_domain_of_their_certificates():
    tls = TLS["tls"]
    corp = {"tls": {**tls, "trustDomain": "corp"}}
    for pod in POD_OF.values():
        assert environment(render({**TLS, **corp}), pod)["EQUIPOISE_TLS_TRUST_DOMAIN"] == "corp"


def environment(objects, pod):
    (container,) = [c for name, c in containers(objects).items() if name.startswith(f"{pod}/")][-1:]
    return {one["name"]: one.get("value") for one in container["env"]}


def test_certificates_have_identities_that_the_program_accepts(certificates):
    identities = {
        name: certified_here(spec["dnsNames"] + spec["uris"]) for name, spec in certificates.items()
    }
    assert identities == {
        "balancer": Identity(role=Role.READER, name="balancer"),
        "worker": Identity(role=Role.WORKER, pool="default", worker="*"),
        "gateway": Identity(role=Role.GATEWAY),
    }
    servers = {name for name, spec in certificates.items() if "server auth" in spec["usages"]}
    assert servers == {"balancer", "worker"}
    for spec in certificates.values():
        assert spec["issuerRef"] == {
            "name": "fleet",
            "kind": "ClusterIssuer",
            "group": "cert-manager.io",
        }


def test_the_documented_issuer_signs_the_certificates_of_the_documented_release():
    operations, security = (
        (ROOT / "docs" / f"{page}.md").read_text() for page in ("operations", "security")
    )
    values, issuer = (
        yaml.safe_load(re.search(rf"```yaml\n# {name}\.yaml\n(.*?)```", page, re.DOTALL)[1])
        for name, page in (("fleet", operations), ("issuer", security))
    )
    signed = [one for one in render(values) if one["kind"] == "Certificate"]
    assert len(signed) == 3
    for one in signed:
        assert one["spec"]["issuerRef"] == {
            "name": issuer["metadata"]["name"],
            "kind": "Issuer",
            "group": "cert-manager.io",
        }
        # An Issuer signs for its own namespace only.
        assert one["metadata"]["namespace"] == issuer["metadata"]["namespace"]
    assert issuer["kind"] == "Issuer"


def test_a_pool_with_a_slash_in_its_name_keeps_it():
    (worker,) = [
        one["spec"]["uris"]
        for one in render({**TLS, "pool": "deep seek/decode"})
        if one["kind"] == "Certificate" and one["metadata"]["name"].endswith("worker")
    ]
    assert certified_here(worker).pool == "deep seek/decode"


def test_the_csi_driver_gives_each_worker_an_identity_of_its_own():
    tls = TLS["tls"]
    own = {"tls": {**tls, "certManager": {**tls["certManager"], "csiDriver": True}}}
    objects = render({**TLS, **own, "pool": "deep seek/decode"})
    names = {one["metadata"]["name"] for one in objects if one["kind"] == "Certificate"}
    assert names == {"eq-equipoise-balancer", "eq-equipoise-gateway"}
    volumes = {one["name"]: one for one in pod_specs(objects)[POD_OF["worker"]]["volumes"]}
    asked = volumes["tls"]["csi"]["volumeAttributes"]
    uri = asked["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "eq-equipoise-worker-3")
    assert certified_here([uri]) == Identity(
        role=Role.WORKER, pool="deep seek/decode", worker="eq-equipoise-worker-3"
    )
    variables = environment(objects, POD_OF["worker"])
    assert asked["csi.cert-manager.io/dns-names"] == variables["EQUIPOISE_TLS_WORKER_NAME"]
    assert "--worker=$(POD_NAME)" in str(containers(objects))
    with pytest.raises(RenderError, match="issues the workers' certificates"):
        render({"tls": {"certManager": {"csiDriver": True}}})


def test_the_names_that_are_verified_are_in_the_certificates(objects, certificates):
    for pod in POD_OF.values():
        variables = environment(objects, pod)
        assert variables["EQUIPOISE_TLS_BALANCER_NAME"] in certificates["balancer"]["dnsNames"]
    for component in ("worker", "gateway"):
        variables = environment(objects, POD_OF[component])
        assert variables["EQUIPOISE_TLS_WORKER_NAME"] in certificates["worker"]["dnsNames"]
        for role, variable in (("balancer", "BALANCER"), ("worker", "WORKER")):
            name = variables[f"EQUIPOISE_TLS_{variable}_NAME"]
            assert [one for one in certificates if name in certificates[one]["dnsNames"]] == [role]


def test_a_pod_mounts_its_own_certificate_and_only_the_keys_it_needs(objects, certificates):
    mounted = {}
    for component, pod in POD_OF.items():
        volumes = {one["name"]: one.get("secret") for one in pod_specs(objects)[pod]["volumes"]}
        keys = {item["key"] for item in volumes["tokens"]["items"]}
        mounted[component] = (volumes["tls"]["secretName"], keys)
        for name in ("tls", "tokens"):
            assert volumes[name]["defaultMode"] == 0o440, pod
    secrets = {name: spec["secretName"] for name, spec in certificates.items()}
    assert mounted == {
        "balancer": (secrets["balancer"], {"accepted"}),
        "worker": (secrets["worker"], {"accepted", "worker"}),
        "gateway": (secrets["gateway"], {"gateway"}),
        "test": (secrets["gateway"], {"gateway"}),
    }


def test_each_worker_may_have_a_signing_key_that_no_other_pod_sees(objects):
    own = {"tokens": {**TLS["tokens"], "perWorkerSecret": {"name": "worker-keys"}}}
    with_keys = render({**TLS, **own})
    spec = pod_specs(with_keys)[POD_OF["worker"]]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "worker-keys"]
    variables = environment(with_keys, POD_OF["worker"])
    assert mount["subPathExpr"] == "$(POD_NAME)"
    assert mount["mountPath"] == variables["EQUIPOISE_SIGNING_KEY"]
    volumes = {one["name"]: one.get("secret") for one in spec["volumes"]}
    assert volumes["worker-keys"]["secretName"] == "worker-keys"
    assert {item["key"] for item in volumes["tokens"]["items"]} == {"accepted"}
    for component in ("balancer", "gateway", "test"):
        assert "worker-keys" not in str(pod_specs(with_keys)[POD_OF[component]])
    with pytest.raises(RenderError, match=r"needs tokens\.existingSecret\.name"):
        render({"tokens": {"perWorkerSecret": {"name": "worker-keys"}}})


def test_commands_in_a_balancer_sign_with_the_readers_key_if_there_is_one(objects):
    variables = environment(objects, POD_OF["balancer"])
    spec = pod_specs(objects)[POD_OF["balancer"]]
    mounts = {one["name"]: one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
    (reader,) = [one["secret"] for one in spec["volumes"] if one["name"] == "reader"]
    (item,) = reader["items"]
    assert reader["optional"]
    assert (reader["secretName"], item["key"]) == ("tokens", "reader")
    assert variables["EQUIPOISE_SIGNING_KEY"] == f"{mounts['reader']}/{item['path']}"


def test_no_pod_uses_plain_text_with_tls(objects):
    for name, container in containers(objects).items():
        if not name.endswith("/compiled-planner"):
            variables = {one["name"]: one.get("value") for one in container["env"]}
            assert "EQUIPOISE_INSECURE" not in variables, name
            assert variables["EQUIPOISE_TLS_CA"] == "/etc/equipoise/tls/ca.crt", name
        assert "--insecure" not in container.get("args", []), name


def test_probes_use_plain_http_with_tls(objects):
    probes = {
        (name.rpartition("/")[2], kind): container[kind]
        for name, container in containers(objects).items()
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in container
    }
    assert {probe["httpGet"]["path"] for (_, kind), probe in probes.items()} == {
        *("/livez", "/readyz", "/healthz"),
    }
    assert not [key for key, probe in probes.items() if "grpc" in probe]
    for component in ("balancer", "worker"):
        assert probes[component, "readinessProbe"]["httpGet"] == {
            "port": "probes",
            "path": "/readyz",
        }
    plain = [
        container["readinessProbe"]
        for name, container in containers(render(FULL)).items()
        if name.rpartition("/")[2] in {"balancer", "worker"}
    ]
    assert all("grpc" in probe for probe in plain)


def test_existing_secrets_are_used_and_none_is_created():
    named = {"balancer": "b", "worker": "w", "gateway": "g"}
    objects = render({"tls": {"enabled": True, "secrets": named}})
    assert not [one for one in objects if one["kind"] == "Certificate"]
    for component, secret in named.items():
        volumes = pod_specs(objects)[POD_OF[component]]["volumes"]
        assert secret in [one["secret"]["secretName"] for one in volumes if "secret" in one]


def test_workers_verify_the_name_of_another_releases_balancer():
    objects = render(
        {
            **TLS,
            "balancer": {"enabled": False, "externalAddress": "eq-balancer.other.svc:7070"},
        }
    )
    variables = environment(objects, POD_OF["worker"])
    assert variables["EQUIPOISE_TLS_BALANCER_NAME"] == "eq-balancer.other.svc"
    kinds = [one["metadata"]["name"] for one in objects if one["kind"] == "Certificate"]
    assert kinds == ["eq-equipoise-gateway", "eq-equipoise-worker"]


def test_spans_go_to_the_configured_endpoint(objects):
    for component in ("balancer", "worker"):
        variables = environment(objects, POD_OF[component])
        assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel.observability.svc:4317"
    assert "OTEL" not in str(render({}))


def test_the_password_of_redis_is_in_a_file_and_nowhere_else():
    redis = {"url": "rediss://eq@redis:6379/0", "existingSecret": {"name": "secret", "key": "pw"}}
    objects = render({"redis": redis})
    (balancer,) = pod_specs(objects)[POD_OF["balancer"]]["containers"]
    flags = dict(flag.partition("=")[::2] for flag in balancer["args"] if "=" in flag)
    assert flags["--store"] == "rediss://eq@redis:6379/0"
    folder, _, name = flags["--store-password-file"].rpartition("/")
    (mount,) = [one for one in balancer["volumeMounts"] if one["mountPath"] == folder]
    volumes = pod_specs(objects)[POD_OF["balancer"]]["volumes"]
    (volume,) = [one["secret"] for one in volumes if one["name"] == mount["name"]]
    assert (volume["secretName"], volume["items"]) == ("secret", [{"key": "pw", "path": name}])
    assert "secretKeyRef" not in str(balancer)
    for pod in ("worker", "gateway", "test"):
        assert "secret" not in {
            one.get("secret", {}).get("secretName")
            for one in pod_specs(objects)[POD_OF[pod]]["volumes"]
        }


def test_a_scrape_token_reaches_every_process_and_the_monitors():
    metrics = {"serviceMonitor": {"enabled": True}, "tokenSecret": {"name": "scrape", "key": "t"}}
    objects = render({**TLS, "metrics": metrics})
    for component, name in POD_OF.items():
        if component == "test":
            continue
        spec = pod_specs(objects)[name]
        (volume,) = (one for one in spec["volumes"] if one["name"] == "metrics-token")
        assert volume["secret"]["secretName"] == "scrape"
        assert volume["secret"]["items"] == [{"key": "t", "path": "token"}]
        assert "--metrics-token-file=/etc/equipoise/metrics/token" in str(spec["containers"])
        mounts = [mount for one in spec["containers"] for mount in one["volumeMounts"]]
        assert any(one["mountPath"] == "/etc/equipoise/metrics" for one in mounts)
    monitors = [one for one in objects if one["kind"] == "ServiceMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "t"}}
    assert "metrics-token" not in str(render(TLS)), "none by default"


MONITORED = {"tls": {"enabled": True}, "serviceMonitor": {"enabled": True}}
"""Metrics over TLS, and monitors that read them."""


def scraped_with(values):
    """The `tlsConfig` of each monitor's endpoint."""
    monitors = [one for one in render(values) if one["kind"].endswith("Monitor")]
    endpoints = {
        one["metadata"]["name"].removeprefix("eq-equipoise-"): endpoint
        for one in monitors
        for endpoint in one["spec"].get("endpoints") or one["spec"]["podMetricsEndpoints"]
    }
    assert {one["scheme"] for one in endpoints.values()} == {"https"}
    return {name: one["tlsConfig"] for name, one in endpoints.items()}


@pytest.mark.parametrize("kind", ["serviceMonitor", "podMonitor"])
def test_monitors_verify_the_certificate_of_each_process(kind):
    metrics = {"tls": {"enabled": True}, kind: {"enabled": True}}
    objects = render({**TLS, "metrics": metrics})
    certificates = {
        one["metadata"]["name"].removeprefix("eq-equipoise-"): one["spec"]
        for one in objects
        if one["kind"] == "Certificate"
    }
    checked = scraped_with({**TLS, "metrics": metrics})
    assert checked.keys() == {"balancer", "worker", "gateway"}
    for component, config in checked.items():
        certificate = certificates[component]
        assert config["ca"] == {"secret": {"name": certificate["secretName"], "key": "ca.crt"}}
        assert config["serverName"] in certificate["dnsNames"]
        assert "server auth" in certificate["usages"]
        assert "--metrics-tls" in str(pod_specs(objects)[POD_OF[component]]["containers"])


def test_monitors_read_the_authority_from_a_secret_that_exists():
    tls = TLS["tls"]
    own = {"tls": {**tls, "certManager": {**tls["certManager"], "csiDriver": True}}}
    checked = scraped_with({**TLS, **own, "metrics": MONITORED})
    assert checked["worker"]["ca"]["secret"]["name"] == "eq-equipoise-balancer-tls"
    joined = {"enabled": False, "externalAddress": "eq-balancer.other.svc:7070"}
    values = {**TLS, **own, "balancer": joined, "metrics": MONITORED}
    checked = scraped_with(values)
    assert checked["worker"]["ca"]["secret"]["name"] == "eq-equipoise-gateway-tls"
    named = {"balancer": "b", "worker": "w", "gateway": "g"}
    checked = scraped_with({"tls": {"enabled": True, "secrets": named}, "metrics": MONITORED})
    assert {name: one["ca"]["secret"]["name"] for name, one in checked.items()} == named
    nobody = {**values, "gateway": {"enabled": False}, "tests": {"enabled": False}}
    with pytest.raises(RenderError, match=r"no Secret of this release contains the authority"):
        render(nobody)


def test_metrics_use_plain_http_unless_tls_is_enabled_for_them():
    monitored = {"serviceMonitor": {"enabled": True}}
    objects = render({**TLS, "metrics": monitored})
    assert "--metrics-tls" not in str(objects)
    assert "https" not in str([one for one in objects if one["kind"] == "ServiceMonitor"])
    with pytest.raises(RenderError, match=r"metrics\.tls\.enabled needs tls\.enabled"):
        render({"metrics": MONITORED})
