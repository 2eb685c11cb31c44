"""`kubectl equipoise`: the kubectl commands it runs, and the real kubectl that finds it."""

import asyncio
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.cli.kubectl.plugin import CommandLine, asks_a_balancer, following, parted
from equipoise.cli.kubectl.port_forward import ForwardError, forwarded
from equipoise.cli.live import operations
from equipoise.cli.live.route import ROUTE
from equipoise.cli.live.settings import OperationSettings
from equipoise.cli.main import app
from equipoise.planning.policy import Policy
from equipoise.policy.book import PolicyBook
from equipoise.trust.credentials import Credentials
from tests.cli.test_operations import Answering, listening
from tests.support.authority import Authority
from tests.support.balancers import serving

BOUND_S = 120.0
ROOT = Path(__file__).parents[2]
NAME = "eq-equipoise-balancer.moe.svc"

# A fake kubectl with the output of the real one: lists what $CLUSTER has, and forwards to
# the address that $TARGETS has for the pod.
KUBECTL = f"""#!{sys.executable}
import json, os, socket, sys, threading
with open(os.environ["ASKED"], "a") as asked:
    print(*sys.argv[1:], file=asked)
words = [word for word in sys.argv[1:] if not word.startswith("--")]
if words[0] == "get":
    print(json.dumps({{"items": json.loads(os.environ["CLUSTER"]).get(words[1], [])}}))
    sys.exit()
target = json.loads(os.environ["TARGETS"]).get(words[1])
if not target:
    sys.exit("error: unable to forward port because pod is not running")
host, port = target.split(":")
server = socket.create_server(("127.0.0.1", 0))
print(f"Forwarding from 127.0.0.1:{{server.getsockname()[1]}} -> 7070", flush=True)
def pump(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_WR)
while True:
    here, _ = server.accept()
    print("Handling connection for 7070", flush=True)
    there = socket.create_connection((host, int(port)))
    for pair in ((here, there), (there, here)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def pod(name, *, ip="10.0.0.1", release="eq", phase="Running", certified=""):
    env = [{"name": "EQUIPOISE_TLS_BALANCER_NAME", "value": certified}] if certified else []
    ports = [{"name": "metrics", "containerPort": 9090}, {"name": "grpc", "containerPort": 7070}]
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/instance": release}},
        "status": {"phase": phase, "podIP": ip},
        "spec": {"containers": [{"ports": ports, "env": env}]},
    }


def lease(address):
    return {"metadata": {"annotations": {"equipoise/leader-address": address}}}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A function that says what the cluster has; gives the file of what kubectl was asked."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    asked = tmp_path / "asked"
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)
    monkeypatch.setenv("ASKED", str(asked))

    def has(*, target="", targets=None, **objects):
        all_pods = {f"pod/{one['metadata']['name']}": target for one in objects.get("pods", ())}
        monkeypatch.setenv("CLUSTER", json.dumps(objects))
        monkeypatch.setenv("TARGETS", json.dumps(all_pods if targets is None else targets))
        return asked

    return has


def test_kubectls_options_go_to_kubectl_and_ours_to_us():
    line = "status -n moe --watch --context=prod --release eq --pool decode --kubeconfig k --as ann"
    assert parted(line.split()) == CommandLine(
        arguments=("status", "--watch", "--pool", "decode"),
        of_kubectl=("--namespace=moe", "--context=prod", "--kubeconfig=k", "--as=ann"),
        release="eq",
    )
    with pytest.raises(ForwardError, match="-n needs a value"):
        parted(["status", "-n"])


@pytest.mark.parametrize("line", ["--help", "status -h", "layout show --help", ""])
def test_help_lists_what_kubectl_adds_to_every_command(line):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from equipoise.cli.kubectl.plugin import main; main()",
            *line.split(),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == (0 if line else 2), done.stderr
    words = done.stdout.split()
    for option in ("-n,", "--namespace", "--context", "--kubeconfig", "--release", "--as"):
        assert option in words
    assert "Usage: kubectl equipoise" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("status", True),
        ("layout show --json", True),
        ("rebalance --force", True),
        ("status --address=10.0.0.1:7070", False),
        ("status --help", False),
        ("policy preview policy.yaml", True),
        ("policy preview policy.yaml --loads loads.npz", False),
        ("policy schema", False),
        ("demo", False),
        ("", False),
        ("--version", False),
    ],
)
def test_only_a_command_that_asks_a_balancer_needs_one(line, asks):
    assert asks_a_balancer(app, line.split()) is asks


def test_completions_come_with_their_help():
    (pause,) = following(app, [], begun="pau")
    assert pause == ("pause", "Stop adopting plans until `resume`.")
    assert {word for word, _ in following(app, ["layout"], begun="")} >= {"show", "diff"}
    assert "--force" in dict(following(app, ["rebalance"], begun="--f"))
    assert not dict(following(app, ["rebalance"], begun=""))
    assert "--release" in dict(following(app, ["rebalance"], begun="--r"))


@pytest.mark.parametrize(
    ("ip", "address"), [("10.0.0.2", "10.0.0.2:7070"), ("fd00::2", "[fd00::2]:7070")]
)
def test_the_pod_that_leads_is_reached_with_the_name_in_its_certificate(cluster, ip, address):
    asked = cluster(
        target="127.0.0.1:9",
        pods=[
            pod("eq-balancer-a", ip="10.0.0.1"),
            pod("eq-balancer-b", ip=ip, certified=NAME),
            pod("eq-balancer-c", ip=ip, phase="Succeeded"),
        ],
        leases=[lease(address)],
    )
    with forwarded(["--namespace=moe"]) as (reached, name):
        assert reached.startswith("127.0.0.1:")
        assert name == NAME
    selector = "app.kubernetes.io/part-of=equipoise"
    assert asked.read_text().splitlines() == [
        f"--namespace=moe get pods -l {selector},app.kubernetes.io/component=balancer -o json",
        f"--namespace=moe get leases -l {selector} -o json",
        "--namespace=moe port-forward pod/eq-balancer-b :7070",
    ]


@pytest.fixture
def two_pods(cluster):
    """A follower and a leader in two pods, and no Lease that tells which is which."""
    leader = Answering()
    with listening(leader) as one, listening(Answering(leader="10.0.0.2:7070")) as other:
        cluster(
            targets={"pod/eq-balancer-a": other, "pod/eq-balancer-b": one},
            pods=[pod("eq-balancer-a", ip="10.0.0.1"), pod("eq-balancer-b", ip="10.0.0.2")],
        )
        yield leader


def forwards():
    """The kubectl processes of this one, which may have others."""
    return [one for one in psutil.Process().children() if "port-forward" in one.cmdline()]


def test_an_operation_goes_to_the_pod_of_the_leader_that_a_follower_names(two_pods):
    with forwarded([]) as (address, _):
        assert operations.pause(OperationSettings(address=address)) == 0
        assert operations.resume(OperationSettings(address=address)) == 0
        assert len(forwards()) == 2, "a kubectl for each pod that was asked"
    assert len(two_pods.asked) == 2
    assert ROUTE.get()("10.0.0.2:7070") == "10.0.0.2:7070"


def test_a_leader_outside_the_release_is_reported(two_pods):
    with forwarded([]), pytest.raises(ForwardError, match="no balancer of this release has the"):
        ROUTE.get()("10.0.0.3:7070")


def test_another_pod_is_reached_once_the_first_is_gone(two_pods, cluster):
    with forwarded([]) as (address, _):
        assert ROUTE.get()(address) == address
        (kubectl,) = forwards()
        kubectl.terminate()  # As it ends when it loses the pod.
        kubectl.wait(BOUND_S)
        cluster(
            targets=json.loads(os.environ["TARGETS"]),
            pods=[pod("eq-balancer-b", ip="10.0.0.2")],
        )
        assert operations.pause(OperationSettings(address=address)) == 0
    assert len(two_pods.asked) == 1


@pytest.mark.parametrize(
    ("pods", "release", "words"),
    [
        ([], "", "select another one with --namespace, or use --address"),
        ([pod("a", phase="Pending")], "", "no balancer runs in this namespace"),
        ([pod("a"), pod("b", release="two")], "", "select eq or two with --release"),
        ([pod("a")], "other", "no balancer of release other"),
        ([pod("a")], "", "failed: error: unable to forward port"),
    ],
)
def test_an_unreachable_balancer_is_reported_with_the_remedy(cluster, pods, release, words):
    cluster(pods=pods)
    with pytest.raises(ForwardError, match=words), forwarded([], release=release):
        pass


def test_a_missing_kubectl_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ForwardError, match="kubectl is not installed"), forwarded([]):
        pass


async def test_a_status_comes_through_the_forward_under_tls(cluster, tmp_path, monkeypatch):
    authority = Authority(tmp_path / "certificates")
    store = SqliteStore(tmp_path / "state.sqlite")
    reader = authority.issue("reader")
    monkeypatch.setenv("EQUIPOISE_TLS_CA", reader.tls_ca)
    monkeypatch.setenv("EQUIPOISE_TLS_CERT", reader.tls_cert)
    monkeypatch.setenv("EQUIPOISE_TLS_KEY", reader.tls_key)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    async with serving(
        store,
        listen="127.0.0.1:0",
        policies=PolicyBook(Policy()),
        drain_timeout_s=1.0,
        credentials=Credentials(authority.issue("balancer", hosts=(NAME,))),
    ) as port:
        cluster(target=f"127.0.0.1:{port}", pods=[pod("eq-balancer-a", certified=NAME)])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from equipoise.cli.kubectl.plugin import main; main()"),
            *("status", "-n", "moe", "--json", "--timeout-s", "60"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(BOUND_S):
            output, faults = await process.communicate()
    await store.close()
    assert not faults.decode()
    assert json.loads(output) == {"pools": []}


@pytest.mark.parametrize("asked_by", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_kubectl_ends_with_the_command_however_it_ends(cluster, monkeypatch, asked_by):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    program = "from equipoise.cli.kubectl.plugin import main; main()"
    command = [sys.executable, "-c", program, "status", "--timeout-s", "60"]
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        never_answers.settimeout(BOUND_S)
        port = never_answers.getsockname()[1]
        cluster(target=f"127.0.0.1:{port}", pods=[pod("eq-balancer-a")])
        # Once what the command asks has come through kubectl, and is not answered:
        with subprocess.Popen(command) as process, never_answers.accept()[0]:
            (kubectl,) = psutil.Process(process.pid).children()
            process.send_signal(asked_by)
            process.wait(BOUND_S)
        kubectl.wait(BOUND_S)
    expected = -asked_by if asked_by is signal.SIGKILL else 128 + asked_by
    assert process.returncode == expected


def test_the_programs_of_the_package_are_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"equipoise", "kubectl-equipoise", "kubectl_complete-equipoise"}
    for place in scripts.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_real_kubectl_finds_the_plugin_and_its_completions(tmp_path):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here")
    for script, function in (
        ("kubectl-equipoise", "main"),
        ("kubectl_complete-equipoise", "complete"),
    ):
        path = tmp_path / script
        path.write_text(
            f"#!{sys.executable}\n"
            f"from equipoise.cli.kubectl.plugin import {function}\n"
            f"{function}()\n"
        )
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def asked(*words):
        done = subprocess.run(
            [kubectl, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        return done.stdout

    assert str(tmp_path / "kubectl-equipoise") in asked("plugin", "list")
    assert asked("equipoise", "--version").startswith("equipoise ")
    completed = asked("__complete", "equipoise", "re").splitlines()
    assert {line.partition("\t")[0] for line in completed} >= {"rebalance", "resume", "replay"}
