"""Planted faults of how a leader judges workers: which live, which are to blame, what is true."""

from dataclasses import replace
from typing import Any

from equipoise.planning.load import WindowLoad
from equipoise.pool import membership as pool_membership
from equipoise.pool import quarantine
from equipoise.pool.agreement import Agreement
from equipoise.pool.attendance import Attendance
from equipoise.pool.hello_checks import UsedNumbers
from equipoise.pool.interruptions import Interruptions
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.member import Member
from equipoise.pool.members import Roster
from equipoise.pool.reachability import Blame, Reachability
from tests.simulation.plants.plant import Plant, always


def _first_to_report_blamed() -> list[tuple[Any, str, Any]]:
    judge = Interruptions.judge

    def hasty(self: Any, **about: Any) -> Any:
        if self._serving_since_s is None:
            self._enders = dict(list(self._enders.items())[:1])
        return judge(self, **about)

    return [(Interruptions, "judge", hasty), (Reachability, "blame", always(Blame()))]


def _unmade_generation_believed() -> list[tuple[Any, str, Any]]:
    note_running = Agreement.note_running

    def blind(self: Any, member: Any, heartbeat: Any) -> bool:
        is_unknown = self._layouts.get(heartbeat.generation) is None
        return is_unknown or note_running(self, member, heartbeat)

    return [(Agreement, "note_running", blind)]


def _losses_undisputed() -> list[tuple[Any, str, Any]]:
    decide = pool_membership.next_epoch
    believing = lambda *args, **about: replace(  # noqa: E731
        decide(*args, **about), is_disputed=False
    )
    return [(pool_membership, "next_epoch", believing)]


def _rank_of_latest_process(self: Any, worker: str, running: Any) -> bool:
    known = self.members.get(worker)
    return known is not None and known.rank == running.rank


MEMBER_PLANTS = {
    "rank-of-latest-process": Plant(
        breaks="a rank is rejected if another process of its worker's name came meanwhile",
        patches=lambda: [(Roster, "has_rank", _rank_of_latest_process)],
        kinds=("namesake", "shift", "operator"),
    ),
    "rank-of-any-process": Plant(
        breaks="a process gets the rank of another one of its worker's name",
        patches=lambda: [(Member, "is_process_of", always(True))],
        kinds=("namesake", "shift", "kill_worker", "cut"),
    ),
    "silence-unnoticed": Plant(
        breaks="a worker that is connected and silent counts as alive",
        patches=lambda: [
            (Attendance, "silent_workers", always(frozenset())),
            (Attendance, "note_silence", always(())),
        ],
        kinds=("pause_worker", "isolate", "cut", "shift"),
    ),
    "loss-unblamed": Plant(
        breaks="a worker that ends one epoch after another stays a rank",
        patches=lambda: [(Interruptions, "judge", always(()))],
        kinds=("lie", "kill_worker", "shift"),
    ),
    "crashes-unblamed": Plant(
        breaks="a worker that crashes again and again gets a rank each time at once",
        patches=lambda: [(Interruptions, "_count_deaths", always(()))],
        kinds=("crash_loop", "shift"),
    ),
    "failures-unlimited": Plant(
        breaks="a group that fails at once is formed again at once, however often",
        patches=lambda: [(Interruptions, "wait", always(""))],
        kinds=("broken_groups", "shift", "operator"),
    ),
    "first-report-blamed": Plant(
        breaks="if ranks never meet, the one that reports it first is blamed, and not the host",
        patches=_first_to_report_blamed,
        kinds=("unreachable_host", "kill_worker", "shift"),
    ),
    "unreached-ignored": Plant(
        breaks="nothing is made of the peers that ranks report as out of reach",
        patches=lambda: [(Reachability, "blame", always(Blame()))],
        kinds=("unreachable_rank", "kill_worker", "restart_everything"),
    ),
    "loss-undisputed": Plant(
        breaks="a worker that reports losses which most ranks deny is never left out for them",
        patches=_losses_undisputed,
        kinds=("false_loss", "kill_worker", "shift"),
    ),
    "shape-unchecked": Plant(
        breaks="workers that do not fit the pool get a rank",
        patches=lambda: [(quarantine, "odd_workers", always({}))],
        kinds=("lie", "restart_everything", "store_forgets"),
    ),
    "leap-believed": Plant(
        breaks="any number that a worker reports is believed",
        patches=lambda: [(UsedNumbers, "fault", always(None))],
        kinds=("lie", "kill_worker", "shift"),
    ),
    "generation-believed": Plant(
        breaks="a rank that reports a generation that its pool does not run is not named",
        patches=_unmade_generation_believed,
        kinds=("false_generation", "kill_worker", "shift"),
    ),
    "other-step-unnoticed": Plant(
        breaks="a rank that reports another step for its switch is not named",
        patches=lambda: [(Agreement, "note_switch", always(None))],
        kinds=("other_step", "shift"),
    ),
    "gap-counted": Plant(
        breaks="loads of a gap in reports count as those of the window in which they arrive",
        patches=lambda: [
            (ClosedWindow, "doubt", property(always(""))),
            (WindowLoad, "at_common_steps", lambda self, _steps: self),
        ],
        kinds=("report_gap",),
    ),
}
"""Planted faults of how a leader judges workers, by name."""
