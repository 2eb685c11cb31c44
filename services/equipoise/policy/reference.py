"""What a policy file may hold, for editors (a JSON Schema) and for people (a table)."""

from typing import Any

from equipoise.planning.policy import Policy
from equipoise.policy.document import API_VERSION, KIND, BalancePolicy, settings

SCHEMA_ID = "https://equipoise.dev/schemas/v1alpha1/balance-policy.json"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a file, with defaults as people write them."""
    schema = BalancePolicy.model_json_schema()
    for name, definition in schema["$defs"].items():
        section = name if name != "PoolPolicy" else ""
        for key, described in definition["properties"].items():
            described.pop("title", None)
            described["description"] = " ".join(described.get("description", "").split())
            default = _defaults_of_section(section).get(key)
            if default is not None:
                described["default"] = default
            elif "$ref" in described:
                described.pop("default", None)
                described.pop("description", None)
    schema["properties"]["defaults"].pop("default", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **schema,
    }


def field_table() -> str:
    """Every field as the rows of a Markdown table."""
    rows = ["| field | unit | default | values | what it is, and when to change it |"]
    rows.append("|---|---|---|---|---|")
    for path, setting, words in settings():
        default = (
            str(setting.default).lower() if setting.unit == "true or false" else (setting.default)
        )
        rows.append(
            f"| `{path}` | {setting.unit} | `{default}` | {setting.range} | "
            f"{' '.join(words.split())} |"
        )
    return "\n".join(rows)


def written(policy: Policy) -> dict[str, Any]:
    """A policy as a file would say it in full, without what is around it."""
    document: dict[str, Any] = {}
    for path, setting, _ in settings():
        *above, name = path.split(".")
        inner = document
        for step in above:
            inner = inner.setdefault(step, {})
        inner[name] = setting.write(getattr(policy, setting.name))
    return document


def document_of(policy: Policy) -> dict[str, Any]:
    """A whole file that says a policy in full for all pools."""
    return {"apiVersion": API_VERSION, "kind": KIND, "defaults": written(policy)}


def _defaults_of_section(section: str) -> dict[str, Any]:
    """Defaults of a section's own fields, by name; the section by its class."""
    own: dict[str, Any] = {}
    for path, setting, _ in settings():
        above, _, name = path.rpartition(".")
        if above.capitalize() == section:
            own[name] = setting.default
    return own
