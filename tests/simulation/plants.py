"""Planted faults: real code broken on purpose, to know that the invariants would notice.

Each stands for a fault that was there once, or that one careless line would make.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from equipoise.balancer import persistence, pools
from equipoise.balancer.leadership import leader_state
from equipoise.balancer.leadership.leader_state import LeaderState, Outranked
from equipoise.balancer.service.worker_link import WorkerLinkService
from equipoise.planning.load import WindowLoad
from equipoise.planning.rollout import DeadlineCheck, Persisted, RankLost, Wave
from equipoise.pool import membership as pool_membership
from equipoise.pool import quarantine
from equipoise.pool.agreement import Agreement
from equipoise.pool.attendance import Attendance
from equipoise.pool.hello_checks import UsedNumbers
from equipoise.pool.interruptions import Interruptions
from equipoise.pool.journal import Journal
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.members import Roster
from equipoise.pool.membership import Membership
from equipoise.pool.records import Hold
from equipoise.pool.rollouts import Rollouts
from equipoise.rank.agent import Agent
from equipoise.rank.scrubber import Scrubber
from equipoise.rank.transfer import ExpertPuller
from equipoise.worker import engine, group
from equipoise.worker.epoch_state import EpochState
from equipoise.worker.lifecycle import Worker
from equipoise.worker.rank import Rank
from tests.simulation.experts import SimCheckpoint
from tests.simulation.schedule import USUAL
from tests.simulation.store import SimStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One planted fault."""

    breaks: str
    """What is broken, in a sentence."""

    patches: Callable[[], list[tuple[Any, str, Any]]]
    """Target, attribute and replacement of each patch."""

    kinds: tuple[str, ...] = USUAL
    """Kinds of faults of the schedules that search for it."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break one thing inside the block; nothing for an empty name."""
    with ExitStack() as stack:
        for target, attribute, value in PLANTS[name].patches() if name else ():
            stack.enter_context(patch.object(target, attribute, value))
        yield


def _term_from_anyone() -> list[tuple[Any, str, Any]]:
    async def leading(self: Any, hello: Any, _mailbox: Any) -> Any:
        found = self._seat.led
        if found is not None and hello.highest_term > found.term:
            self._seat._elector.apply(Outranked(term=hello.highest_term))
            return None
        return found

    return [(WorkerLinkService, "_leading", leading)]


def _epoch_unsaid() -> list[tuple[Any, str, Any]]:
    hello = Worker.hello
    silent = lambda self: replace(hello(self), highest_epoch=0)  # noqa: E731
    return [(Worker, "hello", silent), (EpochState, "rejection", lambda *_a: None)]


def _digests_ignored() -> list[tuple[Any, str, Any]]:
    blank = {"peers_digest": 0, "layout_digest": 0, "staged_digest": 0}
    check, agreed = engine.check_group, engine.agreed_generation

    def blanked(headers: Any) -> Any:
        return tuple(
            one._replace(**blank) if hasattr(one, "_replace") else replace(one, **blank)
            for one in headers
        )

    return [
        (group, "check_arrivals", lambda *_a, **_k: None),
        (engine, "check_group", lambda headers, **names: check(blanked(headers), **names)),
        (engine, "agreed_generation", lambda headers: agreed(blanked(headers))),
        (engine, "staged_conflict", lambda *_a, **_k: ""),
    ]


def _hold_not_read() -> list[tuple[Any, str, Any]]:
    recall = persistence.recall

    async def without_hold(store: Any, pool: str) -> Any:
        return replace(await recall(store, pool), hold=Hold())

    return [(persistence, "recall", without_hold)]


def _hold_not_restored() -> list[tuple[Any, str, Any]]:
    restore = pools.restore

    async def forgetful(store: Any, pool: str, **about: Any) -> Any:
        return await restore(store, pool, **{**about, "known": None})

    return [(pools, "restore", forgetful)]


def _switch_alone() -> list[tuple[Any, str, Any]]:
    def eager(headers: Any) -> int | None:
        newest = max(header.staged_generation for header in headers)
        return newest if newest > headers[0].generation else None

    return [(engine, "agreed_generation", eager)]


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

    return [(Rollouts, "handle", deaf), (Rollouts, "begin_epoch", _always(None))]


