"""One release from install to uninstall, as its operators live with it, under traffic all the time.

Real helm and kubectl, a strict API server, and the chart's pods as processes of their own network,
user and read-only root, that speak mutual TLS with each other. The tests follow each other: each
leaves the pool serving.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from equipoise.trust.credentials import Credentials
from equipoise.trust.settings import Tls
from equipoise_model.train.data import heldout_prompts
from tests.support.authority import Authority
from tests.support.clusters import NAMESPACE, ROOT, until
from tests.support.http_traffic import HttpTraffic
from tests.support.installed_release import (
    BALANCER_NAME,
    BOUND_S,
    WORKER_NAME,
    Release,
    is_answered,
    named,
    secrets_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RELEASE = "eq"
CHART = str(ROOT / "helm" / "equipoise")
VALUES = str(Path(__file__).parent / "values.yaml")
NODE = """
apiVersion: v1
kind: Node
metadata:
  name: node-0
  labels: {nvidia.com/gpu.clique: c0ffee.1, topology.kubernetes.io/zone: zone-b}
"""
KINDS = (
    *("pods", "deployments", "statefulsets", "services", "configmaps", "secrets"),
    *("serviceaccounts", "roles", "rolebindings", "clusterroles", "clusterrolebindings"),
    *("networkpolicies", "poddisruptionbudgets", "leases"),
)
SLOWNESS = max(1.0, os.getloadavg()[0] / 4)
"""How much longer things take where other work wants the cores too."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secrets(cluster, authority):
    """What an operator brings along: a Secret with a certificate for each kind of pod."""
    made = secrets_of(authority)
    for secret in made:
        cluster.kubectl("apply", "-f", "-", text=json.dumps(secret))
    with cluster.mounting_secrets():
        yield [secret["metadata"]["name"] for secret in made]


@pytest.fixture(scope="module")
def release(cluster, secrets, authority):
    assert secrets
    if cluster.is_mini:
        cluster.kubectl("apply", "-f", "-", text=NODE)
    found = {kind: set(cluster.objects(kind)) for kind in KINDS}
    values = ("-f", VALUES, *cluster.values)
    cluster.helm("install", RELEASE, CHART, *values, "--wait", "--timeout=280s")
    return Release(cluster, reader=named(authority.issue("reader/tests")), found=found)


@pytest.fixture(scope="module")
def traffic(cluster, release):
    prompts = {
        domain: [text.decode() for text in heldout_prompts(domain, num_prompts=8, seed=1)]
        for domain in ("code", "english")
    }
    host, port = cluster.service_address("eq-equipoise-gateway")
    with HttpTraffic(host, port, prompts, num_clients=4, max_tokens=24) as traffic:
        yield traffic


def test_requests_are_answered_and_helm_test_agrees(cluster, release, traffic):
    release.until_serving()
    until(lambda: traffic.num_answered >= 8, timeout_s=BOUND_S, what="eight answers")
    assert "Phase:          Succeeded" in cluster.helm("test", RELEASE, "--timeout=100s")
    assert not traffic.lost


def test_helm_test_fails_while_a_rank_is_missing(cluster, release, traffic):
    epoch = int(release.until_serving()["epoch"])
    scale_ranks(cluster, 3)
    try:
        missing = release.until(
            lambda status: status["health"] == "POOL_HEALTH_DEGRADED" and len(status["ranks"]) == 3,
            what="a pool of three ranks that is degraded",
        )
        with pytest.raises(AssertionError, match=r"Phase: +Failed"):
            cluster.helm("test", RELEASE, "--timeout=45s")
        said = cluster.log("eq-equipoise-test-serving")
        assert "degraded" in said
        assert missing["health_reason"] in " ".join(said.split())
    finally:
        scale_ranks(cluster, 4)
    release.until_serving(epoch_after=epoch + 1)
    assert "Phase:          Succeeded" in cluster.helm("test", RELEASE, "--timeout=100s")
    assert not traffic.lost


def scale_ranks(cluster, number):
    """As `kubectl scale` does, while every worker knows that its pool is to have four ranks."""
    patch = json.dumps({"spec": {"replicas": number}})
    cluster.kubectl("patch", "statefulset", "eq-equipoise-worker", "--type=merge", "-p", patch)


