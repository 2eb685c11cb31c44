"""A release on a cluster as its operators see it: certificates, and the balancers' answers."""

import base64
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from equipoise.trust.credentials import Credentials
from tests.support import reflected
from tests.support.clusters import NAMESPACE, until

BALANCER_NAME = f"eq-equipoise-balancer.{NAMESPACE}.svc"
WORKER_NAME = f"eq-equipoise-worker.{NAMESPACE}.svc"
GATEWAY_NAME = f"eq-equipoise-gateway.{NAMESPACE}.svc"
BOUND_S = 120.0
"""Longest wait for anything that is a matter of seconds on a machine with nothing else to do."""


class Release:
    """What the balancers of the release say, asked as grpcurl would.

    `found` are the objects that were there before it, by kind.
    """

    def __init__(self, cluster, *, reader, found):
        self._cluster = cluster
        self.found = found
        self._reader = reader
        self._leader = ("", "")

    @property
    def leader(self):
        """host:port at which the leader advertises itself, within the cluster."""
        lease = self._cluster.objects("leases")["eq-equipoise"]
        return lease["metadata"]["annotations"]["equipoise/leader-address"]

    @property
    def leader_from_here(self):
        """host:port by which the leader is reached."""
        leader = self.leader
        if leader != self._leader[0]:
            ip, _, port = leader.rpartition(":")
            self._leader = (leader, self._cluster.pod_address("balancer", ip=ip, port=int(port)))
        return self._leader[1]

    @property
    def term(self):
        return self._cluster.objects("leases")["eq-equipoise"]["spec"]["leaseTransitions"]

    def status(self):
        """The pool's status from the leader; empty while there is none."""
        try:
            answer = self.ask(self._reader)
        except (grpc.RpcError, grpc.FutureTimeoutError, KeyError, ValueError):
            return {}
        return answer["status"]

    def ask(self, credentials):
        """Return the leader's answer to a caller.

        Raises:
            grpc.RpcError, grpc.FutureTimeoutError: it does not answer or rejects the call.
        """
        return reflected.call(
            self.leader_from_here, "equipoise_api.v1.Status/GetStatus", credentials=credentials
        )

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


def secrets_of(authority):
    """Secrets with a certificate for each kind of pod, as the chart's values name them."""
    made = []
    for pod, identity, host in (
        ("balancer", "reader/balancer", BALANCER_NAME),
        ("worker", "worker/default/*", WORKER_NAME),
        ("gateway", "gateway", GATEWAY_NAME),
    ):
        uri = f"spiffe://cluster.local/equipoise/{identity}"
        tls = authority.issue(pod, hosts=(host,), uri=uri)
        files = {"ca.crt": tls.tls_ca, "tls.crt": tls.tls_cert, "tls.key": tls.tls_key}
        made.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{pod}-tls"},
                "type": "Opaque",
                "data": {
                    key: base64.b64encode(Path(path).read_bytes()).decode()
                    for key, path in files.items()
                },
            }
        )
    return made


def named(tls):
    """Credentials of a caller that reaches balancers by their pods' addresses."""
    return Credentials(tls, balancer_name=BALANCER_NAME)


def is_answered(address, credentials):
    """Return whether a health check of a port gets any answer."""
    with credentials.blocking_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        except grpc.RpcError as error:
            unheard = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            return error.code() not in unheard
        return True
