"""How clients outside the cluster reach the gateways, and how Prometheus reaches pods."""

import kubernetes_validate
import pytest

from tests.helm.test_objects import KUBERNETES
from tests.support.helm_chart import RenderError, one_of, render

HOST = "moe.example"
GATEWAY = "eq-equipoise-gateway"
LABELS = {
    "app.kubernetes.io/name": "equipoise",
    "app.kubernetes.io/instance": "eq",
    "app.kubernetes.io/component": "gateway",
}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": [HOST]}
POOL = {"enabled": True, "endpointPicker": {"name": "picker"}}


def test_an_ingress_leads_to_the_gateways():
    values = {
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
        "hosts": [HOST],
        "tlsSecret": "moe-tls",
    }
    made = one_of(render({"gateway": {"ingress": {"enabled": True, **values}}}), "Ingress", GATEWAY)
    kubernetes_validate.validate(made, KUBERNETES, strict=True)
    assert made["metadata"]["annotations"] == values["annotations"]
    assert made["spec"]["ingressClassName"] == "nginx"
    assert made["spec"]["tls"] == [{"hosts": [HOST], "secretName": "moe-tls"}]
    (rule,) = made["spec"]["rules"]
    assert rule["host"] == HOST
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
    assert path["backend"]["service"] == {"name": GATEWAY, "port": {"name": "http"}}


def test_a_route_of_the_gateway_api_lets_streams_run():
    made = one_of(render({"gateway": {"httpRoute": ROUTE}}), "HTTPRoute", GATEWAY)
    assert made["spec"]["parentRefs"] == [{"name": "public"}]
    assert made["spec"]["hostnames"] == [HOST]
    (rule,) = made["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["backendRefs"] == [{"name": GATEWAY, "port": 8080}]
    assert rule["timeouts"] == {"request": "0s"}


def test_an_inference_pool_selects_the_gateways_and_is_the_routes_backend():
    objects = render({"gateway": {"httpRoute": ROUTE, "inferencePool": POOL, "port": 8081}})
    made = one_of(objects, "InferencePool", GATEWAY)
    assert made["apiVersion"] == "inference.networking.k8s.io/v1"
    assert made["spec"] == {
        "selector": {"matchLabels": LABELS},
        "targetPorts": [{"number": 8081}],
        "endpointPickerRef": {
            "name": "picker",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        },
    }
    (rule,) = one_of(objects, "HTTPRoute", GATEWAY)["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": GATEWAY}
    ]


def test_the_default_installs_no_route():
    kinds = {one["kind"] for one in render({})}
    assert not kinds & {"Ingress", "HTTPRoute", "InferencePool", "PodMonitor", "ServiceMonitor"}


def test_pods_are_scraped_with_their_labels_without_a_service():
    relabelings = [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
    objects = render(
        {
            "metrics": {
                "tokenSecret": {"name": "scrape"},
                "podMonitor": {
                    "enabled": True,
                    "labels": {"release": "prometheus"},
                    "relabelings": relabelings,
                },
            },
            "gateway": {"enabled": False},
        }
    )
    made = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one
        for one in objects
        if one["kind"] == "PodMonitor"
    }
    assert set(made) == {"balancer", "worker"}
    worker = made["worker"]
    assert worker["metadata"]["labels"]["release"] == "prometheus"
    assert worker["spec"]["selector"]["matchLabels"] == {
        **LABELS,
        "app.kubernetes.io/component": "worker",
    }
    (endpoint,) = worker["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
    assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "token"}}
    assert endpoint["relabelings"] == [
        {"targetLabel": "release", "replacement": "eq"},
        {
            "sourceLabels": ["__meta_kubernetes_pod_name"],
            "targetLabel": "worker",
            "replacement": "${1}",
        },
        *relabelings,
    ]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("gateway.httpRoute.parentRefs must name", {"gateway": {"httpRoute": {"enabled": True}}}),
        (
            "gateway.inferencePool.endpointPicker.name must name",
            {"gateway": {"inferencePool": {"enabled": True}}},
        ),
        (
            "would scrape every process twice",
            {"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        ),
        (
            "gateway.ingress.tlsSecret is the certificate of gateway.ingress.hosts",
            {"gateway": {"ingress": {"enabled": True, "tlsSecret": "moe-tls"}}},
        ),
    ],
)
def test_contradicting_routes_fail_with_the_remedy(words, values):
    with pytest.raises(RenderError, match=words):
        render(values)
