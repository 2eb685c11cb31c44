"""`forwarded`: a release's balancers at local addresses, through `kubectl port-forward`.

All requests to the cluster go through the caller's kubectl: their context, login and permissions.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from equipoise.cli.live.route import ROUTE, NoRouteError
from equipoise.cli.tethered import tethered

_SELECTOR = "app.kubernetes.io/part-of=equipoise"
_BALANCERS = f"{_SELECTOR},app.kubernetes.io/component=balancer"
_INSTANCE = "app.kubernetes.io/instance"
_LEADER = "equipoise/leader-address"
_NAME_VARIABLE = "EQUIPOISE_TLS_BALANCER_NAME"
_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0
"""How long kubectl may take to exit before it is killed."""
_FORWARDING = re.compile(r"Forwarding from (127\.0\.0\.1:\d+) -> \d+")

_Object = dict[str, Any]


class ForwardError(NoRouteError):
    """No balancer is reachable through kubectl; the message includes the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    address: str
    """Local host:port."""

    kubectl: subprocess.Popen[str]
    """Ends by itself when it loses the pod."""


@contextmanager
def forwarded(options: Sequence[str], *, release: str = "") -> Iterator[tuple[str, str]]:
    """Forward a local address to a balancer inside the block.

    Yields host:port and the name in the balancer's certificate. Prefers the leader, if the
    cluster's Lease names it. `options` go to every kubectl; `release` selects one of several
    releases.

    Inside the block, `ROUTE` reaches the pod of a balancer that another one names, and reaches the
    yielded address through another pod once its own is gone.

    Raises:
        ForwardError: there is no balancer, or kubectl cannot reach it.
    """
    with ExitStack() as stack:
        forwards = _Forwards(options, release=release, stack=stack)
        address, name = forwards.enter()
        token = ROUTE.set(forwards.route)
        stack.callback(ROUTE.reset, token)
        yield address, name


class _Forwards:
    """The kubectls that forward to a release's balancers; `stack` ends them."""

    def __init__(self, options: Sequence[str], *, release: str, stack: ExitStack) -> None:
        self._options, self._release, self._stack = options, release, stack
        self._entry = ""
        """The local address that `enter` returned first."""
        self._opened: dict[str, _Forward] = {}
        """By pod address, and the one for `_entry`."""

    def enter(self) -> tuple[str, str]:
        """Forward to the leader if the Lease names it, else to any balancer.

        Returns the local address and the name in the balancer's certificate.

        Raises:
            ForwardError: there is no balancer, or kubectl cannot reach it.
        """
        pod = _leading(self._options, _balancers(self._options, release=self._release))
        forward = self._open(pod)
        self._entry = self._entry or forward.address
        self._opened[self._entry] = forward
        return forward.address, _certified_name(pod)

    def route(self, address: str) -> str:
        """The local address of the balancer that is known by `address`, host:port.

        Raises:
            ForwardError: no pod of the release has this address, or kubectl cannot reach it.
        """
        is_entry = address == self._entry
        key = address if is_entry else address.rpartition(":")[0].strip("[]")
        known = self._opened.get(key)
        if known is not None and known.kubectl.poll() is None:
            return known.address
        if is_entry:
            return self.enter()[0]
        for pod in _balancers(self._options, release=self._release):
            if pod["status"].get("podIP") == key:
                self._opened[key] = self._open(pod)
                return self._opened[key].address
        raise ForwardError(
            f"no balancer of this release has the address {address}: use --address where it can be "
            "reached"
        )

    def _open(self, pod: _Object) -> _Forward:
        target = f"pod/{pod['metadata']['name']}"
        return self._stack.enter_context(_forwarding(self._options, target, port=_port(pod)))


@contextmanager
def port_forwarded(options: Sequence[str], target: str, *, port: int) -> Iterator[str]:
    """Forward a local address to a port of `target` (pod/NAME) inside the block; yields host:port.

    On Linux kubectl ends with this process, even if it is killed. Elsewhere it ends with the block,
    so turn signals that would end this process into exceptions.

    Raises:
        ForwardError: kubectl cannot reach it.
    """
    with _forwarding(options, target, port=port) as forward:
        yield forward.address


