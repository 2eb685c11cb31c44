"""The chart's objects are valid, and its processes have few privileges."""

import json
import re
import subprocess

import kubernetes_validate
import pytest

from tests.support.helm_chart import (
    CHART,
    FULL,
    READERS,
    ROOT,
    TLS,
    WRITERS,
    RenderError,
    containers,
    helm,
    helm_command,
    one_of,
    pod_specs,
    render,
)

KUBERNETES = "1.35"
_COMPONENT = "app.kubernetes.io/component"
_GATEWAY = "Deployment/eq-equipoise-gateway/gateway"
VARIANTS = {
    "defaults": {},
    "everything": FULL,
    "certificates and tokens": TLS,
    "identities of each worker": {
        **TLS,
        "tls": {**TLS["tls"], "certManager": {**TLS["tls"]["certManager"], "csiDriver": True}},
        "tokens": {**TLS["tokens"], "perWorkerSecret": {"name": "worker-keys"}},
    },
    "a file in a volume": {"balancer": {"storage": {"persistent": True, "storageClass": "fast"}}},
    "labels of the pods": {"worker": {"topology": {"source": "podLabels"}}},
    "a Redis with a secret": {
        "balancer": {"replicas": 3, "lease": "store"},
        "redis": {"url": "rediss://balancer@r:6379/0", "existingSecret": {"name": "redis"}},
    },
    "workers of another balancer": {
        "pool": "decode",
        "balancer": {"enabled": False, "externalAddress": "eq-balancer.other.svc:7070"},
    },
    "a pool that prefills prompts": READERS,
    "a pool that generates": WRITERS,
    "a balancer for an engine that is there": {
        "worker": {"kind": "None"},
        "gateway": {"enabled": False},
    },
}
LEADER_WORKER_SET = {"worker": {"kind": "LeaderWorkerSet"}}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_object_passes_the_strict_schemas_of_kubernetes(values):
    for one in render(values):
        if "." in one["apiVersion"] and "k8s.io" not in one["apiVersion"]:
            continue  # Custom resources, whose schemas are not Kubernetes' own.
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_helm_lint_reports_only_the_missing_icon():
    done = subprocess.run(
        [helm(), "lint", "--strict", CHART], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^\[\w+\] .*", done.stdout, re.MULTILINE)
    assert lines == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.parametrize("values", [{}, FULL, LEADER_WORKER_SET], ids=["", "full", "lws"])
def test_no_container_is_root_or_can_write_to_its_image_or_gain_privileges(values):
    objects = render(values)
    for pod, spec in pod_specs(objects).items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"], pod
        assert security["runAsUser"] > 0, pod
        assert security["runAsGroup"] > 0, pod
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), pod
        assert spec["enableServiceLinks"] is False, pod
    for name, container in containers(objects).items():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert not {"runAsUser", "privileged"} & set(security), name
        assert {"requests", "limits"} <= set(container["resources"]), name


def test_only_rdma_adds_a_capability_for_pinned_memory():
    for name, container in containers(render(FULL)).items():
        added = container["securityContext"]["capabilities"].get("add")
        assert added == (
            ["IPC_LOCK"] if name.startswith("StatefulSet/eq-equipoise-worker/") else None
        )


def test_pods_that_do_not_call_the_api_server_get_no_token_and_no_role():
    objects = render({"balancer": {"events": False}})
    assert not [one for one in objects if "Role" in one["kind"]]
    assert all(
        spec["automountServiceAccountToken"] is False for spec in pod_specs(objects).values()
    )


def test_pods_without_a_role_may_have_the_default_account():
    created = {"serviceAccount": {"create": False}}
    objects = render({"balancer": created | {"events": False}, "worker": created})
    assert {
        one["serviceAccountName"]
        for one in pod_specs(objects).values()
        if "serviceAccountName" in one
    } == {"default"}
    named = {"balancer": {"serviceAccount": {"create": False, "name": "ours"}}}
    (binding,) = [one for one in render(named) if one["kind"] == "RoleBinding"]
    assert [one["name"] for one in binding["subjects"]] == ["ours"]


