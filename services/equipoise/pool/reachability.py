"""`Reachability`: which workers could not connect to which when their group did not form.

`find_unreachable` decides who is at fault. No single report excludes the worker that it names.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise.planning.arrays import Bools
from equipoise.pool.member import Member

Process = tuple[str, str]
"""Name and boot ID of a worker: a restarted one is another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who is at fault that the ranks of an epoch did not meet."""

    workers: tuple[str, ...] = ()
    """Their names; empty if the reports do not show it."""

    why: str = ""
    """What the others report about each of them."""


def find_unreachable(
    ranks: Sequence[str],
    reports: Mapping[str, Bools],
    *,
    earlier: Sequence[tuple[Bools, Bools]] = (),
) -> Blame:
    """Decide from what ranks report which worker keeps their group from forming.

    A worker is at fault if at least two others could not connect to it, and more could not than
    could. If there is none, a worker is at fault that names one which at least as many others
    reached: either its own network is broken or it lies, and no group forms with it. Of several,
    that is the one that names most, so that both ends of one broken link are not excluded.

    No worker is at fault if all ranks are, because then the network is, and none is if a report
    cannot be compared with another. If no rank reports, what workers reported before of peers that
    are ranks now decides, as if the other ranks had reached the accused.

    Args:
        ranks: the workers of the epoch, in rank order.
        reports: which ranks a rank could not connect to, [ranks], by its name, of each that reports
            any or none. None names itself.
        earlier: the same, of ranks of epochs before, each with which ranks were its peers then,
            [ranks]. If a rank reports, they count against a worker only: it may have become
            unreachable since.
    """
    named, before, peers = (
        np.array(rows, dtype=np.bool_).reshape(-1, len(ranks))
        for rows in ([*reports.values()], [one for one, _ in earlier], [one for _, one in earlier])
    )
    num_named, num_before = named.sum(axis=0), before.sum(axis=0)
    accusers = num_named + num_before
    if reports:
        is_reporter = np.array([name in reports for name in ranks])
        is_accused, deniers = num_named > 0, len(reports) - is_reporter - num_named
    else:
        is_accused = num_before > 0
        deniers = np.maximum(peers.sum(axis=0), len(ranks) - 1) - num_before
    unreachable = np.flatnonzero(is_accused & (accusers > np.maximum(1, deniers))).tolist()
    if unreachable:
        is_everyone = len(unreachable) == len(ranks)
        workers = tuple(ranks[rank] for rank in unreachable)
        why = "its peers cannot connect to it"
        return Blame() if is_everyone else Blame(workers=workers, why=why)
    outvoted = named[:, is_accused & (accusers <= deniers)].sum(axis=1)
    most = outvoted.max(initial=0)
    if not most:
        return Blame()
    by_name = dict(zip(reports, outvoted.tolist(), strict=True))
    culprit = next(rank for rank in ranks if by_name.get(rank) == most)
    return Blame(workers=(culprit,), why="it cannot connect to peers that others reach")


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank reported of its peers."""

    ranks: tuple[Process, ...]
    """The ranks of its epoch; the reports of an epoch share them."""

    unreached: Bools
    """Which of them it could not connect to, [ranks]."""


class Reachability:
    """What the workers of a pool last reported about their peers, until a group of them serves."""

    def __init__(self) -> None:
        self._ranks: tuple[Process, ...] = ()
        self._reports: dict[str, _Report] = {}

    def note(
        self,
        worker: str,
        unreached: Iterable[str],
        *,
        ranks: tuple[Process, ...],
        known: Container[str],
    ) -> None:
        """The group of these `ranks` did not form; names other than of its peers say nothing.

        Only workers that are `known` to the pool are remembered.
        """
        named = frozenset(unreached) - {worker}
        if ranks != self._ranks:
            self._ranks = ranks
        self._reports[worker] = _Report(
            self._ranks, np.array([name in named for name, _ in ranks], dtype=np.bool_)
        )
        for name in [name for name in self._reports if name not in known]:
            del self._reports[name]

    def note_serving(self, ranks: Iterable[Member]) -> None:
        """These ranks reached each other."""
        seated = frozenset(map(process_of, ranks))
        for name, _ in seated:
            self._reports.pop(name, None)
        groups = {id(report.ranks): report.ranks for report in self._reports.values()}
        is_other = {
            group: np.array([process not in seated for process in processes], dtype=np.bool_)
            for group, processes in groups.items()
        }
        self._reports = {
            name: replace(report, unreached=report.unreached & is_other[id(report.ranks)])
            for name, report in self._reports.items()
        }

    def blame(self, ranks: Sequence[Member], *, reporters: Container[str]) -> Blame:
        """Who is at fault that these ranks did not meet; `reporters` are those that noted it.

        What others noted is of epochs before.
        """
        rank_of = {process_of(one): rank for rank, one in enumerate(ranks)}
        groups = {id(report.ranks): report.ranks for report in self._reports.values()}
        # The rank that each process of a group has now; those without one are the last column.
        columns = {
            group: np.array([rank_of.get(process, len(ranks)) for process in processes], dtype=int)
            for group, processes in groups.items()
        }
        names, nobody = [one.name for one in ranks], np.zeros(len(ranks), dtype=np.bool_)
        own = {name: rank for rank, name in enumerate(names)}
        said: dict[str, tuple[Bools, Bools]] = {}
        for worker, report in self._reports.items():
            named, peers = np.zeros((2, len(ranks) + 1), dtype=np.bool_)
            named[columns[id(report.ranks)][report.unreached]] = True
            peers[columns[id(report.ranks)]] = True
            peers[own.get(worker, len(ranks))] = False
            said[worker] = named[:-1], peers[:-1]
        reports = {name: said.pop(name, (nobody, nobody))[0] for name in names if name in reporters}
        return find_unreachable(names, reports, earlier=[*said.values()])


def process_of(member: Member) -> Process:
    """A worker's process: a restarted one has yet to prove itself."""
    return member.name, member.hello.boot_id