def _fence_ignored() -> list[tuple[Any, str, Any]]:
    def unfenced(_self: Any, data: Any, change: Any, term: int) -> Any:
        data["term"] = term
        return change(data)

    return [(SimStore, "_fenced", unfenced)]


async def _found_good(_self: Any, _layer: int, _slot: int) -> None:
    return None


async def _scrub_in_silence(self: Any) -> None:
    await self.scrubber.run()


async def _for_ever(_self: Any) -> None:
    await asyncio.get_running_loop().create_future()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_about: value


def _failover_trusted() -> list[tuple[Any, str, Any]]:
    is_free = leader_state._is_free

    def trusting(state: Any, seen: Any) -> bool:
        return is_free(state, replace(seen, is_latest=True))

    return [(leader_state, "_is_free", trusting)]


def _without_running() -> list[tuple[Any, str, Any]]:
    hello = Worker.hello
    return [(Worker, "hello", lambda self: replace(hello(self), running=None))]


def _first_to_report_blamed() -> list[tuple[Any, str, Any]]:
    judge = Interruptions.judge

    def hasty(self: Any, **about: Any) -> Any:
        if self._serving_since_s is None:
            self._enders = dict.fromkeys(list(self._enders)[:1])
        return judge(self, **about)

    return [(Interruptions, "judge", hasty)]


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