def test_rbac_rules_are_exactly_these():
    objects = render(FULL)
    rules = {
        (one["kind"], one["metadata"]["name"]): one["rules"]
        for one in objects
        if one["kind"] in {"Role", "ClusterRole"}
    }
    assert rules == {
        ("Role", "eq-equipoise-balancer"): [
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": ["eq-equipoise"],
                "verbs": ["get", "update"],
            },
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        ],
        ("ClusterRole", "moe-eq-equipoise-worker"): [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
        ],
    }
    mounted = {
        pod for pod, spec in pod_specs(objects).items() if spec["automountServiceAccountToken"]
    }
    assert mounted == {"Deployment/eq-equipoise-balancer", "StatefulSet/eq-equipoise-worker"}


def test_the_lease_belongs_to_the_release_and_is_uninstalled_with_it():
    (lease,) = [one for one in render(FULL) if one["kind"] == "Lease"]
    (flag,) = [
        argument
        for argument in containers(render(FULL))["Deployment/eq-equipoise-balancer/balancer"][
            "args"
        ]
        if argument.startswith("--lease-name=")
    ]
    assert flag == f"--lease-name={lease['metadata']['name']}"
    assert "spec" not in lease  # An upgrade must not end anybody's term.
    assert not [one for one in render({}) if one["kind"] == "Lease"]


def test_the_guide_empties_the_lease_which_balancers_may_not_create_again():
    guide = (ROOT / "docs" / "high-availability.md").read_text()
    assert "delete the lease" not in guide
    patched, patch = re.search(r"patch lease (\S+) --type=merge -p '([^']*)'", guide).groups()
    (lease,) = [one for one in render(FULL) if one["kind"] == "Lease"]
    assert patched == lease["metadata"]["name"]
    # What is left is the Lease of the chart, which balancers can take.
    assert json.loads(patch) == {"spec": lease.get("spec")}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("redis", [{"url": "redis://r:6379/0"}, {"trial": {"enabled": True}}])
def test_balancers_that_share_a_store_elect_their_leader_in_one_place(redis, replicas):
    objects = render({"redis": redis, "balancer": {"replicas": replicas}})
    arguments = containers(objects)["Deployment/eq-equipoise-balancer/balancer"]["args"]
    assert "--lease=kubernetes" in arguments
    assert one_of(objects, "Lease", "eq-equipoise")
    store = render({"redis": redis, "balancer": {"replicas": replicas, "lease": "store"}})
    arguments = containers(store)["Deployment/eq-equipoise-balancer/balancer"]["args"]
    assert "--lease=store" in arguments
    assert not [one for one in store if one["kind"] == "Lease"]


def test_helm_keeps_the_claim_of_the_balancers_state():
    objects = render({"balancer": {"storage": {"persistent": True}}})
    claim = one_of(objects, "PersistentVolumeClaim", "eq-equipoise-balancer")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_network_policies_allow_exactly_the_necessary_traffic():
    admitted = {}
    for one in render(FULL):
        if one["kind"] == "NetworkPolicy":
            target = one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            admitted[target] = [
                (_components(rule["from"]), [_port(port) for port in rule["ports"]])
                for rule in one["spec"]["ingress"]
            ]
    assert admitted == {
        "balancer": [
            (["balancer", "worker", "gateway", "test"], ["grpc"]),
            ([{"namespaceSelector": {}}], ["metrics"]),
        ],
        "worker": [
            (["worker", "gateway"], ["grpc"]),
            (["worker"], ["rendezvous", "32768-60999"]),
            ([{"namespaceSelector": {}}], ["metrics"]),
        ],
        "gateway": [
            (["test", {"namespaceSelector": {}}], ["http"]),
            ([{"namespaceSelector": {}}], ["metrics"]),
        ],
        "redis": [(["balancer"], ["redis"])],
        "test": [],
    }


def test_workers_and_gateways_of_peer_pools_reach_the_workers_of_another_release():
    readers, writers = render(READERS), render(WRITERS, release="w")
    assert _calls(writers, "worker", readers, "worker", "grpc")
    assert _calls(writers, "gateway", readers, "worker", "grpc")
    assert _calls(readers, "worker", writers, "worker", "grpc")
    assert _calls(writers, "worker", readers, "balancer", "grpc")
    # Nothing else passes between them, and no other pool gets in.
    assert not _calls(writers, "worker", readers, "worker", "rendezvous")
    assert not _calls(writers, "test", readers, "worker", "grpc")
    others = render(WRITERS | {"pool": "others"}, release="o")
    assert not _calls(others, "worker", readers, "worker", "grpc")
    assert not _calls(others, "gateway", readers, "worker", "grpc")
    odd = render(WRITERS | {"pool": 'a: "b" # c'}, release="odd")
    assert _calls(odd, "worker", readers, "worker", "grpc")


