"""`QuarantineRecords`: a decision record for each worker that is quarantined or released."""

from collections import deque

from equipoise.pool.effects import Chain, Effect, WriteDecision
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.quarantine import Quarantine
from equipoise.pool.records import DecisionKind, DecisionRecord

MAX_RECORDS = 16
"""Quarantines and releases that are recorded within `PERIOD_S`."""

PERIOD_S = 3600.0
"""An hour, in seconds."""


class QuarantineRecords:
    """What of a pool's quarantine is already recorded."""

    def __init__(self, policy: PoolPolicy, *, layouts: PoolLayouts, quarantine: Quarantine) -> None:
        self._policy = policy
        self._layouts = layouts
        self._quarantine = quarantine
        # Reasons by worker and boot ID.
        self._recorded: dict[tuple[str, str], str] = {}
        self._times_s: deque[float] = deque(maxlen=MAX_RECORDS)

    def record(self, *, now: float) -> Chain:
        """Record who was quarantined or released since the last call.

        At most `MAX_RECORDS` in `PERIOD_S`, so that a worker which restarts again and again does
        not push the other decisions out of the store; the log has all of them.
        """
        reasons = {(one.worker, one.boot_id): one.reason for one in self._quarantine.workers}
        if reasons.keys() == self._recorded.keys():
            self._recorded = reasons
            return ()
        changes = [(True, key, reasons[key]) for key in reasons if key not in self._recorded]
        changes += [(False, key, why) for key, why in self._recorded.items() if key not in reasons]
        self._recorded = reasons
        effects: list[Effect] = []
        for is_quarantined, (name, boot_id), reason in changes:
            if len(self._times_s) == MAX_RECORDS and now - self._times_s[0] < PERIOD_S:
                break
            self._times_s.append(now)
            is_what = (
                "is quarantined" if is_quarantined else "is no longer quarantined; the reason was"
            )
            record = DecisionRecord(
                kind=DecisionKind.QUARANTINE,
                time_unix_s=now,
                accepted=is_quarantined,
                reason=f"worker {name} (boot {boot_id}) {is_what}: {reason}",
                base_generation=self._layouts.stored_generation or 0,
                policy_hash=self._policy.in_force.digest,
            )
            effects.append(WriteDecision(record=record))
        return tuple(effects)
