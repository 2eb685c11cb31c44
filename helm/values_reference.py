"""Write the chart's README: every value with its default and its explanation, from values.yaml.

Run `python helm/values_reference.py` after a change of values.yaml; a test compares the file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "equipoise"
VALUES = CHART / "values.yaml"
WRITTEN = CHART / "README.md"
_MARK = "# -- "

_HEAD = """\
# Equipoise

The control plane that keeps Mixture-of-Experts fleets balanced, with the ranks and the gateway.

```
helm install eq helm/equipoise -n moe --create-namespace --wait
helm test eq -n moe
```

[Operating it](../../docs/operations.md): installation, TLS, upgrades, alerts, drills. Unknown and
contradictory values are rejected before anything is installed. helm reads fractions after `--set`
as text: write `--set-json worker.holdSeconds=0.5`, or use a file.

## Values

This file is generated: `python helm/values_reference.py`.

| value | default | meaning |
|---|---|---|
"""


def page() -> str:
    """The whole README."""
    text = VALUES.read_text(encoding="utf-8")
    found, defaults = dict(explained(text)), yaml.safe_load(text)
    cells = (
        (f"`{path}`", _default(path, found, defaults), meaning.replace("|", r"\|"))
        for path, meaning in found.items()
    )
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def explained(text: str) -> Iterator[tuple[str, str]]:
    """Each value with an explanation: its path, and the comment above it as one line."""
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        words = line.strip()
        if words.startswith(_MARK):
            comment = [words.removeprefix(_MARK)]
        elif words.startswith("#") and comment:
            comment.append(words.removeprefix("#").strip())
        elif key := re.match(r"( *)([A-Za-z0-9]+):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if comment:
                yield ".".join(path), " ".join(comment)
            comment = []
        else:
            comment = []


def _default(path: str, found: Mapping[str, str], defaults: Any) -> str:
    if any(other.startswith(f"{path}.") for other in found):
        return ""  # Its parts have rows of their own.
    for name in path.split("."):
        defaults = defaults[name]
    return f"`{json.dumps(defaults)}`"


if __name__ == "__main__":
    WRITTEN.write_text(page(), encoding="utf-8")