def _calls(objects, component, others, target, port):
    """Whether the others' NetworkPolicy of a component lets the pods of another in on a port."""
    pod = next(labels for labels in _pod_labels(objects) if labels[_COMPONENT] == component)
    (policy,) = [
        one["spec"]
        for one in others
        if one["kind"] == "NetworkPolicy"
        and one["spec"]["podSelector"]["matchLabels"][_COMPONENT] == target
    ]
    return any(
        _selects(peer["podSelector"], pod)
        for rule in policy["ingress"]
        if port in [one["port"] for one in rule["ports"]]
        for peer in rule.get("from", [])
    )


def _pod_labels(objects):
    for one in objects:
        if one["kind"] == "Pod":
            yield one["metadata"]["labels"]
        elif "template" in one.get("spec", {}):
            yield one["spec"]["template"]["metadata"]["labels"]


def _selects(selector, labels):
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", [])
    )


def test_a_second_pools_release_names_its_phase_its_peers_and_its_prefill_pool():
    for values, phase, peers in (
        (READERS, "prefill", 'writers,a: "b" # c'),
        (WRITERS, "decode", "readers"),
    ):
        worker = containers(render(values))["StatefulSet/eq-equipoise-worker/worker"]["args"]
        assert {f"--phase={phase}", f"--peer-pools={peers}", "--hold-s=30"} <= set(worker)
    assert "--prefill-pool=readers" in containers(render(WRITERS))[_GATEWAY]["args"]
    assert not [one for one in containers(render({}))[_GATEWAY]["args"] if "prefill" in one]


def test_helm_test_sends_a_prompt_between_two_pools_with_a_key_if_the_gateway_wants_one():
    keyed = {"gateway": {"apiKeys": {"existingSecret": {"name": "keys-of-clients"}}}}
    name = "Pod/eq-equipoise-test-handover/handover"
    assert name not in containers(render(READERS))
    plain = containers(render(WRITERS))[name]
    assert plain["args"] == ["handover", "--url=http://eq-equipoise-gateway:8080"]
    # It calls no balancer, so it needs no certificate.
    assert {one["name"] for one in plain["env"]} == {"HOME"}
    assert {one["name"] for one in plain["volumeMounts"]} == {"tmp"}
    keys = [
        one["valueFrom"]["secretKeyRef"]
        for one in containers(render(WRITERS | keyed))[name]["env"]
        if one["name"] == "OPENAI_API_KEY"
    ]
    assert keys == [{"name": "keys-of-clients", "key": "keys"}]


def test_a_pod_has_time_to_drain_and_to_wait_for_latents():
    def grace(values):
        return pod_specs(render(values))["StatefulSet/eq-equipoise-worker"][
            "terminationGracePeriodSeconds"
        ]

    assert grace({}) == 40
    assert grace(READERS) == 70
    assert grace(READERS | {"worker": {"holdSeconds": 4.5, "drainTimeoutSeconds": 5}}) == 30


