"""Where the lease is kept: one record, replaced by compare-and-set. Registers decide nothing."""

import json
from dataclasses import asdict
from typing import Protocol

from equipoise.balancer.leadership.standing import LeaseRecord, LeaseTiming, Sighting

ALONE = LeaseTiming(duration_s=2e9, renew_deadline_s=1e9, retry_s=1.0, request_timeout_s=1.0)
"""Timing of a register that nobody else can reach: a lease in it never ends by itself."""


class RegisterError(RuntimeError):
    """The register did not answer or refused; the message names it and what to do."""


class LeaseRegister(Protocol):
    """One record that many processes see. Each call may raise `RegisterError`, and be cancelled."""

    async def read(self) -> Sighting | None:
        """The record now; None if there is none."""

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Put `record` in the place of version `replacing` (None: of nothing).

        Returns it with its version, or None if another version was there.
        """

    async def close(self) -> None:
        """Release what the register holds."""


class SoleRegister:
    """The register of a balancer whose store lets one process in: there is no other candidate.

    `term` is the highest that was ever used.
    """

    def __init__(self, *, term: int) -> None:
        record = LeaseRecord(holder="", address="", term=term, renewals=0, duration_s=1.0)
        self._sighting = Sighting(record=record, version=record_to_text(record))

    async def read(self) -> Sighting | None:
        """The record now."""
        return self._sighting

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Put `record` in the place of version `replacing`."""
        if replacing != self._sighting.version:
            return None
        self._sighting = Sighting(record=record, version=record_to_text(record))
        return self._sighting

    async def close(self) -> None:
        """Nothing is held."""


def record_to_text(record: LeaseRecord) -> str:
    """A record as one line, which also serves as its version where the register has no other."""
    return json.dumps(asdict(record), sort_keys=True)


def record_from_text(text: str, *, where: str) -> LeaseRecord:
    """A record as it was written by `record_to_text`.

    Raises:
        RegisterError: it is none; `where` names the register.
    """
    try:
        values = json.loads(text)
        record = LeaseRecord(
            holder=str(values["holder"]),
            address=str(values["address"]),
            term=int(values["term"]),
            renewals=int(values["renewals"]),
            duration_s=float(values["duration_s"]),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RegisterError(
            f"{where} holds no lease of ours ({error!r}): remove it if no balancer runs"
        ) from error
    if not 0 < record.duration_s < ALONE.duration_s or record.term < 0:
        raise RegisterError(f"{where} holds a senseless lease: remove it if no balancer runs")
    return record
