"""`equipoise policy validate|show|diff|schema`: files on this machine, no balancer."""

import json
import sys
from pathlib import Path

import yaml

from equipoise.cli.offline.settings import ToolInputError
from equipoise.planning.policy import Policy
from equipoise.policy.digest import changes, digest
from equipoise.policy.errors import PolicyError
from equipoise.policy.reading import MAX_BYTES, ReadPolicy, read_policy
from equipoise.policy.reference import json_schema, written

EXIT_BAD_INPUT = 2
EXIT_DIFFERS = 3

ALL_POOLS = "all other pools"


def read_file(path: Path) -> ReadPolicy:
    """A policy file.

    Raises:
        ToolInputError: it cannot be read.
        PolicyError: it is refused.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode(errors="replace")
    except OSError as error:
        raise ToolInputError(f"{path}: {error.strerror}") from None
    return read_policy(text, source=str(path))


def policies_by_pool(read: ReadPolicy, pool: str = "") -> dict[str, Policy]:
    """The policy of one pool, or of every pool that is named and of all others."""
    if pool:
        return {pool: read.pools.get(pool, read.defaults)}
    return {**read.pools, ALL_POOLS: read.defaults}


def validate(file: Path, *, as_json: bool) -> int:
    """Say whether a file is good; 2 if it is not.

    Raises:
        ToolInputError: it cannot be read.
    """
    try:
        read = read_file(file)
    except PolicyError as error:
        if as_json:
            faults = [
                {"path": one.path, "line": one.line, "value": one.value, "why": one.why}
                for one in error.faults
            ]
            print(json.dumps({"valid": False, "faults": faults}, indent=2))
        else:
            for fault in error.faults:
                print(f"{file}: {fault}", file=sys.stderr)
        return EXIT_BAD_INPUT
    hashes = {name: digest(policy) for name, policy in policies_by_pool(read).items()}
    if as_json:
        print(json.dumps({"valid": True, "hashes": hashes}, indent=2))
    else:
        words = ", ".join(f"{one} for {name}" for name, one in hashes.items())
        print(f"{file} is good: policy {words}")
    return 0


def show(file: Path, *, pool: str, as_json: bool) -> int:
    """Print all values that hold.

    Raises:
        ToolInputError: the file cannot be read.
        PolicyError: it is refused.
    """
    shown = policies_by_pool(read_file(file), pool)
    if as_json:
        document = {
            name: {"hash": digest(policy), "policy": written(policy)}
            for name, policy in shown.items()
        }
        print(json.dumps(document, indent=2))
        return 0
    for name, policy in shown.items():
        print(f"# {name}: policy {digest(policy)}")
        print(yaml.safe_dump(written(policy), sort_keys=False, allow_unicode=True))
    return 0


def diff(before: Path, after: Path, *, pool: str, as_json: bool) -> int:
    """Print what differs between two files; 3 if anything does.

    Raises:
        ToolInputError: a file cannot be read.
        PolicyError: one is refused.
    """
    old, new = read_file(before), read_file(after)
    names = [pool] if pool else [*sorted(old.pools.keys() | new.pools.keys()), ALL_POOLS]
    differences = {
        name: list(changes(old.pools.get(name, old.defaults), new.pools.get(name, new.defaults)))
        for name in names
    }
    if as_json:
        print(json.dumps(differences, indent=2))
    else:
        for name, lines in differences.items():
            for line in lines:
                print(f"{name}: {line}")
        if not any(differences.values()):
            print("no difference")
    return EXIT_DIFFERS if any(differences.values()) else 0


def schema() -> int:
    """Print the JSON Schema."""
    print(json.dumps(json_schema(), indent=2))
    return 0