def test_every_port_of_a_service_or_a_policy_exists_in_its_pods():
    objects = render(FULL)
    ports = {}
    for one in objects:
        pod = one if one["kind"] == "Pod" else one.get("spec", {}).get("template")
        if pod:
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            ports[component] = {
                port["name"] for c in pod["spec"]["containers"] for port in c.get("ports", ())
            }
    for one in objects:
        if one["kind"] == "Service":
            component = one["spec"]["selector"]["app.kubernetes.io/component"]
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports[component]
        if one["kind"] == "NetworkPolicy":
            component = one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            named = {port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
            assert {name for name in named if isinstance(name, str)} <= ports[component]


def test_selectors_never_change_with_the_version_and_match_their_pods():
    for one in render(FULL):
        if "template" in one.get("spec", {}):
            selector = one["spec"]["selector"]["matchLabels"]
            assert set(selector) == {
                f"app.kubernetes.io/{word}" for word in ("name", "instance", "component")
            }
            assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("ranks", "slots", "places", "shared", "spare", "strategy"),
    [
        (4, 12, 0, False, 1, "RollingUpdate"),
        (4, 8, 0, False, 0, "OnDelete"),
        (8, 16, 0, False, 6, "RollingUpdate"),
        (8, 16, 0, True, 5, "RollingUpdate"),
        (4, 12, 42, False, 0, "OnDelete"),
        (4, 12, 43, False, 1, "RollingUpdate"),
        (4, 12, 43, True, 0, "OnDelete"),
    ],
)
def test_upgrades_and_disruptions_depend_on_the_spare_ranks(
    ranks, slots, places, shared, spare, strategy
):
    chosen = {"replicas": ranks, "slotsPerRank": slots, "numExperts": 32, "sharedAsRouted": shared}
    chosen |= {"places": places, "numMoeLayers": 4}
    objects = render({"worker": chosen})
    budget = one_of(objects, "PodDisruptionBudget", "eq-equipoise-worker")
    assert budget["spec"]["maxUnavailable"] == spare
    ranks_of = one_of(objects, "StatefulSet", "eq-equipoise-worker")
    assert ranks_of["spec"]["updateStrategy"] == {"type": strategy}
    assert ranks_of["spec"]["podManagementPolicy"] == "Parallel"


def test_gpus_and_network_cards_are_in_requests_and_limits():
    worker = containers(render(FULL))["StatefulSet/eq-equipoise-worker/worker"]
    devices = {"nvidia.com/gpu": 1, "rdma/ib": 1}
    assert devices.items() <= worker["resources"]["limits"].items()
    assert devices.items() <= worker["resources"]["requests"].items()
    plain = containers(render({}))["StatefulSet/eq-equipoise-worker/worker"]
    assert set(plain["resources"]["limits"]) == {"memory"}


def test_a_leader_worker_set_is_one_pool_of_identical_pods():
    objects = render(LEADER_WORKER_SET)
    group = one_of(objects, "LeaderWorkerSet", "eq-equipoise-worker")
    assert group["spec"]["replicas"] == 1
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 4
    assert (
        group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        == pod_specs(render({}))["StatefulSet/eq-equipoise-worker"]
    )
    assert not [one for one in objects if one["kind"] == "StatefulSet"]


def lasting(**times):
    """Values whose certificates last and are renewed so, with the alerts."""
    certificates = {**TLS["tls"]["certManager"], **times}
    rule = {"prometheusRule": {"enabled": True}}
    return {"tls": {**TLS["tls"], "certManager": certificates}, "metrics": rule}


