"""Whether workers can compute alike, by the backends that each of them could run.

Knows words only: which kernels there are is the workers' business.
"""

from collections.abc import Collection


def unshared(told: Collection[tuple[str, ...]]) -> str | None:
    """An operation that no backend can compute for all; None if there is a backend for each.

    Each of `told` is what `Hello.backends` has: "operation=backend|backend", an operation each.
    """
    tables = [_table(one) for one in told]
    for operation in sorted(set().union(*tables)):
        if not set.intersection(*(table.get(operation, set()) for table in tables)):
            return operation
    return None


def _table(told: tuple[str, ...]) -> dict[str, set[str]]:
    """Backends by operation."""
    pairs = (one.partition("=") for one in told)
    return {operation: set(names.split("|")) for operation, _, names in pairs}
