"""Policies on the command line: `calm=interval=20,min_gain=0.05`, or a file."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from equipoise.cli.policy.files import read_file
from equipoise.planning.errors import InvalidPolicyError
from equipoise.planning.policy import Policy
from equipoise.settings.errors import InvalidSettingsError


def policies_of(specs: Sequence[str]) -> dict[str, Policy]:
    """Policies by name, in order; the balancer's defaults if `specs` is empty.

    Raises:
        InvalidSettingsError: a policy is invalid, or two have the same name.
    """
    policies: dict[str, Policy] = {}
    for spec in specs or ("default",):
        name, policy = _policy_of(spec)
        if name in policies:
            raise InvalidSettingsError(f"--policy {spec}: another policy is already named {name!r}")
        policies[name] = policy
    return policies


def _policy_of(spec: str) -> tuple[str, Policy]:
    name, equals, rest = spec.partition("=")
    if equals:
        if not name.strip():
            raise InvalidSettingsError(
                f"--policy {spec} must begin with a name: NAME=option=value,option=value"
            )
        pairs = [part.partition("=") for part in rest.split(",") if part]
        return name, _policy(spec, {key.strip(): value.strip() for key, _, value in pairs})
    if spec == "default":
        return spec, Policy()
    path = Path(spec)
    if path.suffix in {".yaml", ".yml"}:
        return path.stem, read_file(path).defaults
    if path.suffix not in {".toml", ".json"}:
        raise InvalidSettingsError(
            f"--policy {spec} must be name=option=value,option=value, a BalancePolicy .yaml, or a "
            ".toml or .json file of options"
        )
    return path.stem, _policy(spec, _file(path))


def _file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InvalidSettingsError(f"--policy {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidSettingsError(f"--policy {path}: {error}") from None
    if not isinstance(values, dict):
        raise InvalidSettingsError(f"--policy {path}: the file must contain options by name")
    return values


def _policy(spec: str, values: Mapping[str, Any]) -> Policy:
    types = get_type_hints(Policy)
    chosen: dict[str, Any] = {}
    for key, value in values.items():
        name = _option(spec, key)
        if value == "":
            raise InvalidSettingsError(f"--policy {spec}: {key} needs a value, as in interval=20")
        if types[name] is bool:
            chosen[name] = {"true": True, "false": False}.get(str(value).lower(), value)
            continue
        try:
            chosen[name] = types[name](value)
        except (ValueError, TypeError, OverflowError):
            # The policy itself rejects unknown algorithms.
            if types[name] in {int, float}:
                raise InvalidSettingsError(
                    f"--policy {spec}: {key} must be a number, not {value!r}"
                ) from None
            chosen[name] = value
    try:
        return Policy(**chosen)
    except InvalidPolicyError as error:
        raise InvalidSettingsError(f"--policy {spec}: {error}") from None


def _option(spec: str, key: str) -> str:
    """The name of an option, given with or without its unit."""
    known = [field.name for field in fields(Policy)]
    plain = key.replace("-", "_")
    for name in (plain, f"{plain}_s"):
        if name in known:
            return name
    raise InvalidSettingsError(
        f"--policy {spec}: unknown option {key!r}; options are {', '.join(known)}"
    )