CONTRADICTIONS = {
    "lists this release's own pool default": {"peerPools": ["default"]},
    "add it to peerPools": {"prefillPool": "readers"},
    "set prefillPool in the decode pool's release": {
        "phase": "prefill",
        "prefillPool": "readers",
        "peerPools": ["readers"],
    },
    "peerPools needs tls.workerName": {"peerPools": ["readers"], **TLS},
    "creates certificates that nothing uses": {"tls": {"certManager": {"enabled": True}}},
    "must name the Issuer": {"tls": {"enabled": True, "certManager": {"enabled": True}}},
    "requires a certificate for the gateway: name its Secret in tls.secrets.gateway": {
        "tls": {"enabled": True, "secrets": {"balancer": "b", "worker": "w"}}
    },
    "must differ: they distinguish the roles": {
        "tls": {**TLS["tls"], "balancerName": "eq", "workerName": "eq"}
    },
    "several balancers need a shared store": {"balancer": {"replicas": 2}},
    "leader election needs a shared store": {"balancer": {"lease": "kubernetes"}},
    "mutually exclusive: set one": {
        "redis": {"url": "redis://r:6379/0", "trial": {"enabled": True}}
    },
    "is the password of redis.url": {"redis": {"existingSecret": {"name": "redis"}}},
    "is for a balancer without Redis": {
        "balancer": {"storage": {"persistent": True}},
        "redis": {"url": "redis://r:6379/0"},
    },
    r"worker.replicas \(2\) x worker.slotsPerRank \(12\) cannot hold worker.numExperts \(32\)": {
        "worker": {"replicas": 2}
    },
    r"worker.places \(40\) are for all MoE layers: set worker.numMoeLayers": {
        "worker": {"places": 40}
    },
    "so from 4 to 48": {"worker": {"places": 49, "numMoeLayers": 4}},
    r"worker.replicas \(4\) x worker.places \(31\) cannot hold 32 experts in each of 4 MoE layers: "
    "add ranks, or raise worker.places to 32": {"worker": {"places": 31, "numMoeLayers": 4}},
    r"cannot hold worker.numExperts \(32\) and the shared expert: add ranks or slots": {
        "worker": {"replicas": 2, "slotsPerRank": 16, "sharedAsRouted": True}
    },
    "worker.port and worker.rendezvousPort of a worker are both 7000: they must differ": {
        "worker": {"port": 7000, "rendezvousPort": 7000}
    },
    "metrics.port and worker.port of a worker are both 9090": {"worker": {"port": 9090}},
    "gateway.port and metrics.port of a gateway are both 8080": {"metrics": {"port": 8080}},
    "balancer.port and the page's port of a balancer are both 7080": {"balancer": {"port": 7080}},
    r"firstCollectivePort \(65000\) must be at most lastCollectivePort \(60999\)": {
        "networkPolicy": {"firstCollectivePort": 65000}
    },
    "mutually exclusive: keep the policy in one place": {
        "policy": {"existingConfigMap": "mine", "defaults": {"interval": "9s"}}
    },
    "metrics.prometheusRule.enabled needs metrics.enabled": {
        "metrics": {"enabled": False, "prometheusRule": {"enabled": True}}
    },
    "minReplicas must be at most maxReplicas": {
        "gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}
    },
    "worker.hostNetwork lets every host .* set tls.enabled": {
        "worker": {"hostNetwork": True},
        "networkPolicy": {"balancerFrom": [{"ipBlock": {"cidr": "10.0.0.0/16"}}]},
    },
    "add an ipBlock of the machines to networkPolicy.balancerFrom": {
        **TLS,
        "worker": {"hostNetwork": True},
        "networkPolicy": {"balancerFrom": [{"namespaceSelector": {}}]},
    },
    r"tls.certManager.renewBefore \(90m\) must be less than duration \(1h30m\)": lasting(
        duration="1h30m", renewBefore="90m"
    ),
    r"certificateHours \(168\) must be less than tls.certManager.renewBefore \(167h59m\)": lasting(
        duration="720h", renewBefore="167h59m"
    ),
    r"balancer.externalAddress is \[fd00::1\]:7070, .*set tls.balancerName": {
        **TLS,
        "balancer": {"enabled": False, "externalAddress": "[fd00::1]:7070"},
    },
    "balancer.serviceAccount.create is false without a name.* set balancer.serviceAccount.name": {
        "balancer": {"serviceAccount": {"create": False}}
    },
    "worker.serviceAccount.create is false without a name.* set worker.serviceAccount.name": {
        "worker": {"serviceAccount": {"create": False}, "topology": {"source": "nodeLabels"}}
    },
    "externalAddress must name": {"balancer": {"enabled": False}},
    "set without worker.checkpoint.path": {"worker": {"checkpoint": {"volume": {"emptyDir": {}}}}},
}


@pytest.mark.parametrize(("words", "values"), CONTRADICTIONS.items())
def test_contradicting_values_fail_with_the_remedy(words, values):
    with pytest.raises(RenderError, match=words):
        render(values)


def test_certificates_may_be_short_if_the_alert_is_later_than_their_renewal():
    values = lasting(duration="24h", renewBefore="8h30m")
    values["metrics"]["prometheusRule"]["thresholds"] = {"certificateHours": 8}
    assert one_of(render(values), "Certificate", "eq-equipoise-worker")


def test_a_balancer_may_have_an_address_of_ipv6():
    balancer = {"enabled": False, "externalAddress": "[fd00::1]:7070"}
    tls = {**TLS["tls"], "balancerName": "eq-balancer.other.svc"}
    worker = containers(render({"tls": tls, "balancer": balancer}))[
        "StatefulSet/eq-equipoise-worker/worker"
    ]
    assert "--balancer=[fd00::1]:7070" in worker["args"]
    names = {one["name"]: one.get("value") for one in worker["env"]}
    assert names["EQUIPOISE_TLS_BALANCER_NAME"] == "eq-balancer.other.svc"


