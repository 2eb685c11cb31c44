"""A release on the mini cluster: helm and kubectl as people use them, and what they do not show."""

import base64
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMESPACE = "moe"
SERVER = "http://127.0.0.1:8080"


class MiniCluster:
    """Runs the real helm and kubectl against the cluster in whose network this process is."""

    def __init__(self):
        self._tool = os.environ["EQUIPOISE_MINICLUSTER"]
        tools = Path(os.environ.get("MINICLUSTER_TOOLS", Path.home() / ".cache" / "minicluster"))
        self._state = Path(os.environ.get("MINICLUSTER_DIR", tools / "state"))

    def helm(self, *arguments, timeout_s=300):
        """Run helm in the namespace; returns what it prints."""
        return self._run("helm", "-n", NAMESPACE, *arguments, timeout_s=timeout_s)

    def kubectl(self, *arguments, text=None):
        """Run kubectl in the namespace; returns what it prints."""
        return self._run("kubectl", "-n", NAMESPACE, *arguments, text=text, timeout_s=60)

    def objects(self, kind, selector=""):
        """Objects of a kind, by name."""
        told = self.kubectl("get", kind, "-o", "json", *(["-l", selector] if selector else []))
        return {one["metadata"]["name"]: one for one in json.loads(told)["items"]}

    def pods(self, component):
        """Pods of a component by name, those that are being deleted left out."""
        found = self.objects("pods", f"app.kubernetes.io/component={component}")
        return {
            name: pod for name, pod in found.items() if "deletionTimestamp" not in pod["metadata"]
        }

    def answers(self, account, path):
        """HTTP status with which the server answers a service account that GETs `path`."""
        request = urllib.request.Request(
            f"{SERVER}{path}", headers={"Authorization": f"Bearer sa:{NAMESPACE}:{account}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def address(self, service):
        """Address of a service, as pods resolve it."""
        for _ in range(50):  # The file is rewritten in place and may be read half.
            for line in (self._state / "hosts").read_text().splitlines():
                ip, *names = line.split()
                if f"{service}.{NAMESPACE}.svc" in names:
                    return ip
            time.sleep(0.1)
        raise AssertionError(f"no service {service} in the cluster's names")

    @contextmanager
    def mounting_secrets(self):
        """Fill the Secret volumes of pods in the block, which this cluster leaves empty."""
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
            for volume in pod["spec"].get("volumes", []):
                told = secrets.get(volume.get("secret", {}).get("secretName"))
                folder = self._state / "pods" / pod["metadata"]["name"] / "vol" / volume["name"]
                for key, value in (told or {}).get("data", {}).items():
                    if folder.is_dir() and not (folder / key).exists():
                        (folder / key).write_bytes(base64.b64decode(value))

    def _listed(self, kind):
        path = f"{SERVER}/api/v1/namespaces/{NAMESPACE}/{kind}"
        with urllib.request.urlopen(path, timeout=20) as answer:
            return json.load(answer)["items"]

    def log(self, pod):
        """What a pod printed."""
        return (self._state / "pods" / pod / "log").read_text(errors="replace")

    def _run(self, program, *arguments, timeout_s, text=None):
        done = subprocess.run(
            [self._tool, program, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout


def until(condition, *, timeout_s, what):
    """The first true value of `condition`; fails, naming `what`, after the bound."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.2)
    return value
