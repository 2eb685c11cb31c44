"""`Pool`: the parts of one pool. Each owns its state; the others ask it by method."""

from equipoise.policy.book import PolicyBook
from equipoise.pool.agreement import Agreement
from equipoise.pool.attendance import Attendance
from equipoise.pool.counters import Counters
from equipoise.pool.decisions import Decisions
from equipoise.pool.health import Diagnosis, Health, diagnose
from equipoise.pool.interruptions import Interruptions
from equipoise.pool.journal import Journal
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.members import Roster
from equipoise.pool.membership import Membership
from equipoise.pool.policy import PoolPolicy
from equipoise.pool.quarantine import Quarantine
from equipoise.pool.quarantine_records import QuarantineRecords
from equipoise.pool.records import PoolMemory
from equipoise.pool.rollouts import Rollouts
from equipoise.pool.verification import Verification
from equipoise.pool.windows import Windows


class Pool:
    """One pool. `PoolController` changes it; status and metrics read it.

    It begins as the store knew it, without workers. `elsewhere` says why its ranks are not
    connected here, for a balancer that does not lead, whose `term` is 0; else it is empty.
    `revision` grows with every change.
    """

    def __init__(
        self,
        name: str,
        *,
        policies: PolicyBook,
        memory: PoolMemory,
        term: int = 0,
        elsewhere: str = "",
        revision: int = 1,
    ) -> None:
        self.elsewhere = elsewhere
        """Why the pool's ranks are not connected here; empty if they are."""
        self.revision = revision
        """A number that grows with every change."""
        latest, members = memory.last_decision, memory.members
        self.name = name
        self.policy = policy = PoolPolicy(
            name, policies, recorded=latest.policy_hash if latest is not None else ""
        )
        self.counters = counters = Counters(policy.values)
        self.journal = journal = Journal(policy, memory)
        self.roster = roster = Roster(
            name, highest_epoch=members.epoch if members is not None else 0
        )
        self.layouts = layouts = PoolLayouts(memory)
        self.verification = verification = Verification(roster=roster)
        self.windows = windows = Windows(policy, remembered=memory.averages, counters=counters)
        self.rollouts = rollouts = Rollouts(
            policy, roster=roster, layouts=layouts, verification=verification, counters=counters
        )
        self.attendance = attendance = Attendance(policy, roster=roster, counters=counters)
        self.interruptions = interruptions = Interruptions(roster=roster)
        self.quarantine = quarantine = Quarantine(roster=roster, rejections=counters.rejections)
        self.agreement = agreement = Agreement(
            policy,
            roster=roster,
            attendance=attendance,
            layouts=layouts,
            verification=verification,
            quarantine=quarantine,
            windows=windows,
            rollouts=rollouts,
            counters=counters,
        )
        self.membership = Membership(
            policy,
            roster=roster,
            attendance=attendance,
            interruptions=interruptions,
            quarantine=quarantine,
            agreement=agreement,
            layouts=layouts,
            verification=verification,
            windows=windows,
            rollouts=rollouts,
            counters=counters,
            recorded=members,
            term=term,
        )
        self.decisions = Decisions(
            policy,
            roster=roster,
            attendance=attendance,
            agreement=agreement,
            layouts=layouts,
            windows=windows,
            rollouts=rollouts,
            journal=journal,
            counters=counters,
        )
        self.quarantine_records = QuarantineRecords(policy, layouts=layouts, quarantine=quarantine)

    def note_change(self) -> None:
        """Something changed that status shows."""
        self.revision += 1

    def hand_over(self, elsewhere: str) -> None:
        """This balancer no longer leads."""
        self.elsewhere = elsewhere

    def diagnosis(self) -> Diagnosis:
        """The pool's health, and the reason for it."""
        if self.elsewhere:
            return Diagnosis(health=Health.WAITING, reason=self.elsewhere)
        return diagnose(
            self.roster,
            opening=self.membership.opening,
            silent=self.attendance.silent,
            left_out={
                **self.roster.contradicting,
                **self.attendance.excluded,
                **self.interruptions.excluded,
            },
            quarantined=self.quarantine.reasons,
            faults=self.agreement.faults,
            store_fault=self.journal.store_fault,
        )
