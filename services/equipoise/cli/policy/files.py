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


def policies_by_pool(read: ReadPolicy) -> dict[str, Policy]:
    """The policies of every pool and phase that the file names, and of all other pools."""
    return {**read.named(), ALL_POOLS: read.defaults}


def policy_of(read: ReadPolicy, pool: str, phase: Phase | None, *, file: Path) -> Policy:
    """The policy of a pool in a file.

    Raises:
        InvalidSettingsError: it depends on the pool's phase, which is None.
    """
    if phase is None and read.phases and pool not in read.pools:
        raise InvalidSettingsError(
            f"{file} has policies by phase and no pool named {pool}: add --phase, the pool's phase "
            f"({', '.join(Phase)})"
        )
    return read.of(pool, phase)


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
        InvalidSettingsError: the file cannot be read, or the pool's phase decides and is missing.
        PolicyError: it is invalid.
    """
    read, pool = read_file(settings.file), settings.pool
    shown = (
        {pool: policy_of(read, pool, settings.phase, file=settings.file)}
        if pool
        else policies_by_pool(read)
    )
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
        InvalidSettingsError: a file cannot be read, or the pool's phase decides and is missing.
        PolicyError: a file is invalid.
    """
    old, new = read_file(settings.before), read_file(settings.after)
    pool, phase = settings.pool, settings.phase
    if pool:
        before = policy_of(old, pool, phase, file=settings.before)
        differences = {
            pool: list(changes(before, policy_of(new, pool, phase, file=settings.after)))
        }
    else:
        named, renamed = old.named(), new.named()
        differences = {
            name: list(changes(named.get(name, old.defaults), renamed.get(name, new.defaults)))
            for name in [*sorted(named.keys() | renamed.keys()), ALL_POOLS]
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
