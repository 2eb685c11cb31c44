"""`Location`: the node, machine and zone a worker runs on, found at startup.

A pod gets its machine's name from Kubernetes, but not the machine's labels, which name its zone and
its fast domain (`nvidia.com/gpu.clique`: machines whose GPUs share NVLink). This module reads them
from the cluster's Node with one GET; workers that may not read Nodes get them as settings.
"""

import asyncio
import http.client
import json
import logging
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.rank.errors import WorkerError
from equipoise.worker.settings import WorkerSettings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the service account's token and the cluster's certificate."""

_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a worker runs."""

    node: str
    """The fast domain, which plans are made by."""
    host: str
    """The machine."""
    zone: str
    """Empty if there is none."""


async def find_location(settings: WorkerSettings, *, account: Path = ACCOUNT) -> Location:
    """Return the location from the settings and from the Node labels that they name.

    If the cluster cannot be reached, the worker still serves, with its machine as its node.

    Raises:
        WorkerError: the cluster denies access, or this is not a pod.
    """
    labels: Mapping[str, str] = {}
    if settings.node_label or settings.zone_label:
        labels = await asyncio.to_thread(_labels_of_node, settings.host, account)
    zone = settings.zone or labels.get(settings.zone_label, "")
    node = settings.node or labels.get(settings.node_label, "") or settings.host
    return Location(node=node, host=settings.host, zone=zone)


def _labels_of_node(name: str, account: Path) -> Mapping[str, str]:
    server = os.environ.get("KUBERNETES_SERVICE_HOST")
    if server is None:
        raise WorkerError(
            "node_label and zone_label need a Kubernetes cluster, and this is not a pod: "
            "set node and zone"
        )
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{server}]" if ":" in server else server
    try:
        request = urllib.request.Request(
            f"https://{host}:{port}/api/v1/nodes/{urllib.parse.quote(name)}",
            headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
        )
        context = ssl.create_default_context(cafile=account / "ca.crt")
    except OSError as error:
        raise WorkerError(
            f"no service account ({error}): mount its token, or set node and zone"
        ) from error
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310
            labels: dict[str, str] = json.load(answer)["metadata"].get("labels") or {}
            return labels
    except urllib.error.HTTPError as error:
        raise WorkerError(
            f"cannot read node {name} ({error.code} {error.reason}): is host the node's name, and "
            "may the service account get nodes?"
        ) from error
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        _log.warning("cannot read labels of node %s, using its name as node: %r", name, error)
        return {}
