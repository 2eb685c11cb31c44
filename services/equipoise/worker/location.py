"""`Location`: where a worker runs, as far as planning and people care. Owns finding it out at a start.

Kubernetes tells a pod the name of its machine but not the machine's labels, which name its zone and
its fast domain (`nvidia.com/gpu.clique`: whose GPUs NVLink joins, over several machines). They are
at the cluster's Node, one GET away; whoever must not ask the cluster is given them as settings.
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

from equipoise.worker.errors import WorkerError
from equipoise.worker.settings import WorkerSettings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its service account's token and the cluster's certificate."""

_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """`node` is the fast domain that plans go by, `host` the machine; `zone` may be empty."""

    node: str
    host: str
    zone: str


async def find_location(settings: WorkerSettings, *, account: Path = ACCOUNT) -> Location:
    """From the settings, and from the labels of the cluster's Node where they name labels to read.

    A cluster that cannot be reached is no reason not to serve: the machine is the node then.

    Raises:
        WorkerError: the cluster refuses, or there is none.
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
            "node_label and zone_label are read from a Kubernetes cluster, and this is no pod: "
            "give node and zone"
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
            f"no service account ({error}): mount its token, or give node and zone"
        ) from error
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310
            labels: dict[str, str] = json.load(answer)["metadata"].get("labels") or {}
            return labels
    except urllib.error.HTTPError as error:
        raise WorkerError(
            f"the cluster does not show node {name} ({error.code} {error.reason}): is host the "
            "node's name, and may the service account get nodes?"
        ) from error
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        _log.warning("no labels of node %s, its name is the node: %r", name, error)
        return {}
