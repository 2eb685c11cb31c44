"""What is wrong with a policy file, fault by fault."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFault:
    """One fault. `path` leads to the field with dots, `line` is from 1, `value` as it was written.

    `line` is 0 and `value` empty where there is none to point to.
    """

    path: str
    line: int
    value: str
    why: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        what = f"{self.path}: " if self.path else ""
        value = f" (it is {self.value})" if self.value else ""
        return f"{where}{what}{self.why}{value}"


class PolicyError(ValueError):
    """A policy was refused as a whole; the message names the file and each fault."""

    def __init__(self, source: str, faults: Sequence[PolicyFault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        super().__init__(f"policy {source}: " + "; ".join(str(fault) for fault in self.faults))
