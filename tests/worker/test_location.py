"""A worker's location comes from its settings or from the labels of its Node."""

import http.server
import json
import re
import shutil
import ssl
import subprocess
import threading

import pytest

from equipoise.rank.errors import WorkerError
from equipoise.worker.location import Location, find_location
from equipoise.worker.settings import WorkerSettings

CLIQUE, ZONE = "nvidia.com/gpu.clique", "topology.kubernetes.io/zone"


async def test_the_host_is_the_node_unless_a_fast_domain_is_named():
    assert await find_location(WorkerSettings(host="m1")) == Location(node="m1", host="m1", zone="")
    named = WorkerSettings(host="m1", node="rack.3", zone="z")
    assert await find_location(named) == Location(node="rack.3", host="m1", zone="z")


async def test_labels_of_the_cluster_name_the_fast_domain_and_the_zone(cluster):
    cluster.nodes["m1"] = {CLIQUE: "a1b2.7", ZONE: "zone-b"}
    location = await find_location(asking("m1"), account=cluster.account)
    assert location == Location(node="a1b2.7", host="m1", zone="zone-b")


async def test_a_machine_without_the_label_is_a_node_of_its_own(cluster):
    cluster.nodes["m1"] = {ZONE: "zone-b"}
    location = await find_location(asking("m1"), account=cluster.account)
    assert location == Location(node="m1", host="m1", zone="zone-b")


async def test_settings_take_precedence_over_labels(cluster):
    cluster.nodes["m1"] = {CLIQUE: "a1b2.7", ZONE: "zone-b"}
    settings = WorkerSettings(host="m1", node="mine", node_label=CLIQUE, zone_label=ZONE)
    assert (await find_location(settings, account=cluster.account)).node == "mine"


async def test_a_cluster_that_denies_access_is_an_error_with_the_remedy(cluster):
    with pytest.raises(WorkerError, match=r"cannot read node m2 \(404 .*may the service account"):
        await find_location(asking("m2"), account=cluster.account)
    (cluster.account / "token").write_text("stale")
    with pytest.raises(WorkerError, match=r"cannot read node m1 \(403 "):
        await find_location(asking("m1"), account=cluster.account)


async def test_an_unreachable_cluster_does_not_keep_a_worker_from_serving(cluster, caplog):
    cluster.close()
    assert await find_location(asking("m1"), account=cluster.account) == Location(
        node="m1", host="m1", zone=""
    )
    assert "cannot read labels of node m1, using its name as node" in caplog.text


async def test_labels_outside_a_cluster_and_without_an_account_are_rejected(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(WorkerError, match="this is not a pod: set node and zone"):
        await find_location(asking("m1"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(WorkerError, match=r"no service account .*mount its token"):
        await find_location(asking("m1"), account=tmp_path)


def asking(host):
    return WorkerSettings(host=host, node_label=CLIQUE, zone_label=ZONE)


class Cluster:
    """An API server over TLS that knows nodes and one token."""

    def __init__(self, account):
        self.account, self.nodes = account, {}
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = re.fullmatch("/api/v1/nodes/(.+)", self.path)[1]
                status = 200 if name in cluster.nodes else 404
                if self.headers["Authorization"] != "Bearer good":
                    status = 403
                labels = cluster.nodes.get(name, {})
                body = json.dumps({"metadata": {"name": name, "labels": labels}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(account / "ca.crt", account / "ca.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the cluster's certificate, and there is none here")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-days", "1", "-subj", "/CN=cluster",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "token").write_text("good\n")
    cluster = Cluster(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.server.server_port))
    yield cluster
    cluster.close()
