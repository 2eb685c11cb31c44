"""Where the lease is stored: one record, replaced by compare-and-set."""

import json
from dataclasses import fields
from typing import Protocol, get_type_hints

from equipoise.balancer.leadership.lease import LeaseRecord, LeaseTiming, Sighting
from equipoise.balancer.store.records import INVALID_RECORD, check_type
from equipoise.balancer.store.store import checked_term

ALONE = LeaseTiming(duration_s=2e9, renew_deadline_s=1e9, retry_s=1.0, request_timeout_s=1.0)
"""Timing of a register that no other candidate can reach: its lease never expires."""


_TYPES = get_type_hints(LeaseRecord)


class RegisterError(RuntimeError):
    """The register did not answer, or rejected the request; the message names it and the remedy."""


class LeaseRegister(Protocol):
    """One record shared by processes. Calls may raise `RegisterError` and may be cancelled."""

    async def read(self) -> Sighting | None:
        """Return the current record; None if there is none."""

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Replace version `replacing` (None: an empty register) by `record`.

        Returns the record with its new version, or None if the register held another version.
        """

    async def close(self) -> None:
        """Close its connection."""


class SoleRegister:
    """The register of a balancer whose store admits one process, so it is the only candidate.

    `term` is the highest term ever used.
    """

    def __init__(self, *, term: int) -> None:
        record = LeaseRecord(holder="", address="", term=term, renewals=0, duration_s=1.0)
        self._sighting = Sighting(record=record, version=record_to_text(record))

    async def read(self) -> Sighting | None:
        """Return the current record."""
        return self._sighting

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Replace version `replacing` by `record`."""
        if replacing != self._sighting.version:
            return None
        self._sighting = Sighting(record=record, version=record_to_text(record))
        return self._sighting

    async def close(self) -> None:
        """Do nothing."""


def record_to_text(record: LeaseRecord) -> str:
    """Format a record as one line, which is also its version in registers without versions."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return json.dumps(values, sort_keys=True)


def record_from_text(text: str, *, where: str) -> LeaseRecord:
    """Parse what `record_to_text` wrote.

    Raises:
        RegisterError: the text is not a valid lease; `where` names the register.
    """
    try:
        found = json.loads(text)
        values = {name: found[name] for name in _TYPES}
        for name, expected in _TYPES.items():
            check_type(name, values[name], expected)
        checked_term(values["term"])
        if not 0 < values["duration_s"] < ALONE.duration_s:
            raise ValueError(f"duration_s cannot be {values['duration_s']}")
    except INVALID_RECORD as error:
        raise RegisterError(
            f"{where} holds an invalid lease ({error!r}): remove it if no balancer is running"
        ) from error
    return LeaseRecord(**values)