def test_a_port_may_be_set_on_the_command_line():
    # Numbers of --set are of another type than those of a file.
    done = helm_command("template", "eq", CHART, "--set", "worker.port=7171")
    assert "--listen=0.0.0.0:7171" in done


def test_a_second_release_reaches_the_balancer_of_the_first():
    first = one_of(render({}), "NetworkPolicy", "eq-equipoise-balancer")
    peers = [
        peer["podSelector"]["matchLabels"].items()
        for peer in first["spec"]["ingress"][0]["from"]
        if "podSelector" in peer
    ]
    second = render(
        {
            "pool": "decode",
            "balancer": {"enabled": False, "externalAddress": "eq-equipoise-balancer.moe.svc:7070"},
        },
        release="decode",
    )
    templates = [
        one["spec"]["template"] for one in second if one["kind"] in {"Deployment", "StatefulSet"}
    ]
    for template in [*templates, one_of(second, "Pod", "decode-equipoise-test-serving")]:
        labels = template["metadata"]["labels"].items()
        assert any(peer <= labels for peer in peers), labels


def test_no_key_is_repeated_whatever_labels_are_set():
    chart_label = {"app.kubernetes.io/name": "mine", "team": "ours"}
    values = {
        "commonLabels": chart_label,
        **{one: {"podLabels": {**chart_label, "n": "1"}} for one in ("balancer", "worker")},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": chart_label},
            "prometheusRule": {"enabled": True, "labels": chart_label},
        },
    }
    for one in render(values):  # Fails for a repeated key.
        labels = one["metadata"]["labels"]
        assert (labels["app.kubernetes.io/name"], labels["team"]) == ("equipoise", "ours")


def test_odd_text_and_large_numbers_reach_the_processes_unchanged():
    odd = {
        "pool": 'a: "b" # c',
        "worker": {"checkpoint": {"path": "/models/x: y"}},
        "gateway": {"model": "m: #1", "maxOpenRequests": 2_000_000},
        "runAsUser": 1_000_660_000,
    }
    objects = render(odd)
    arguments = str([one.get("args") for one in containers(objects).values()])
    for flag in ("--model=m: #1", "--checkpoint=/models/x: y", "--max-open-requests=2000000"):
        assert flag in arguments
    assert all('--pool=a: "b" # c' in one["args"] for one in _with_a_pool(objects))
    for spec in pod_specs(objects).values():
        assert spec["securityContext"]["runAsUser"] == 1_000_660_000
        assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_releases_whose_long_names_begin_alike_share_no_object():
    first, second = (f"a-fleet-whose-name-is-long-and-ends-in-{end}" for end in ("one", "two"))
    names = [
        {(one["kind"], one["metadata"]["name"]) for one in render(release=release)}
        for release in (first, second)
    ]
    assert names[0].isdisjoint(names[1])
    assert all(len(name) <= 63 for _, name in names[0] | names[1])
    exact = 30 * "e" + "-equipoise"
    assert one_of(render(release=30 * "e"), "Deployment", f"{exact}-balancer")
    assert one_of(render(release=exact), "Deployment", f"{exact}-balancer")


@pytest.mark.parametrize("release", ["eq.v2", "3fs"])
def test_a_release_whose_name_no_service_can_have_is_rejected_with_the_remedy(release):
    with pytest.raises(RenderError, match=f"begin with {release}-equipoise, .*set fullnameOverr"):
        render(release=release)
    assert one_of(render({"fullnameOverride": "eq"}, release=release), "Service", "eq-balancer")


def test_every_namespaced_object_names_its_namespace():
    for one in render(FULL):
        is_cluster_wide = one["kind"].startswith("Cluster")
        assert ("namespace" in one["metadata"]) is not is_cluster_wide, one["kind"]


def _with_a_pool(objects):
    return [
        one
        for name, one in containers(objects).items()
        if name.rpartition("/")[2] in {"worker", "gateway", "status"}
    ]


def _components(peers):
    return [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        if "podSelector" in peer
        else peer
        for peer in peers
    ]


def _port(port):
    return f"{port['port']}-{port['endPort']}" if "endPort" in port else port["port"]
