"""What a cluster's operators may add to the pods."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from equipoise.cli.local_ranks import options_of
from equipoise.cli.options import options_from_settings
from equipoise.settings.address import parse_address
from equipoise.worker.settings import WorkerSettings
from tests.helm.test_objects import KUBERNETES
from tests.support.helm_chart import (
    CHART,
    FULL,
    TLS,
    RenderError,
    containers,
    helm_command,
    one_of,
    pod_specs,
    render,
)

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


def pod_templates(chart, *arguments):
    """What restarts pods if it changes, by the workload."""
    tag = ("--set=image.worker.tag=v1", "--set=image.controlPlane.tag=v1")
    text = helm_command("template", "eq", chart, *tag, *arguments)
    workloads = (one for one in yaml.safe_load_all(text) if one and one["kind"] != "Pod")
    return {
        f"{one['kind']}/{one['metadata']['name']}": spec.get("template")
        or spec["leaderWorkerTemplate"]
        for one in workloads
        if {"template", "leaderWorkerTemplate"} & set(spec := one.get("spec", {}))
    }


@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet"])
def test_another_version_of_the_chart_or_a_label_of_all_objects_restarts_no_pod(kind, tmp_path):
    values = (f"--set=worker.kind={kind}", "--set=redis.trial.enabled=true")
    later = shutil.copytree(CHART, tmp_path / "equipoise")
    described = (later / "Chart.yaml").read_text()
    (later / "Chart.yaml").write_text(described.replace("0.1.0", "0.2.0"))
    before = pod_templates(CHART, *values)
    assert len(before) == 4
    assert pod_templates(later, *values, "--set=commonLabels.team=ours") == before


def test_a_pod_has_the_labels_that_others_select_it_by_and_its_own():
    own = {"team": "ours", "app.kubernetes.io/name": "mine"}
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in render({**FULL, **{pod: {"podLabels": own} for pod in PODS}})
        if one["kind"] in {"Deployment", "StatefulSet"}
    }
    selected = {
        "app.kubernetes.io/name": "equipoise",
        "app.kubernetes.io/instance": "eq",
        "app.kubernetes.io/part-of": "equipoise",
    }
    for component, more in (
        ("balancer", {"team": "ours"}),
        ("worker", {"team": "ours", "equipoise.dev/pool": "default"}),
        ("gateway", {"team": "ours", "equipoise.dev/pool": "default"}),
        ("redis", {}),
    ):
        expected = selected | {"app.kubernetes.io/component": component} | more
        assert labels[f"eq-equipoise-{component}"] == expected


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


def test_a_gateway_that_stops_at_once_has_no_hook():
    # Kubernetes 1.30 to 1.32 reject a sleep of 0 s.
    name = f"{PODS['gateway']}/gateway"
    assert "lifecycle" not in containers(render({"gateway": {"preStopSeconds": 0}}))[name]
    assert containers(render())[name]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


@pytest.fixture
def cluster():
    """The address of an API server that has one object: this release's Deployment of 5 gateways."""
    kinds = {
        "v1": ("services", "Service"),
        "apps/v1": ("deployments", "Deployment"),
        "autoscaling/v2": ("horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    }
    owner = {"meta.helm.sh/release-name": "eq", "meta.helm.sh/release-namespace": "moe"}
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    groups = [
        {"name": group, "versions": [{"groupVersion": f"{group}/{version}", "version": version}]}
        for group, version in (("apps", "v1"), ("autoscaling", "v2"))
    ]
    answers = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
        "/apis/apps/v1/namespaces/moe/deployments/eq-equipoise-gateway": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"labels": labels, "annotations": owner},
            "spec": {"replicas": 5},
        },
    }
    for version, (name, kind) in kinds.items():
        resource = {"name": name, "namespaced": True, "kind": kind}
        listed = {"kind": "APIResourceList", "groupVersion": version, "resources": [resource]}
        answers[f"/{'apis' if '/' in version else 'api'}/{version}"] = listed
    missing = {"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = answers.get(self.path.partition("?")[0], missing)
            self.send_response(answer.get("code", 200))
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            """Keep the output of tests clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ELSEWHERE = {"balancer": {"enabled": False, "externalAddress": "eq-balancer.other.svc:7070"}}
GATEWAYS_ONLY = (
    "balancer.enabled=false,balancer.externalAddress=b:7070,worker.kind=None,"
    "networkPolicy.enabled=false,tests.enabled=false,gateway.podDisruptionBudget.enabled=false"
)


def test_an_upgrade_to_autoscaling_keeps_as_many_gateways_as_run(cluster):
    def replicas(*arguments):
        named = ("template", "eq", CHART, "--namespace=moe", f"--set={GATEWAYS_ONLY}")
        objects = [one for one in yaml.safe_load_all(helm_command(*named, *arguments)) if one]
        return one_of(objects, "Deployment", "eq-equipoise-gateway")["spec"].get("replicas")

    scaled = "--set=gateway.autoscaling.enabled=true"
    server = f"--kube-apiserver={cluster}"
    reached = ("--dry-run=server", "--disable-openapi-validation", server)
    assert replicas(scaled, *reached) == 5
    assert replicas(scaled) is None  # As for a new release: the autoscaler decides.
    assert replicas(*reached) == 1


ON_MACHINES = {
    "worker": {"hostNetwork": True},
    "networkPolicy": {"balancerFrom": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]},
}


@pytest.mark.parametrize(
    "values",
    [
        {**TLS, **ON_MACHINES},
        ON_MACHINES | {"tokens": TLS["tokens"]},
        ON_MACHINES | {"insecure": False},
        {**TLS, **ON_MACHINES, "networkPolicy": {"enabled": False}},
        {**TLS, "worker": ON_MACHINES["worker"], **ELSEWHERE},
    ],
    ids=["tls", "tokens", "certificates in images", "no policies", "a balancer elsewhere"],
)
def test_only_workers_may_use_the_network_of_their_machine(values):
    specs = pod_specs(render(values))
    used = {pod: spec["dnsPolicy"] for pod, spec in specs.items() if spec.get("hostNetwork")}
    assert used == {PODS["worker"]: "ClusterFirstWithHostNet"}


@pytest.mark.parametrize("image", ["controlPlane", "worker"])
def test_a_digest_replaces_the_tag(image):
    digest = "sha256:" + 64 * "0"
    objects = render({"image": {image: {"tag": "1.2", "digest": digest}}})
    images = {one["image"] for one in containers(objects).values()}
    assert any(one.endswith(f"@{digest}") for one in images)
    assert not any(one.endswith(":1.2") for one in images)


SHARED = {"worker": {"replicas": 16, "localRanks": 8, "gpu": {"count": 1}, "slotsPerRank": 4}}
"""Two pods of eight GPUs."""
EIGHT = [""] + [f"-{rank}" for rank in range(1, 8)]
RDMA = {"worker": SHARED["worker"] | {"rdma": {"resourceName": "rdma/ib"}}}


def ranks_of(container):
    """The settings of each of a pod's processes."""
    values = {"$(POD_NAME)": "eq-equipoise-worker-1", "$(POD_IP)": "10.0.0.1", "$(NODE_NAME)": "n1"}
    arguments = container["args"][1:]
    for variable, value in values.items():
        arguments = [one.replace(variable, value) for one in arguments]
    seen = []
    command = options_from_settings(run_with(seen))
    given = typer.Typer()
    given.command()(command)
    runner = CliRunner(env={"EQUIPOISE_INSECURE": "true"})
    runner.invoke(given, arguments, catch_exceptions=False)
    for number in range(seen[0].local_ranks):
        own = [*arguments, *options_of(seen[0], number)]
        runner.invoke(given, own, catch_exceptions=False)
    return seen


def run_with(seen):
    def run(settings: WorkerSettings) -> int:
        seen.append(settings)
        return 0

    return run


def test_the_ranks_of_a_pod_share_its_gpus_and_have_ports_of_their_own():
    objects = render(RDMA)
    assert one_of(objects, "StatefulSet", "eq-equipoise-worker")["spec"]["replicas"] == 2
    spec = pod_specs(objects)[PODS["worker"]]
    (container,) = spec["containers"]
    assert (
        container["resources"]["limits"] | {"nvidia.com/gpu": 8, "rdma/ib": 8}
        == (container["resources"]["limits"])
    )
    parent, *ranks = ranks_of(container)
    assert parent.local_ranks == len(ranks) == 8
    assert {one.num_ranks for one in ranks} == {16}
    assert [one.worker for one in ranks] == [f"eq-equipoise-worker-1-{n}" for n in range(8)]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    for suffix, rank in zip(EIGHT, ranks, strict=True):
        assert ports[f"grpc{suffix}"] == parse_address(rank.listen).port
        assert ports[f"rendezvous{suffix}"] == rank.rendezvous_port
        assert ports[f"metrics{suffix}"] == parse_address(rank.metrics.metrics_listen).port
    probes = {parse_address(one.probes_listen).port for one in (parent, *ranks)}
    assert len({*ports.values(), *probes}) == 3 * 8 + 9
    assert ports["probes"] == parse_address(parent.probes_listen).port


@pytest.mark.parametrize("values", [SHARED, {**TLS, **SHARED}], ids=["plain", "tls"])
def test_probes_ask_the_process_that_watches_all_ranks_of_a_pod(values):
    container = containers(render(values))["StatefulSet/eq-equipoise-worker/worker"]
    asked = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {one["port"] for one in asked.values()} == {"probes"}
    paths = {kind: one["path"] for kind, one in asked.items()}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}


