"""Planted faults of leaders: terms, leases, the store, and what operators asked for."""

from dataclasses import replace
from typing import Any

from equipoise.balancer import pools
from equipoise.balancer.leadership import leader_state
from equipoise.balancer.leadership.leader_state import LeaderState, Outranked
from equipoise.balancer.service.worker_link import WorkerLinkService
from equipoise.planning.rollout import DeadlineCheck, Persisted, RankLost, Wave
from equipoise.pool.decisions import Decisions
from equipoise.pool.journal import Journal
from equipoise.pool.members import Roster
from equipoise.pool.membership import Membership
from equipoise.pool.number_claims import NumberClaims
from equipoise.pool.records import Hold
from equipoise.pool.rollouts import Rollouts
from tests.simulation import store
from tests.simulation.plants.plant import Plant, always
from tests.simulation.store import SimStore


def _term_from_anyone() -> list[tuple[Any, str, Any]]:
    async def leading(self: Any, hello: Any, _mailbox: Any) -> Any:
        found = self._seat.led
        if found is not None and hello.highest_term > found.term:
            self._seat._elector.apply(Outranked(term=hello.highest_term))
            return None
        return found

    return [(WorkerLinkService, "_leading", leading)]


def _audit_not_restored() -> list[tuple[Any, str, Any]]:
    forgotten_by = Journal.forgotten_by

    def without_audit(self: Any, stored: Any) -> Any:
        lost = forgotten_by(self, stored)
        return lost and replace(lost, audit=())

    return [(Journal, "forgotten_by", without_audit)]


def _unexplained() -> list[tuple[Any, str, Any]]:
    undecided = Decisions._undecided

    def silent(self: Any, *args: Any, **about: Any) -> Any:
        write = undecided(self, *args, **about)
        return replace(write, record=replace(write.record, reason=""))

    return [(Decisions, "_undecided", silent)]


async def _unconfirmed(self: Any, _hello: Any, _mailbox: Any) -> Any:
    return self._seat.led


def _hold_not_read() -> list[tuple[Any, str, Any]]:
    recall = SimStore.recall

    async def without_hold(store: Any, pool: str) -> Any:
        return replace(await recall(store, pool), hold=Hold())

    return [(SimStore, "recall", without_hold)]


def _hold_not_restored() -> list[tuple[Any, str, Any]]:
    restore = pools.restore

    async def forgetful(store: Any, pool: str, **about: Any) -> Any:
        return await restore(store, pool, **{**about, "known": None})

    return [(pools, "restore", forgetful)]


def _stage_before_write() -> list[tuple[Any, str, Any]]:
    begin = Wave.begin

    def begin_staging(*, target: Any, now: float, **about: Any) -> Any:
        wave, first = begin(target=target, now=now, **about)
        wave, then = wave.step(Persisted(generation=target.generation), now=now)
        return wave, (*then, *first)

    return [(Wave, "begin", begin_staging)]


def _epoch_reused() -> list[tuple[Any, str, Any]]:
    open_epoch = Roster.open_epoch

    def reuse(self: Any, *args: Any, **about: Any) -> None:
        self.highest_epoch = max(0, self.highest_epoch - 1)
        open_epoch(self, *args, **about)

    return [(Roster, "open_epoch", reuse)]


def _deadline_never() -> list[tuple[Any, str, Any]]:
    handle = Rollouts.handle

    def patient(self: Any, event: Any, *, now: float) -> Any:
        return () if isinstance(event, DeadlineCheck) else handle(self, event, now=now)

    return [(Rollouts, "handle", patient)]


def _rollout_outlives_epoch() -> list[tuple[Any, str, Any]]:
    # Either one alone is hidden by the other: a rollout ends with its ranks, before their epoch.
    handle = Rollouts.handle

    def deaf(self: Any, event: Any, *, now: float) -> Any:
        return () if isinstance(event, RankLost) else handle(self, event, now=now)

    return [(Rollouts, "handle", deaf), (Rollouts, "begin_epoch", always(None))]


def _fence_ignored() -> list[tuple[Any, str, Any]]:
    def unfenced(self: Any, data: Any, change: Any, term: int) -> Any:
        data["term"], data["server"] = term, self._server.num_failovers
        return change(data)

    return [(SimStore, "_fenced", unfenced)]


def _failover_unfenced() -> list[tuple[Any, str, Any]]:
    # Either one alone is hidden by the other: the leader after it skips the numbers it would use.
    fenced = SimStore._fenced

    def trusting(self: Any, data: Any, change: Any, term: int) -> Any:
        if term == data["term"]:
            data["server"] = self._server.num_failovers
        return fenced(self, data, change, term)

    return [(SimStore, "_fenced", trusting), (NumberClaims, "skip", always(None))]


def _generations_not_skipped() -> list[tuple[Any, str, Any]]:
    take_over = Membership._take_over

    def careless(self: Any, choice: Any, *, now: float) -> Any:
        self._numbers.skip = always(None)
        try:
            return take_over(self, choice, now=now)
        finally:
            del self._numbers.skip

    return [(Membership, "_take_over", careless)]


def _numbers_by_process() -> list[tuple[Any, str, Any]]:
    skip = NumberClaims.skip

    def skip_in_any_term(self: Any, workers: Any) -> None:
        self._term = 0
        skip(self, workers)

    return [(NumberClaims, "skip", skip_in_any_term)]


