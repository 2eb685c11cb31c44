"""The digest of a policy, and the differences between two policies."""

import hashlib
import json
from dataclasses import asdict

from equipoise.planning.policy import Policy
from equipoise.policy.setting import SETTINGS


def digest(policy: Policy) -> str:
    """Twelve hexadecimal characters that depend on the values only, not on how they are written."""
    canonical = json.dumps(asdict(policy), sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:12]


def changes(before: Policy, after: Policy) -> tuple[str, ...]:
    """Each difference, in the form of a policy file: `interval 10s → 20s`."""
    return tuple(
        f"{one.path} {one.form.write(old)} → {one.form.write(new)}"
        for one in SETTINGS
        if (old := getattr(before, one.name)) != (new := getattr(after, one.name))
    )
