"""A policy's name by its contents, and what differs between two, for records and people."""

import hashlib
import json
from dataclasses import asdict

from equipoise.planning.policy import Policy
from equipoise.policy.document import settings

DIGEST_CHARACTERS = 12


def digest(policy: Policy) -> str:
    """Twelve hexadecimal characters that are the same for the same values, however written."""
    canonical = json.dumps(asdict(policy), sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:DIGEST_CHARACTERS]


def changes(before: Policy, after: Policy) -> tuple[str, ...]:
    """Each value that differs, in the file's words: `interval 10s → 20s`."""
    return tuple(
        f"{path} {setting.write(old)} → {setting.write(new)}"
        for path, setting, _ in settings()
        if (old := getattr(before, setting.name)) != (new := getattr(after, setting.name))
    )