PLANTS = {
    "term-from-anyone": Plant(
        breaks="a leader gives up its term for one that any worker claims",
        patches=_term_from_anyone,
        kinds=("byzantine_term", "shift", "kill_worker", "operator"),
    ),
    "epoch-unsaid": Plant(
        breaks="a worker does not say which epoch it has taken up",
        patches=_epoch_unsaid,
        kinds=("store_forgets", "store_goes_back", "kill_worker", "kill_leader", "disk_hangs"),
    ),
    "checkpoint-unverified": Plant(
        breaks="what is read from a checkpoint is not compared with its manifest",
        patches=lambda: [(SimCheckpoint, "verifies", False)],
        kinds=("disk_damaged", "kill_worker", "shift", "restart_everything"),
    ),
    "digests-ignored": Plant(
        breaks="ranks compare numbers of layouts, not digests",
        patches=_digests_ignored,
        kinds=("wrong_layout", "stop_worker", "kill_worker", "shift"),
    ),
    "hold-not-restored": Plant(
        breaks="what operators hold a pool to is lost with the store, although a balancer knows it",
        patches=_hold_not_restored,
        kinds=("operator", "store_forgets", "shift"),
    ),
    "hold-not-read": Plant(
        breaks="a new leader does not read what operators hold the pool to",
        patches=_hold_not_read,
        kinds=("operator", "kill_leader", "pause_leader", "shift"),
    ),
    "switch-alone": Plant(
        breaks="a rank switches as soon as it has staged, whatever the others have",
        patches=_switch_alone,
    ),
    "stage-before-write": Plant(
        breaks="ranks stage a layout that the store does not have yet",
        patches=_stage_before_write,
    ),
    "epoch-reused": Plant(
        breaks="a new epoch gets the number of the one before",
        patches=_epoch_reused,
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
            (LeaderState, "has_run_out", _always(False)),
        ],
    ),
    "failover-trusted": Plant(
        breaks="a lease is taken as the latest although the store failed over since it was written",
        patches=_failover_trusted,
        kinds=("store_goes_back", "pause_leader", "shift"),
    ),
    "deadline-never": Plant(
        breaks="a wave has no timeout",
        patches=_deadline_never,
        kinds=("shift", "store_full", "store_down", "disk_hangs", "operator", "slow_network"),
    ),
    "epoch-written-once": Plant(
        breaks="an epoch that the store did not accept is not written again",
        patches=lambda: [(Membership, "write_again", _always(()))],
        kinds=("store_down", "store_full", "kill_worker", "stop_worker", "shift"),
    ),
    "silence-unnoticed": Plant(
        breaks="a worker that is connected and silent counts as alive",
        patches=lambda: [
            (Attendance, "silent_workers", _always(frozenset())),
            (Attendance, "note_silence", _always(())),
        ],
        kinds=("pause_worker", "isolate", "cut", "shift"),
    ),
    "old-term-obeyed": Plant(
        breaks="workers obey a leader whose term is over",
        patches=lambda: [(Agent, "_outdated", _always(""))],
        kinds=("old_leader", "kill_leader", "shift"),
    ),
    "pull-unverified": Plant(
        breaks="pulled bytes are not compared with their checksum",
        patches=lambda: [(ExpertPuller, "_verify", _verified)],
        kinds=("corrupt_transfers", "shift", "kill_worker"),
    ),
    "rot-unnoticed": Plant(
        breaks="slots in use are not verified again",
        patches=lambda: [(Scrubber, "_wrong", _found_good)],
        kinds=("bit_rot", "shift"),
    ),
    "rot-unreported": Plant(
        breaks="a worker whose memory is damaged stops without sending what it holds",
        patches=lambda: [(Rank, "_scrub", _scrub_in_silence)],
        kinds=("bit_rot", "shift"),
    ),
    "rot-pulled": Plant(
        breaks="experts are pulled from damaged slots without being verified",
        patches=lambda: [(ExpertPuller, "_verify", _verified)],
        kinds=("bit_rot", "shift", "kill_worker"),
    ),
    "gap-counted": Plant(
        breaks="loads of a gap in reports count as those of the window in which they arrive",
        patches=lambda: [
            (ClosedWindow, "doubt", property(_always(""))),
            (WindowLoad, "at_common_steps", lambda self, _steps: self),
        ],
        kinds=("report_gap",),
    ),
    "leap-believed": Plant(
        breaks="any number that a worker reports is believed",
        patches=lambda: [(UsedNumbers, "fault", _always(None))],
        kinds=("lie", "kill_worker", "shift"),
    ),
    "loss-unblamed": Plant(
        breaks="a worker that ends one epoch after another stays a rank",
        patches=lambda: [(Interruptions, "judge", _always(()))],
        kinds=("lie", "kill_worker", "shift"),
    ),
    "shape-unchecked": Plant(
        breaks="workers that do not fit the pool get a rank",
        patches=lambda: [(quarantine, "odd_workers", _always({}))],
        kinds=("lie", "restart_everything", "store_forgets"),
    ),
    "first-report-blamed": Plant(
        breaks="if ranks never meet, the one that reports it first is blamed, and not the host",
        patches=_first_to_report_blamed,
        kinds=("unreachable_host", "kill_worker", "shift"),
    ),
    "loss-undisputed": Plant(
        breaks="a worker that reports losses which most ranks deny is never left out for them",
        patches=_losses_undisputed,
        kinds=("false_loss", "kill_worker", "shift"),
    ),
    "generation-believed": Plant(
        breaks="a rank that reports a generation that nobody made is not named",
        patches=_unmade_generation_believed,
        kinds=("false_generation", "kill_worker", "shift"),
    ),
    "late-write-unnoticed": Plant(
        breaks="a request that the store applied after its timeout is not adopted",
        patches=lambda: [(Journal, "note_stored", _always(False))],
        kinds=("store_answers_late", "operator", "shift"),
    ),
    "ack-timeout-never": Plant(
        breaks="a worker waits for a silent balancer for ever",
        patches=lambda: [(Agent, "_watch", _for_ever)],
    ),
    "running-unsaid": Plant(
        breaks="a worker that reconnects does not say what it runs",
        patches=_without_running,
        kinds=("kill_leader", "pause_leader", "reset", "shift", "operator"),
    ),
    "rollout-outlives-epoch": Plant(
        breaks="a lost rank does not end its rollout, which continues in the next epoch",
        patches=_rollout_outlives_epoch,
        kinds=("kill_worker", "shift", "slow_network", "disk_hangs"),
    ),
}
"""Every planted fault, by name."""


async def _verified(_self: Any, _payload: Any, _move: Any) -> None:
    pass
