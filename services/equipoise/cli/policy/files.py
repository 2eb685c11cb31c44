"""`equipoise policy validate|show|diff|schema`, which read files and talk to no balancer."""

import sys
from pathlib import Path

import yaml

from equipoise.cli.display import print_json
from equipoise.cli.policy.settings import (
    PolicyDiffSettings,
    PolicyShowSettings,
    PolicyValidateSettings,
)
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.policy.digest import changes, digest
from equipoise.policy.errors import PolicyError
from equipoise.policy.reading import MAX_BYTES, ReadPolicy, read_policy
from equipoise.policy.reference import json_schema, written
from equipoise.settings.errors import InvalidSettingsError

EXIT_BAD_INPUT = 2
EXIT_DIFFERENT = 3

ALL_POOLS = "all other pools"


def read_file(path: Path) -> ReadPolicy:
    """Read a policy file.

    Raises:
        InvalidSettingsError: it cannot be read.
        PolicyError: it is invalid.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode(errors="replace")
    except OSError as error:
        raise InvalidSettingsError(f"{path}: {error.strerror}") from None
    return read_policy(text, source=str(path))


def policies_by_pool(
    read: ReadPolicy, pool: str = "", phase: Phase | None = None
) -> dict[str, Policy]:
    """The policy of `pool`, which serves `phase` if that is known.

    Without `pool`, of every pool and phase that the file names, and of all other pools.
    """
    if pool:
        return {pool: read.of(pool, phase)}
    return {**read.named(), ALL_POOLS: read.defaults}


def validate(settings: PolicyValidateSettings) -> int:
    """Print every fault of a file; return 2 if there is one.

    Raises:
        InvalidSettingsError: the file cannot be read.
    """
    try:
        read = read_file(settings.file)
    except PolicyError as error:
        if settings.json:
            faults = [
                {"path": one.path, "line": one.line, "value": one.value, "why": one.why}
                for one in error.faults
            ]
            print_json({"valid": False, "faults": faults})
        else:
            for fault in error.faults:
                print(f"{settings.file}: {fault}", file=sys.stderr)
        return EXIT_BAD_INPUT
    hashes = {name: digest(policy) for name, policy in policies_by_pool(read).items()}
    if settings.json:
        print_json({"valid": True, "hashes": hashes})
    else:
        listed = ", ".join(f"{one} for {name}" for name, one in hashes.items())
        print(f"{settings.file} is valid: policy {listed}")
    return 0


def show(settings: PolicyShowSettings) -> int:
    """Print every value in force under a file.

    Raises:
        InvalidSettingsError: the file cannot be read.
        PolicyError: it is invalid.
    """
    shown = policies_by_pool(read_file(settings.file), settings.pool)
    if settings.json:
        document = {
            name: {"hash": digest(policy), "policy": written(policy)}
            for name, policy in shown.items()
        }
        print_json(document)
        return 0
    for name, policy in shown.items():
        print(f"# {name}: policy {digest(policy)}")
        print(yaml.safe_dump(written(policy), sort_keys=False, allow_unicode=True))
    return 0


def diff(settings: PolicyDiffSettings) -> int:
    """Print what differs between two files; return 3 if anything does.

    Raises:
        InvalidSettingsError: a file cannot be read.
        PolicyError: a file is invalid.
    """
    old, new = read_file(settings.before), read_file(settings.after)
    before, after = old.named(), new.named()
    every = [*sorted(before.keys() | after.keys()), ALL_POOLS]
    differences = {
        name: list(changes(before.get(name, old.defaults), after.get(name, new.defaults)))
        for name in ([settings.pool] if settings.pool else every)
    }
    if settings.json:
        print_json(differences)
    else:
        for name, lines in differences.items():
            for line in lines:
                print(f"{name}: {line}")
        if not any(differences.values()):
            print("no difference")
    return EXIT_DIFFERENT if any(differences.values()) else 0


def schema() -> None:
    """Print the JSON Schema of policy files."""
    print_json(json_schema())