@contextmanager
def _forwarding(options: Sequence[str], target: str, *, port: int) -> Iterator[_Forward]:
    """As `port_forwarded`."""
    command = ["kubectl", *options, "port-forward", target, f":{port}"]
    with (
        tempfile.TemporaryFile("w+") as faults,
        # In its own session, because Ctrl-C is for the command only.
        subprocess.Popen(
            _tied(command), stdout=subprocess.PIPE, stderr=faults, text=True, start_new_session=True
        ) as process,
    ):
        try:
            address = _address(process)
            if not address:
                process.wait()
                faults.seek(0)
                raise ForwardError(f"`{' '.join(command)}` failed: {_last_line(faults.read())}")
            yield _Forward(address=address, kubectl=process)
        finally:
            _end(process)


def _tied(command: list[str]) -> list[str]:
    """The command, tied to this process on Linux."""
    program = shutil.which(command[0])
    if program is None or sys.platform != "linux":
        return command
    return tethered([program, *command[1:]])


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _balancers(options: Sequence[str], *, release: str) -> list[_Object]:
    """The running balancers of the release."""
    pods = [
        pod
        for pod in _listed("pods", options, selector=_BALANCERS)
        if pod["status"].get("phase") == "Running"
        and release in {"", pod["metadata"]["labels"].get(_INSTANCE)}
    ]
    if not pods:
        raise ForwardError(
            f"no balancer{f' of release {release}' if release else ''} runs in this namespace: "
            "select another one with --namespace, or use --address"
        )
    releases = sorted({pod["metadata"]["labels"].get(_INSTANCE, "") for pod in pods})
    if len(releases) > 1:
        raise ForwardError(
            f"this namespace has several releases: select {' or '.join(releases)} with --release"
        )
    return pods


def _leading(options: Sequence[str], pods: list[_Object]) -> _Object:
    """The leader's pod; any pod if the Lease is unknown, because followers name the leader."""
    if len(pods) == 1:
        return pods[0]
    try:
        leases = _listed("leases", options, selector=_SELECTOR)
    except ForwardError:
        return pods[0]  # The caller may lack permission to read Leases.
    addresses = {lease["metadata"].get("annotations", {}).get(_LEADER, "") for lease in leases}
    hosts = {address.rpartition(":")[0].strip("[]") for address in addresses}
    leaders = [pod for pod in pods if pod["status"].get("podIP") in hosts]
    return (leaders or pods)[0]


def _port(pod: _Object) -> int:
    for port in pod["spec"]["containers"][0].get("ports", []):
        if port.get("name") == "grpc":
            return int(port["containerPort"])
    raise ForwardError(f"pod {pod['metadata']['name']} has no port named grpc: use --address")


def _certified_name(pod: _Object) -> str:
    """The name that the chart's pods verify balancers by; empty without certificates."""
    variables = pod["spec"]["containers"][0].get("env", [])
    return next((one.get("value", "") for one in variables if one["name"] == _NAME_VARIABLE), "")


def _address(process: subprocess.Popen[str]) -> str:
    """The address in kubectl's first line; empty if it exits without one."""
    stdout = process.stdout
    assert stdout is not None, "it is a pipe"
    given_up = threading.Timer(_TIMEOUT_S, process.kill)
    given_up.start()
    try:
        found = _FORWARDING.match(stdout.readline())
    finally:
        given_up.cancel()
    if found is None:
        process.kill()
        return ""
    # kubectl prints a line per connection; drain the pipe.
    threading.Thread(
        target=lambda: [None for _ in stdout], name="port-forward", daemon=True
    ).start()
    return found[1]


def _listed(kind: str, options: Sequence[str], *, selector: str) -> list[_Object]:
    command = ["kubectl", *options, "get", kind, "-l", selector, "-o", "json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ForwardError("kubectl is not installed: install it, or use --address") from error
    except subprocess.TimeoutExpired as error:
        raise ForwardError(
            f"`{' '.join(command)}` took longer than {_TIMEOUT_S:g} s: is the cluster reachable?"
        ) from error
    if done.returncode:
        raise ForwardError(f"`{' '.join(command)}` failed: {_last_line(done.stderr)}")
    items: list[_Object] = json.loads(done.stdout)["items"]
    return items


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
