"""The fields of a policy file: a JSON Schema for editors, and a table for the docs."""

from typing import Any

from equipoise.planning.policy import Policy
from equipoise.policy.document import API_VERSION, KIND, BalancePolicy
from equipoise.policy.setting import SETTINGS

SCHEMA_ID = "https://equipoise.dev/schemas/v1alpha1/balance-policy.json"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a policy file."""
    schema = BalancePolicy.model_json_schema()
    for described in (schema, *schema["$defs"].values()):
        for one in described["properties"].values():
            one.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **schema,
    }


def field_table() -> str:
    """Every field, as a Markdown table."""
    rows = ["| field | option | unit | default | values | meaning |", "|---|---|---|---|---|---|"]
    for one in SETTINGS:
        default = str(one.default).lower() if isinstance(one.default, bool) else one.default
        rows.append(
            f"| `{one.path}` | `{one.option}` | {one.form.unit} | `{default}` | {one.valid} | "
            f"{one.explanation} |"
        )
    return "\n".join(rows)


def written(policy: Policy) -> dict[str, Any]:
    """Every value of a policy, in the form of a policy file's `defaults`."""
    document: dict[str, Any] = {}
    for one in SETTINGS:
        section, _, key = one.path.rpartition(".")
        inner = document.setdefault(section, {}) if section else document
        inner[key] = one.form.write(getattr(policy, one.name))
    return document


def document_of(policy: Policy) -> dict[str, Any]:
    """A complete policy file with every value of a policy, for all pools."""
    return {"apiVersion": API_VERSION, "kind": KIND, "defaults": written(policy)}
