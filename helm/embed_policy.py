"""Copy the policy's JSON Schema into the chart's, so that `helm install` rejects an invalid policy.

A chart's schema cannot refer to another file. Run `python helm/embed_policy.py` after a change of
docs/policy.schema.json; a test compares the two.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "docs" / "policy.schema.json"
VALUES = ROOT / "helm" / "equipoise" / "values.schema.json"
PREFIX = "policy"


def embedded(values: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with its definitions of the policy replaced."""
    kept = {name: one for name, one in values["definitions"].items() if not name.startswith(PREFIX)}
    moved = json.dumps(policy["$defs"]).replace('"#/$defs/', f'"#/definitions/{PREFIX}')
    ours = {f"{PREFIX}{name}": one for name, one in json.loads(moved).items()}
    return {**values, "definitions": {**kept, **ours}}


def written(schema: dict[str, Any]) -> str:
    """The schema as text, formatted like the file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    VALUES.write_text(
        written(embedded(json.loads(VALUES.read_text()), json.loads(PUBLISHED.read_text()))),
        encoding="utf-8",
    )