def test_labels_of_the_machine_reach_the_status(cluster, release):
    if not cluster.is_mini:
        pytest.skip("the labels of this cluster's machines are not the tests' to set")
    ranks = release.until_serving()["ranks"]
    places = {(rank["node"], rank["host"], rank["zone"]) for rank in ranks}
    assert places == {("c0ffee.1", "node-0", "zone-b")}


def test_a_caller_without_the_fleets_certificate_is_rejected_everywhere(
    cluster, release, authority, tmp_path
):
    ip = cluster.pods("worker")["eq-equipoise-worker-0"]["status"]["podIP"]
    worker = cluster.pod_address("worker", ip=ip, port=7071)
    strangers = {
        "plain text": Tls(insecure=True),
        "no certificate": Tls(tls_ca=str(authority.ca_file)),
        "another authority": Authority(tmp_path).issue("reader/tests"),
    }
    ports = {release.leader_from_here: BALANCER_NAME, worker: WORKER_NAME}
    let_in = {
        (who, address)
        for who, tls in strangers.items()
        for address, name in ports.items()
        if is_answered(address, Credentials(tls, balancer_name=name))
    }
    assert not let_in
    gateway = authority.issue("gateway")
    assert all(
        is_answered(address, Credentials(gateway, balancer_name=name))
        for address, name in ports.items()
    )
    with pytest.raises(grpc.RpcError, match="may not call Status: allowed roles are"):
        release.ask(named(authority.issue("worker/default/worker-9")))


