"""Write docs/options.md: every option of a server and the chart value that sets it.

Options come from the settings, chart values from the templates. After a change of either, run
`python helm/options_reference.py`; a test compares the file.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from equipoise.balancer.settings import BalancerSettings
from equipoise.gateway.settings import GatewaySettings
from equipoise.planning.policy import Policy
from equipoise.settings.fields import explanations, ranges_of
from equipoise.worker.settings import WorkerSettings

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "helm" / "equipoise" / "templates"
WRITTEN = ROOT / "docs" / "options.md"
SERVERS = {"balancer": BalancerSettings, "worker": WorkerSettings, "gateway": GatewaySettings}
TEMPLATE_OF = {"balancer": "balancer.yaml", "worker": "_worker.tpl", "gateway": "gateway.yaml"}
PLAIN = re.compile(
    r"--([a-z-]+)=(?:[\d.]+:)?\{\{ (?:int64 )?(?:\$root)?(?:\$|\.Values\.)([\w.]+) \}\}"
)
"""An option whose value a template passes unchanged."""

OTHERWISE = {
    "accepted-keys": "`tokens.existingSecret`",
    "advertise": "the pod's address",
    "advertise-host": "the pod's address",
    "api-keys": "`gateway.apiKeys.existingSecret`",
    "balancer": "the release's balancer, or `balancer.externalAddress`",
    "batch-invariant": "`worker.batchInvariant`",
    "checkpoint": "`worker.checkpoint.path`",
    "device": "`worker.device`",
    "host": "the machine's name",
    "insecure": "`insecure`",
    "lease": "`balancer.lease`",
    "lease-name": "the release's name",
    "metrics-listen": "`metrics.port`",
    "metrics-tls": "`metrics.tls.enabled`",
    "metrics-token-file": "`metrics.tokenSecret`",
    "model": "`gateway.model`",
    "node": "`worker.topology.source`",
    "node-label": "`worker.topology.nodeLabel`",
    "peer-pools": "`peerPools`",
    "policy": "`policy`",
    "pool": "`pool`",
    "prefill-pool": "`prefillPool`",
    "probes-listen": "always port 9091",
    "replica-choice": "`worker.replicaChoice`",
    "shared-as-routed": "`worker.sharedAsRouted`",
    "signing-key": "`tokens.existingSecret`",
    "store": "`redis.url`, `redis.trial`, `balancer.storage`",
    "store-password-file": "`redis.existingSecret`",
    "store-wait-s": "60 with Redis",
    "sums-on-nodes": "`worker.sumsOnNodes`",
    "tls-balancer-name": "`tls.balancerName`",
    "tls-ca": "`tls.enabled`",
    "tls-cert": "`tls.enabled`",
    "tls-key": "`tls.enabled`",
    "tls-trust-domain": "`tls.trustDomain`",
    "tls-worker-name": "`tls.workerName`",
    "tracing-endpoint": "`tracing.endpoint`",
    "web-listen": "always the pod's loopback, port 7080",
    "weights": "`worker.weights`",
    "worker": "the pod's name",
    "zone": "`worker.topology.source`",
    "zone-label": "`worker.topology.zoneLabel`",
}
"""What sets the other options in the chart."""

_HEAD = """\
# Options

Every option of the servers, with its environment variable and its chart value, if it has them.
Set options without a chart value in `balancer.extraArgs`, `worker.extraArgs` or
`gateway.extraArgs`. Options that end in `-s` and chart values that end in `Seconds` are in seconds.
The fields of the policy, which can change while a balancer runs, are in
[policy.md](policy.md#fields); the names of waits are in [metrics.md](metrics.md#waits).

This file is generated: `python helm/options_reference.py`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(server) for server in SERVERS)])


def chart_value(option: str, server: str) -> str:
    """What sets an option in the chart; empty if only `extraArgs` can."""
    if option == "log-format":
        return f"`{server}.logFormat`"
    if option in OTHERWISE:
        return OTHERWISE[option]
    passed = PLAIN.findall((TEMPLATES / TEMPLATE_OF[server]).read_text())
    return next((f"`{path}`" for name, path in passed if name == option), "")


def _section(server: str) -> str:
    rows = "\n".join(_rows(SERVERS[server], server))
    return (
        f"## `equipoise {server}`\n\n| option | chart | default | values | meaning |\n"
        f"|---|---|---|---|---|\n{rows}\n"
    )


def _rows(settings: type, server: str) -> Iterator[str]:
    kinds, texts = get_type_hints(settings), explanations(settings)
    for field in fields(settings):
        kind = kinds[field.name]
        if kind is Policy:
            continue
        if is_dataclass(kind):
            yield from _rows(kind, server)
            continue
        option = field.name.replace("_", "-")
        variable = field.metadata.get("environment")
        names = f"`--{option}`" + (f" `{variable}`" if variable else "")
        meaning = texts[field.name].replace("|", "\\|")
        chart = chart_value(option, server)
        yield (
            f"| {names} | {chart} | {_default(field)} | {_values(settings, field.name, kind)} "
            f"| {meaning} |"
        )


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING:
        return "computed"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple):
        value = ",".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return "no limit" if value == math.inf else f"`{value:g}`"
    return f"`{value}`" if value not in {"", None} else ""


def _values(settings: type, name: str, kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{one.value}`" for one in kind)
    return str(ranges_of(settings).get(name, ""))


if __name__ == "__main__":
    WRITTEN.write_text(page(), encoding="utf-8")
