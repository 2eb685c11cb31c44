"""What a cluster's operators may add to the pods."""

import kubernetes_validate
import pytest

from tests.helm.test_objects import KUBERNETES
from tests.support.helm_chart import containers, pod_specs, render

PODS = {
    "balancer": "Deployment/eq-equipoise-balancer",
    "worker": "StatefulSet/eq-equipoise-worker",
    "gateway": "Deployment/eq-equipoise-gateway",
}
EXTRAS = {
    "runtimeClassName": "nvidia",
    "schedulerName": "gangs",
    "extraInitContainers": [{"name": "fetch", "image": "registry.example/fetch@sha256:0"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}


@pytest.fixture(scope="module")
def extended():
    return render(dict.fromkeys(PODS, EXTRAS))


@pytest.mark.parametrize("component", PODS)
def test_a_pod_has_what_its_component_adds(extended, component):
    spec = pod_specs(extended)[PODS[component]]
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "gangs")
    assert "fetch" in [one["name"] for one in spec["initContainers"]]
    assert {"name": "more", "emptyDir": {}} in spec["volumes"]
    container = containers(extended)[f"{PODS[component]}/{component}"]
    assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]


def test_pods_with_additions_pass_the_strict_schemas(extended):
    for one in extended:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_a_balancer_without_a_compiled_planner_runs_the_added_init_containers_only():
    objects = render({"balancer": {**EXTRAS, "compiledPlanner": False}})
    spec = pod_specs(objects)[PODS["balancer"]]
    assert [one["name"] for one in spec["initContainers"]] == ["fetch"]


def test_claimed_devices_reach_the_rank():
    claim = {"name": "imex", "resourceClaimTemplateName": "imex-channel"}
    objects = render({"worker": {"resourceClaims": [claim], "gpu": {"count": 1}}})
    assert pod_specs(objects)[PODS["worker"]]["resourceClaims"] == [claim]
    resources = containers(objects)[f"{PODS['worker']}/worker"]["resources"]
    assert resources["claims"] == [{"name": "imex"}]
    assert resources["limits"]["nvidia.com/gpu"] == 1


def test_only_workers_may_use_the_network_of_their_machine():
    specs = pod_specs(render({"worker": {"hostNetwork": True}}))
    used = {pod: spec["dnsPolicy"] for pod, spec in specs.items() if spec.get("hostNetwork")}
    assert used == {PODS["worker"]: "ClusterFirstWithHostNet"}


@pytest.mark.parametrize("image", ["controlPlane", "worker"])
def test_a_digest_replaces_the_tag(image):
    digest = "sha256:" + 64 * "0"
    objects = render({"image": {image: {"tag": "1.2", "digest": digest}}})
    images = {one["image"] for one in containers(objects).values()}
    assert any(one.endswith(f"@{digest}") for one in images)
    assert not any(one.endswith(":1.2") for one in images)
