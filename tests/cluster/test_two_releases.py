"""A prefill and a decode pool as two releases: `helm test` sees that latents pass between them."""

import pytest

from tests.support.clusters import NAMESPACE, ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHART = str(ROOT / "helm" / "equipoise")
SMALL = ("--set=balancer.replicas=1,worker.replicas=2,worker.slotsPerRank=17", "--wait")
READERS = ("pool=readers", "phase=prefill", "peerPools={writers}", "gateway.enabled=false")
WRITERS = (
    "pool=writers",
    "phase=decode",
    "peerPools={readers}",
    "prefillPool=readers",
    "balancer.enabled=false",
    f"balancer.externalAddress=readers-equipoise-balancer.{NAMESPACE}.svc:7070",
)


def test_helm_test_hands_a_prompt_over_from_one_release_to_the_other(cluster):
    for release, values in (("readers", READERS), ("writers", WRITERS)):
        options = [f"--set={value}" for value in values]
        cluster.helm("install", release, CHART, *cluster.values, *SMALL, *options, "--timeout=280s")
    assert cluster.helm("test", "readers", "--timeout=100s").count("Succeeded") == 1
    assert cluster.helm("test", "writers", "--timeout=100s").count("Succeeded") == 2
