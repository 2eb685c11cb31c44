"""Clusters that tests install a release on: the mini cluster, or the one in $KUBECONFIG."""

import base64
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from equipoise.cli.kubectl.port_forward import port_forwarded

ROOT = Path(__file__).parents[2]
NAMESPACE = "equipoise-test"
MINI_SERVER = "http://127.0.0.1:8080"
VALUES = ROOT / "tests" / "cluster"


def cluster_at_hand():
    """The cluster to test on; skips, with the reason, where there is none."""
    if os.environ.get("EQUIPOISE_IN_MINICLUSTER"):
        return MiniCluster()
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: `make test-cluster` makes a mini one, or name one in $KUBECONFIG")
    for tool in ("helm", "kubectl"):
        if shutil.which(tool) is None:
            pytest.skip(f"$KUBECONFIG names a cluster, but {tool} is not here")
    if not os.environ.get("EQUIPOISE_CLUSTER_VALUES"):
        pytest.skip(
            "$KUBECONFIG names a cluster; which images it can pull, a file of values must say: "
            "$EQUIPOISE_CLUSTER_VALUES"
        )
    cluster = AnyCluster()
    try:
        cluster.kubectl("version", "--request-timeout=20s")
    except AssertionError as error:
        pytest.skip(f"the cluster in $KUBECONFIG does not answer: {error}")
    return cluster


class AnyCluster:
    """The cluster in $KUBECONFIG, by its helm and kubectl; pods are reached by port-forward."""

    is_mini = False

    def __init__(self):
        self._forwards = ExitStack()

    @property
    def values(self):
        """Options of helm that make the chart fit this cluster."""
        return ("-f", os.environ["EQUIPOISE_CLUSTER_VALUES"], "--set=gateway.service.type=NodePort")

    def close(self):
        """End what forwards ports."""
        self._forwards.close()

    @contextmanager
    def own_namespace(self):
        """Have the namespace in the block only, and remove whatever tests left in it."""
        if self.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "--output=name"):
            pytest.fail(
                f"the cluster has a namespace {NAMESPACE}, where the tests would overwrite what is "
                f"there: delete it if an earlier run left it"
            )
        self.kubectl("create", "namespace", NAMESPACE)
        try:
            yield
        finally:
            # Not all that a release has is in the namespace.
            of_any_state = ("--deployed", "--failed", "--pending", "--uninstalling")
            for release in self.helm("list", "--short", *of_any_state).split():
                self.helm("uninstall", release, "--wait", "--timeout=200s")
            self._run("kubectl", "delete", "namespace", NAMESPACE, timeout_s=300)

    def helm(self, *arguments, timeout_s=300):
        """Run helm in the namespace; returns what it prints."""
        return self._run("helm", "-n", NAMESPACE, *arguments, timeout_s=timeout_s)

    def kubectl(self, *arguments, text=None):
        """Run kubectl in the namespace; returns what it prints."""
        return self._run("kubectl", "-n", NAMESPACE, *arguments, text=text, timeout_s=60)

    def objects(self, kind, selector=""):
        """Objects of a kind, by name."""
        output = self.kubectl("get", kind, "-o", "json", *(["-l", selector] if selector else []))
        return {one["metadata"]["name"]: one for one in json.loads(output)["items"]}

    def pods(self, component):
        """Pods of a component by name, those that are being deleted left out."""
        found = self.objects("pods", f"app.kubernetes.io/component={component}")
        return {
            name: pod for name, pod in found.items() if "deletionTimestamp" not in pod["metadata"]
        }

    def answers(self, account, path):
        """HTTP status with which the server answers a service account that GETs `path`."""
        try:
            self.kubectl("get", "--raw", path, f"--as=system:serviceaccount:{NAMESPACE}:{account}")
        except AssertionError as error:
            return 403 if "Forbidden" in str(error) else 404
        return 200

    def pod_address(self, component, *, ip, port):
        """host:port by which the pod with this address is reached from here."""
        (name,) = [
            name for name, pod in self.pods(component).items() if pod["status"].get("podIP") == ip
        ]
        forward = port_forwarded([f"--namespace={NAMESPACE}"], f"pod/{name}", port=port)
        return self._forwards.enter_context(forward)

    def service_address(self, service):
        """host and port by which a service of type NodePort is reached."""
        (port,) = [
            port["nodePort"]
            for port in self.objects("services")[service]["spec"]["ports"]
            if port["name"] == "http"
        ]
        nodes = self.objects("nodes").values()
        for node in nodes:
            for address in node["status"]["addresses"]:
                with suppress(OSError), socket.create_connection((address["address"], port), 5):
                    return address["address"], port
        raise AssertionError(
            f"no node of {len(nodes)} answers at port {port}: is there a firewall?"
        )

    def log(self, pod):
        """What a pod printed."""
        return self.kubectl("logs", pod)

    def mounting_secrets(self):
        """Have the Secret volumes of pods filled in the block, which is the kubelet's work."""
        return nullcontext()

    def _run(self, program, *arguments, timeout_s, text=None):
        done = subprocess.run(
            [*self._tool(program), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _tool(self, program):
        return [program]


class MiniCluster(AnyCluster):
    """The one in whose network this process is: pods are processes, reached as they are."""

    is_mini = True
    values = ("-f", str(VALUES / "mini.yaml"))

    def __init__(self):
        super().__init__()
        tools = Path(os.environ.get("MINICLUSTER_TOOLS", Path.home() / ".cache" / "minicluster"))
        self._state = Path(os.environ.get("MINICLUSTER_DIR", tools / "state"))

    def answers(self, account, path):
        request = urllib.request.Request(
            f"{MINI_SERVER}{path}", headers={"Authorization": f"Bearer sa:{NAMESPACE}:{account}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def pod_address(self, component, *, ip, port):
        assert component
        return f"{ip}:{port}"

    def service_address(self, service):
        for _ in range(50):  # The file is rewritten in place and may be read half.
            for line in (self._state / "hosts").read_text().splitlines():
                ip, *names = line.split()
                if f"{service}.{NAMESPACE}.svc" in names:
                    return ip, 8080
            time.sleep(0.1)
        raise AssertionError(f"no service {service} in the cluster's names")

    def log(self, pod):
        return (self._state / "pods" / pod / "log").read_text(errors="replace")

    @contextmanager
    def mounting_secrets(self):
        ended = threading.Event()

        def fill():
            while not ended.wait(0.1):
                with suppress(OSError):  # A pod that is coming or going.
                    self._fill_secrets()

        filling = threading.Thread(target=fill, name="secrets")
        filling.start()
        try:
            yield
        finally:
            ended.set()
            filling.join()

    def _fill_secrets(self):
        secrets = {one["metadata"]["name"]: one for one in self._listed("secrets")}
        for pod in self._listed("pods"):
            for volume in pod.get("spec", {}).get("volumes", []):
                secret = secrets.get(volume.get("secret", {}).get("secretName"))
                folder = self._state / "pods" / pod["metadata"]["name"] / "vol" / volume["name"]
                for key, value in (secret or {}).get("data", {}).items():
                    if folder.is_dir() and not (folder / key).exists():
                        (folder / key).write_bytes(base64.b64decode(value))

    def _listed(self, kind):
        path = f"{MINI_SERVER}/api/v1/namespaces/{NAMESPACE}/{kind}"
        with urllib.request.urlopen(path, timeout=20) as answer:
            return json.load(answer)["items"]

    def _tool(self, program):
        return [os.environ["EQUIPOISE_MINICLUSTER"], program]


def until(condition, *, timeout_s, what):
    """The first true value of `condition`; fails, naming `what`, after the bound."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.2)
    return value
