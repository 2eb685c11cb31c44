"""`Reachability`: which workers could not connect to which when their group did not form.

`find_unreachable` decides who is at fault. No single report excludes the worker that it names.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    reports: Mapping[str, Container[str]],
    *,
    earlier: Iterable[Container[str]] = (),
) -> Blame:
    """Decide from what ranks report which worker keeps their group from forming.

    A worker is at fault if at least two others could not connect to it, and more could not than
    could. If there is none, a worker is at fault that names one which at least as many others
    reached: either its own network is broken or it lies, and no group forms with it. Of several,
    that is the one that names most, so that both ends of one broken link are not excluded.

    No worker is at fault if all ranks are, because then the network is, and none is if a report
    cannot be compared with another.

    Args:
        ranks: the workers of the epoch, in rank order.
        reports: the peers that a rank could not connect to, by its name, of each that reports any
            or none.
        earlier: the same, of workers that were ranks before and are not now. They count against a
            worker only: it may have become unreachable since.
    """
    elsewhere = tuple(earlier)

    def accusers(name: str) -> int:
        return sum(name in named for named in (*reports.values(), *elsewhere))

    def deniers(name: str) -> int:
        return sum(name not in named for rank, named in reports.items() if rank != name)

    accused = [name for name in ranks if any(name in named for named in reports.values())]
    unreachable = [name for name in accused if accusers(name) > max(1, deniers(name))]
    if unreachable:
        is_everyone = len(unreachable) == len(ranks)
        why = "its peers cannot connect to it"
        return Blame() if is_everyone else Blame(workers=tuple(unreachable), why=why)
    reached = [name for name in accused if accusers(name) <= deniers(name)]
    outvoted = {rank: sum(name in named for name in reached) for rank, named in reports.items()}
    most = max(outvoted.values(), default=0)
    if not most:
        return Blame()
    culprit = next(rank for rank in ranks if outvoted.get(rank) == most)
    return Blame(workers=(culprit,), why="it cannot connect to peers that others reach")


class Reachability:
    """What the workers of a pool last reported about their peers, until a group of them serves."""

    def __init__(self) -> None:
        self._unreached: dict[str, frozenset[Process]] = {}

    def note(
        self,
        worker: str,
        unreached: Container[str],
        *,
        ranks: Iterable[Member],
        known: Container[str],
    ) -> None:
        """A rank's group did not form; names other than those of its peers say nothing.

        Only workers that are `known` to the pool are remembered.
        """
        self._unreached[worker] = frozenset(
            process_of(one) for one in ranks if one.name in unreached and one.name != worker
        )
        for name in [name for name in self._unreached if name not in known]:
            del self._unreached[name]

    def note_serving(self, ranks: Iterable[Member]) -> None:
        """These ranks reached each other."""
        seated = frozenset(map(process_of, ranks))
        for name, _ in seated:
            self._unreached.pop(name, None)
        self._unreached = {name: peers - seated for name, peers in self._unreached.items()}

    def blame(self, ranks: Sequence[Member], *, reporters: Container[str]) -> Blame:
        """Who is at fault that these ranks did not meet; `reporters` are those that noted it."""
        names = {process_of(one): one.name for one in ranks}
        seated = tuple(names.values())
        said = {
            worker: frozenset(names[peer] for peer in peers if peer in names)
            for worker, peers in self._unreached.items()
        }
        return find_unreachable(
            seated,
            {name: said.get(name, frozenset()) for name in seated if name in reporters},
            earlier=[peers for name, peers in said.items() if name not in seated],
        )


def process_of(member: Member) -> Process:
    """A worker's process: a restarted one has yet to prove itself."""
    return member.name, member.hello.boot_id
