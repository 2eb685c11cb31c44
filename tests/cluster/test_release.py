"""One release from install to uninstall, as its operators live with it, under traffic all the time.

Real helm and kubectl, a strict API server, and the chart's pods as processes of their own network,
user and read-only root. The tests follow each other: each leaves the pool serving.
"""

import json
import os
import time
from pathlib import Path

import grpc
import pytest
import reflected
from http_traffic import HttpTraffic
from mini_cluster import NAMESPACE, ROOT, MiniCluster, until

from equipoise_model.train.data import heldout_prompts

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
SLOWNESS = max(1.0, os.getloadavg()[0] / 4)
"""How much longer things take where other work wants the cores too."""

BOUND_S = 120.0
"""Longest wait for anything that is a matter of seconds on a machine with nothing else to do."""


@pytest.fixture(scope="module")
def cluster():
    if not os.environ.get("EQUIPOISE_IN_MINICLUSTER"):
        pytest.skip("`make test-cluster` runs these, in the network of a mini cluster")
    return MiniCluster()


@pytest.fixture(scope="module")
def release(cluster):
    cluster.kubectl("apply", "-f", "-", text=NODE)
    cluster.helm(
        "install", RELEASE, CHART, "--create-namespace", "-f", VALUES, "--wait", "--timeout=280s"
    )
    return Release(cluster)


@pytest.fixture(scope="module")
def traffic(cluster, release):
    prompts = {
        domain: [text.decode() for text in heldout_prompts(domain, num_prompts=8, seed=1)]
        for domain in ("code", "english")
    }
    host = cluster.address("eq-equipoise-gateway")
    with HttpTraffic(host, 8080, prompts, num_clients=4, max_tokens=24) as traffic:
        yield traffic


class Release:
    """What the balancers of the release say, asked as grpcurl would."""

    def __init__(self, cluster):
        self._cluster = cluster

    @property
    def leader(self):
        lease = self._cluster.objects("leases")["eq-equipoise"]
        return lease["metadata"]["annotations"]["equipoise/leader-address"]

    @property
    def term(self):
        return self._cluster.objects("leases")["eq-equipoise"]["spec"]["leaseTransitions"]

    def status(self):
        """The pool's status from the leader; empty while there is none."""
        try:
            answer = reflected.call(self.leader, "equipoise_api.v1.Status/GetStatus")
        except (grpc.RpcError, grpc.FutureTimeoutError, KeyError):
            return {}
        return answer["status"]

    def until(self, condition, *, what, timeout_s=BOUND_S):
        """The first status for which the condition holds."""
        return until(
            lambda: (status := self.status()) and condition(status) and status,
            timeout_s=timeout_s,
            what=what,
        )

    def until_serving(self, *, epoch_after=0):
        """The status once all four ranks serve, in a later epoch."""
        return self.until(
            lambda status: (
                status["health"] == "POOL_HEALTH_SERVING"
                and len(status["ranks"]) == 4
                and int(status["epoch"]) > epoch_after
            ),
            what=f"four ranks that serve after epoch {epoch_after}",
        )


def test_requests_are_answered_and_helm_test_agrees(cluster, release, traffic):
    release.until_serving()
    until(lambda: traffic.num_answered >= 8, timeout_s=BOUND_S, what="eight answers")
    assert "Phase:          Succeeded" in cluster.helm("test", RELEASE, "--timeout=100s")
    assert not traffic.lost


def test_labels_of_the_machine_reach_the_status(release):
    ranks = release.until_serving()["ranks"]
    places = {(rank["node"], rank["host"], rank["zone"]) for rank in ranks}
    assert places == {("c0ffee.1", "node-0", "zone-b")}


LEASES = "/apis/coordination.k8s.io/v1/namespaces/moe/leases"


def test_the_server_denies_what_it_should(cluster, release):
    answers = {
        (account, path): cluster.answers(f"eq-equipoise-{account}", path)
        for account in ("balancer", "worker")
        for path in (
            f"{LEASES}/eq-equipoise",
            f"{LEASES}/another",
            LEASES,
            "/api/v1/namespaces/moe/secrets",
            "/api/v1/namespaces/moe/configmaps",
            "/api/v1/nodes/node-0",
            "/api/v1/nodes",
        )
    }
    allowed = {asked for asked, status in answers.items() if status == 200}
    assert allowed == {
        ("balancer", f"{LEASES}/eq-equipoise"),
        ("worker", "/api/v1/nodes/node-0"),
    }
    assert set(answers.values()) == {200, 403}


def test_a_shift_of_traffic_is_answered_by_a_rollout(release, traffic):
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


def test_an_edit_of_the_policy_is_live_within_seconds_and_a_wrong_one_is_kept_out(
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
    assert (after["interval_s"], after["policy"]["refusal"]) == (4.0, "")
    assert took_s < 5.0 * SLOWNESS, f"{took_s:.1f} s"

    edit_policy(cluster, edited.replace("interval: 4s", "intervall: 9s"))
    refused = release.until(
        lambda status: status["policy"]["refusal"], what="the refusal of a wrong policy"
    )
    assert "interval" in refused["policy"]["refusal"]
    assert refused["policy"]["hash"] == after["policy"]["hash"]
    assert refused["interval_s"] == 4.0
    until(
        lambda: [
            event["message"]
            for event in cluster.objects("events").values()
            if event["reason"] == "PolicyRejected" and "intervall" in event["message"]
        ],
        timeout_s=BOUND_S,
        what="an event that tells of the wrong policy",
    )

    edit_policy(cluster, good)
    release.until(
        lambda status: status["policy"]["hash"] == before["hash"], what="the first policy again"
    )
    assert not traffic.lost


def test_the_leaders_pod_is_deleted_and_another_one_takes_over(cluster, release, traffic):
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


def test_a_ranks_pod_is_deleted_and_the_pool_forms_anew_without_losing_a_request(
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
    cluster.helm(
        *("upgrade", RELEASE, CHART, "-f", VALUES, "--wait", "--timeout=500s"),
        *("--set", "image.controlPlane.tag=second,image.worker.tag=second"),
        timeout_s=520,
    )
    for component in ("balancer", "worker", "gateway"):
        for pod in cluster.pods(component).values():
            assert pod["spec"]["containers"][0]["image"].endswith(":second")
    release.until_serving()
    answered = traffic.num_answered
    until(lambda: traffic.num_answered > answered, timeout_s=BOUND_S, what="an answer after that")
    assert not traffic.lost


def edit_policy(cluster, text):
    """As `kubectl edit configmap` does."""
    patch = json.dumps({"data": {"policy.yaml": text}})
    cluster.kubectl("patch", "configmap", "eq-equipoise-policy", "--type=merge", "-p", patch)


def test_uninstall_leaves_nothing_behind(cluster, release, traffic):
    traffic.end()
    assert not traffic.lost
    cluster.helm("uninstall", RELEASE, "--wait", "--timeout=200s")
    kinds = (
        *("pods", "deployments", "statefulsets", "services", "configmaps", "secrets"),
        *("serviceaccounts", "roles", "rolebindings", "clusterroles", "clusterrolebindings"),
        *("networkpolicies", "poddisruptionbudgets", "leases"),
    )
    for kind in kinds:
        until(
            lambda kind=kind: not cluster.objects(kind),
            timeout_s=BOUND_S,
            what=f"no {kind} in {NAMESPACE}",
        )