def test_services_policies_and_monitors_name_the_ports_of_every_rank_of_a_pod():
    monitored = {"metrics": {"podMonitor": {"enabled": True}}}
    objects = render({**SHARED, **monitored})
    service = one_of(objects, "Service", "eq-equipoise-worker")
    assert {one["name"] for one in service["spec"]["ports"]} == {
        f"{kind}{suffix}" for kind in ("grpc", "rendezvous", "metrics") for suffix in EIGHT
    }
    policy = one_of(objects, "NetworkPolicy", "eq-equipoise-worker")
    allowed = [
        [one["port"] for one in rule["ports"] if isinstance(one["port"], str)]
        for rule in policy["spec"]["ingress"]
    ]
    assert allowed == [[f"{kind}{suffix}" for suffix in EIGHT] for kind in
                       ("grpc", "rendezvous", "metrics")]  # fmt: skip
    monitor = one_of(objects, "PodMonitor", "eq-equipoise-worker")
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert [one["port"] for one in endpoints] == [f"metrics{suffix}" for suffix in EIGHT]
    names = [one["relabelings"][1] for one in endpoints]
    assert {one["targetLabel"] for one in names} == {"worker"}
    assert [one["replacement"] for one in names] == [f"${{1}}-{rank}" for rank in range(8)]
    for one in objects:
        if "monitoring" not in one["apiVersion"]:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("slots", "spare", "strategy"), [(16, 1, "RollingUpdate"), (3, 0, "OnDelete")]
)
def test_upgrades_and_disruptions_take_a_pod_only_if_all_its_ranks_can_be_missing(
    slots, spare, strategy
):
    objects = render({"worker": SHARED["worker"] | {"slotsPerRank": slots}})
    budget = one_of(objects, "PodDisruptionBudget", "eq-equipoise-worker")
    assert budget["spec"]["maxUnavailable"] == spare
    ranks = one_of(objects, "StatefulSet", "eq-equipoise-worker")
    assert ranks["spec"]["updateStrategy"] == {"type": strategy}


def test_a_group_of_pods_has_as_many_as_its_ranks_need():
    group = one_of(
        render({"worker": SHARED["worker"] | {"kind": "LeaderWorkerSet"}}),
        *("LeaderWorkerSet", "eq-equipoise-worker"),
    )
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"worker": {"localRanks": 3}}, "must be a multiple of worker.localRanks (3)"),
        (
            {"worker": {"localRanks": 2, "device": "cuda:1"}},
            "worker.device cuda:1 is one GPU, but worker.localRanks is 2",
        ),
        (
            {"worker": {"localRanks": 2, "rendezvousPort": 7081}},
            "worker.port and worker.rendezvousPort of a worker are both 7081",
        ),
        (
            {"worker": {"localRanks": 2}, "metrics": {"port": 9101}},
            "metrics.port and the probes' port of a worker are both 9101",
        ),
        (
            {
                **TLS,
                "worker": {"localRanks": 2},
                "tokens": {**TLS["tokens"], "perWorkerSecret": {"name": "keys"}},
            },
            "a pod has several workers",
        ),
    ],
)
def test_values_that_ranks_of_a_pod_cannot_share_are_rejected(values, words):
    with pytest.raises(RenderError) as rejected:
        render(values)
    assert words in str(rejected.value)
