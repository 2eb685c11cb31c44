"""The metrics that a process exposes, and those that docs/metrics.md documents."""

import asyncio
import re
import socket
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

_ROW = re.compile(r"\| `(equipoise_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| [^|]+ \|")
_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric by what its users rest on."""

    kind: str
    labels: frozenset[str]


async def scrape(address, *, ca_file=None, token=None):
    """Families of metrics by name, as a Prometheus server reads them: over TLS with `ca_file`."""
    text = await asyncio.to_thread(_get, address, ca_file, token)
    return {family.name: family for family in text_string_to_metric_families(text)}


def free_address():
    """host:port of a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def ours(families):
    """Our own metrics by the name that queries use, those that have no series left out."""
    metrics = {}
    for family in families.values():
        if not family.name.startswith("equipoise_") or not family.samples:
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        metrics[name] = Metric(kind=family.type, labels=frozenset(labels))
    return metrics


def documented(heading):
    """Metrics of the section of docs/metrics.md below a heading."""
    (section,) = (
        part for part in DOCS.read_text().split("\n## ") if part.startswith(f"{heading}\n")
    )
    return {
        name: Metric(kind=kind, labels=frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, _unit, labels in _ROW.findall(section)
    }


def value_of(families, name, **labels):
    """The value of one series."""
    for family in families.values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"there is no {name} with {labels}")


def _get(address, ca_file, token):
    request = urllib.request.Request(f"http{'s' if ca_file else ''}://{address}/metrics")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    trusted = ssl.create_default_context(cafile=ca_file) if ca_file else None
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
        return answer.read().decode()
