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
    ours = {f"{PREFIX}{name}": _moved(one) for name, one in policy["$defs"].items()}
    return {**values, "definitions": {**kept, **ours}}


def written(schema: dict[str, Any]) -> str:
    """The schema as text, formatted like the file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _moved(schema: Any) -> Any:
    """The schema with references to the new place of the definitions."""
    if isinstance(schema, dict):
        return {
            key: value.replace("#/$defs/", f"#/definitions/{PREFIX}")
            if key == "$ref"
            else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(one) for one in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    VALUES.write_text(
        written(embedded(json.loads(VALUES.read_text()), json.loads(PUBLISHED.read_text()))),
        encoding="utf-8",
    )
