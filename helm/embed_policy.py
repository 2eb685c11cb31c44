"""Copies the policy's JSON Schema into the chart's, so that `helm install` refuses a wrong policy.

A schema of a chart cannot refer to another file. Run it after docs/policy.schema.json changed:
`python helm/embed_policy.py`; a test notices when somebody forgot.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "docs" / "policy.schema.json"
VALUES = ROOT / "helm" / "equipoise" / "values.schema.json"
PREFIX = "policy"


def embedded(values: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with these definitions of the policy, in place of those it had."""
    kept = {name: one for name, one in values["definitions"].items() if not name.startswith(PREFIX)}
    ours = {f"{PREFIX}{name}": _moved(one) for name, one in policy["$defs"].items()}
    return {**values, "definitions": {**kept, **ours}}


def written(schema: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _moved(schema: Any) -> Any:
    """The same with references to where definitions are now."""
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