def test_a_worker_without_a_certificate_is_rejected(release):
    intruder = subprocess.Popen(
        [
            *(sys.executable, "-m", "equipoise.cli.main", "worker", "--insecure"),
            *(
                "--balancer",
                release.leader_from_here,
                "--worker",
                "intruder",
                "--listen",
                "127.0.0.1:0",
            ),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    ended = threading.Timer(BOUND_S, intruder.kill)
    ended.start()
    try:
        line_of_balancer = next(
            (line for line in iter(intruder.stderr.readline, "") if "balancer" in line), ""
        )
    finally:
        ended.cancel()
        intruder.kill()
        intruder.communicate()
    assert "it may require TLS: set tls_ca here" in line_of_balancer
    assert "intruder" not in {rank["worker"] for rank in release.until_serving()["ranks"]}


LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


def test_the_server_denies_what_it_should(cluster, release):
    node = next(iter(cluster.objects("nodes")))
    answers = {
        (account, path): cluster.answers(f"eq-equipoise-{account}", path)
        for account in ("balancer", "worker")
        for path in (
            f"{LEASES}/eq-equipoise",
            f"{LEASES}/another",
            LEASES,
            f"/api/v1/namespaces/{NAMESPACE}/secrets",
            f"/api/v1/namespaces/{NAMESPACE}/configmaps",
            f"/api/v1/nodes/{node}",
            "/api/v1/nodes",
        )
    }
    allowed = {asked for asked, status in answers.items() if status == 200}
    assert allowed == {
        ("balancer", f"{LEASES}/eq-equipoise"),
        ("worker", f"/api/v1/nodes/{node}"),
    }
    assert set(answers.values()) == {200, 403}


def test_a_traffic_shift_leads_to_a_rollout(cluster, release, traffic):
    before = release.until(
        lambda status: int(status["windows_closed"]) >= 2 and "rollout" not in status,
        what="two windows of the first traffic, and no rollout left",
    )
    traffic.shift_to("english")
    after = release.until(
        lambda status: int(status["rollouts_completed"]) > int(before["rollouts_completed"]),
        what="a rollout after the shift",
    )
    assert int(after["generation"]) > int(before["generation"])
    assert not traffic.lost
    # Ranks gave each other the experts, over TLS: none had to fall back on the checkpoint.
    for name in cluster.pods("worker"):
        assert "could not fetch expert" not in cluster.log(name)


def test_a_policy_edit_takes_effect_within_seconds_and_a_wrong_one_is_rejected(
    cluster, release, traffic
):
    before = release.until_serving()["policy"]
    good = cluster.objects("configmaps")["eq-equipoise-policy"]["data"]["policy.yaml"]
    edited = good.replace("interval: 3s", "interval: 4s")

    started = time.monotonic()
    edit_policy(cluster, edited)
    after = release.until(
        lambda status: status["policy"]["hash"] != before["hash"], what="the edited policy"
    )
    took_s = time.monotonic() - started
    assert (after["interval_s"], after["policy"]["rejection"]) == (4.0, "")
    if cluster.is_mini:  # A kubelet takes up to two minutes to bring it to the pod.
        assert took_s < 5.0 * SLOWNESS, f"{took_s:.1f} s"

    edit_policy(cluster, edited.replace("interval: 4s", "intervall: 9s"))
    rejected = release.until(
        lambda status: status["policy"]["rejection"], what="the rejection of a wrong policy"
    )
    assert "interval" in rejected["policy"]["rejection"]
    assert rejected["policy"]["hash"] == after["policy"]["hash"]
    assert rejected["interval_s"] == 4.0
    until(
        lambda: [
            event["message"]
            for event in cluster.objects("events").values()
            if event["reason"] == "PolicyRejected" and "intervall" in event["message"]
        ],
        timeout_s=BOUND_S,
        what="an event that reports the wrong policy",
    )

    edit_policy(cluster, good)
    release.until(
        lambda status: status["policy"]["hash"] == before["hash"], what="the first policy again"
    )
    assert not traffic.lost


def test_another_balancer_takes_over_when_the_leaders_pod_is_deleted(cluster, release, traffic):
    before, term = release.until_serving(), release.term
    address = release.leader.rpartition(":")[0]
    (pod,) = (
        name for name, pod in cluster.pods("balancer").items() if pod["status"]["podIP"] == address
    )
    cluster.kubectl("delete", "pod", pod, "--wait=false")
    until(
        lambda: release.term > term and release.leader.rpartition(":")[0] != address,
        timeout_s=BOUND_S,
        what="another leader",
    )
    after = release.until_serving()
    assert after["epoch"] == before["epoch"]  # Ranks step on without a balancer.
    assert int(after["generation"]) >= int(before["generation"])
    assert not traffic.lost


def test_the_pool_forms_again_without_losing_a_request_when_a_ranks_pod_is_deleted(
    cluster, release, traffic
):
    epoch = int(release.until_serving()["epoch"])
    uid = cluster.pods("worker")["eq-equipoise-worker-2"]["metadata"]["uid"]
    cluster.kubectl("delete", "pod", "eq-equipoise-worker-2", "--wait=false")
    until(
        lambda: (
            cluster.pods("worker").get("eq-equipoise-worker-2", {"metadata": {"uid": uid}})[
                "metadata"
            ]["uid"]
            != uid
        ),
        timeout_s=BOUND_S,
        what="a new pod in the place of the deleted one",
    )
    release.until_serving(epoch_after=epoch + 1)  # One epoch without it, one with it.
    answered = traffic.num_answered
    until(lambda: traffic.num_answered > answered, timeout_s=BOUND_S, what="an answer after that")
    assert not traffic.lost


def test_an_upgrade_replaces_every_pod_without_losing_a_request(cluster, release, traffic):
    release.until_serving()
    tag = os.environ.get("EQUIPOISE_SECOND_TAG", "second")
    if not cluster.is_mini and "EQUIPOISE_SECOND_TAG" not in os.environ:
        pytest.skip("which image to upgrade to, $EQUIPOISE_SECOND_TAG must say")
    cluster.helm(
        *("upgrade", RELEASE, CHART, "-f", VALUES, *cluster.values, "--wait", "--timeout=500s"),
        *("--set", f"image.controlPlane.tag={tag},image.worker.tag={tag}"),
        timeout_s=520,
    )
    for component in ("balancer", "worker", "gateway"):
        for pod in cluster.pods(component).values():
            assert pod["spec"]["containers"][0]["image"].endswith(f":{tag}")
    release.until_serving()
    answered = traffic.num_answered
    until(lambda: traffic.num_answered > answered, timeout_s=BOUND_S, what="an answer after that")
    assert not traffic.lost


def edit_policy(cluster, text):
    """As `kubectl edit configmap` does."""
    patch = json.dumps({"data": {"policy.yaml": text}})
    cluster.kubectl("patch", "configmap", "eq-equipoise-policy", "--type=merge", "-p", patch)


def test_uninstall_leaves_nothing_behind(cluster, release, traffic, secrets):
    traffic.end()
    assert not traffic.lost
    cluster.helm("uninstall", RELEASE, "--wait", "--timeout=200s")
    cluster.kubectl("delete", "secret", *secrets)  # Whatever created them.
    for kind in KINDS:
        until(
            lambda kind=kind: set(cluster.objects(kind)) <= release.found[kind],
            timeout_s=BOUND_S,
            what=f"no {kind} that were not there before",
        )