def _first_term_known() -> list[tuple[Any, str, Any]]:
    next_term = leader_state._next_term

    def known(state: Any) -> Any:
        return next_term(state) if state.seen or state.highest_term else 1

    return [(leader_state, "_next_term", known)]


def _failover_trusted() -> list[tuple[Any, str, Any]]:
    is_free = leader_state._is_free

    def trusting(state: Any, seen: Any) -> bool:
        return is_free(state, replace(seen, is_latest=True))

    return [(leader_state, "_is_free", trusting)]


LEADER_PLANTS = {
    "term-from-anyone": Plant(
        breaks="a leader gives up its term for one that any worker claims",
        patches=_term_from_anyone,
        kinds=("byzantine_term", "shift", "kill_worker", "operator"),
    ),
    "fence-ignored": Plant(
        breaks="the store accepts writes of a term that is over",
        patches=_fence_ignored,
        kinds=("pause_leader", "pause_balancer", "slow_network", "shift", "operator", "cut"),
    ),
    "lease-without-end": Plant(
        breaks="a leader leads on although its lease has expired",
        patches=lambda: [
            (LeaderState, "leads", lambda self, *, now: self.role == "leading"),
            (LeaderState, "has_run_out", always(False)),
        ],
    ),
    "failover-trusted": Plant(
        breaks="a lease is taken as the latest although the store failed over since it was written",
        patches=_failover_trusted,
        kinds=("store_goes_back", "pause_leader", "shift"),
    ),
    "failover-unfenced": Plant(
        breaks="the store accepts writes of a term that began before its failover",
        patches=_failover_unfenced,
        kinds=("set_store_back_behind_split", "shift", "operator"),
    ),
    "numbers-not-skipped": Plant(
        breaks="a new leader opens the epoch after the latest that it knows of",
        patches=lambda: [(NumberClaims, "skip", always(None))],
        kinds=("set_store_back_behind_epoch", "shift", "operator"),
    ),
    "generations-not-skipped": Plant(
        breaks="a leader that takes over an epoch without all ranks skips no generations",
        patches=_generations_not_skipped,
        kinds=("set_store_back_behind_group", "shift", "operator"),
    ),
    "numbers-by-process": Plant(
        breaks="each leader that knows the same gives the same ranks the same numbers",
        patches=_numbers_by_process,
        kinds=(
            *("set_store_back_behind_group", "shift", "operator", "isolate", "kill_leader"),
            "stop_worker",
        ),
    ),
    "first-term-known": Plant(
        breaks="each balancer that knows no term begins with the same one",
        patches=_first_term_known,
        kinds=("lose_store_behind_leader", "kill_leader", "kill_balancer"),
    ),
    "term-unconfirmed": Plant(
        breaks="a leader does not tell workers that obey a later term that its lease was renewed",
        patches=lambda: [(WorkerLinkService, "_leading", _unconfirmed)],
        kinds=("lose_control_plane", "shift", "kill_worker"),
    ),
    "audit-not-restored": Plant(
        breaks="audit records are lost with the store, although a balancer knows them",
        patches=_audit_not_restored,
        kinds=("operator", "store_forgets", "shift"),
    ),
    "decision-unexplained": Plant(
        breaks="a decision against planning on a window has no reason",
        patches=_unexplained,
    ),
    "hold-not-restored": Plant(
        breaks="what operators hold a pool to is lost with the store, although a balancer knows it",
        patches=_hold_not_restored,
        kinds=("operator", "store_forgets", "shift"),
    ),
    "hold-not-read": Plant(
        breaks="balancers do not read what operators hold the pool to",
        patches=_hold_not_read,
        kinds=("operator", "kill_leader", "pause_leader", "shift"),
    ),
    "late-write-unnoticed": Plant(
        breaks="a request that the store applied after its timeout is not adopted",
        patches=lambda: [(Journal, "note_stored", always(False))],
        kinds=("store_answers_late", "operator", "shift"),
    ),
    "audit-not-compared": Plant(
        breaks="a request is recorded although the store has later ones than its leader knows",
        patches=lambda: [(store, "_check_audit", always(None))],
        kinds=("store_answers_late", "store_hangs", "cut", "operator", "shift"),
    ),
    "epoch-reused": Plant(
        breaks="a new epoch gets the number of the one before",
        patches=_epoch_reused,
    ),
    "epoch-written-once": Plant(
        breaks="an epoch that the store did not accept is not written again",
        patches=lambda: [(Membership, "write_again", always(()))],
        kinds=("store_down", "store_full", "kill_worker", "stop_worker", "shift"),
    ),
    "stage-before-write": Plant(
        breaks="ranks stage a layout that the store does not have yet",
        patches=_stage_before_write,
    ),
    "deadline-never": Plant(
        breaks="a wave has no timeout",
        patches=_deadline_never,
        kinds=("shift", "store_full", "store_down", "disk_hangs", "operator", "slow_network"),
    ),
    "rollout-outlives-epoch": Plant(
        breaks="a lost rank does not end its rollout, which continues in the next epoch",
        patches=_rollout_outlives_epoch,
        kinds=("kill_worker", "shift", "slow_network", "disk_hangs"),
    ),
}
"""Planted faults of leaders, by name."""
