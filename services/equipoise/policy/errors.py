"""Faults of a policy file."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFault:
    """One fault of a policy file."""

    path: str
    """Keys of the field, joined by dots; empty for a fault of the whole file."""

    line: int
    """Line of the field, from 1; 0 if unknown."""

    value: str
    """Value in the file; empty if it does not matter."""

    why: str
    """What is wrong, and the remedy."""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        what = f"{self.path}: " if self.path else ""
        value = f" (it is {self.value})" if self.value else ""
        return f"{where}{what}{self.why}{value}"


class PolicyError(ValueError):
    """A policy file was rejected as a whole; the message names the file and each fault."""

    def __init__(self, source: str, faults: Sequence[PolicyFault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        super().__init__(f"policy {source}: " + "; ".join(str(fault) for fault in self.faults))
