"""`choose_group`: which running group a balancer takes over that did not open its epoch.

After a change of leader, workers report what they run. One of them may be wrong, or left over from
an older epoch: the group that most of them report counts, not the first to connect. Stateless.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equipoise.planning.layout import digest_text
from equipoise.planning.membership import few
from equipoise.planning.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningClaim:
    """What a connected worker reports to run."""

    worker: str
    """Its name."""

    epoch: int
    """The epoch of its group."""

    workers: tuple[str, ...]
    """The workers of that epoch, in rank order."""

    generation: int
    """The generation that it runs."""

    digest: bytes
    """Digest of that layout."""

    is_rank: bool = False
    """Whether this balancer counts it as a rank already."""

    engine: str = ""
    """The engine of another project that it is part of; empty for our workers."""

    @property
    def group(self) -> tuple[int, tuple[str, ...]]:
        """What all claims of a group have in common."""
        return self.epoch, self.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """Which group to take over."""

    ranks: tuple[RunningClaim, ...] = ()
    """The claims that agree; empty if no group is taken over."""

    contradicting: Mapping[str, str]
    """Why each other claim is not followed, by worker."""

    is_waiting: bool = False
    """Whether workers that have not connected could still decide otherwise."""

    is_late: bool = False
    """Whether it was decided without workers that did not connect in time."""

    reason: str
    """What was decided, or what the pool waits for."""

    @property
    def is_new_group(self) -> bool:
        """Whether the group replaces one that this balancer counts already, or none."""
        return bool(self.ranks) and not any(claim.is_rank for claim in self.ranks)


def choose_group(
    claims: Sequence[RunningClaim],
    *,
    recorded: tuple[int, tuple[str, ...]],
    connected: Collection[str],
    num_opposed: int,
    known: Mapping[int, bytes],
    waited_s: float,
    policy: Policy,
) -> GroupChoice:
    """Choose the group with the most claims, once no absent worker can change that.

    Of groups with equally many, it is the one with more workers on record, else the one on record,
    else the one with more ranks that this balancer counts already, else that of the later epoch. If
    more workers show that no group runs than any group has, none is taken over.

    Args:
        claims: what connected workers report to run; at least one.
        recorded: the latest epoch on record, and its workers in rank order; none if it is 0.
        connected: names of all connected workers.
        num_opposed: connected workers that show that no group runs: ranks of an epoch that this
            balancer opened, or workers whose group has ended.
        known: digests of the layouts on record, by generation.
        waited_s: seconds since the first claim. After `policy.reform_timeout_s` absent workers are
            not waited for.
        policy: the timeouts.
    """
    agreeing = [_agreeing(group, known=known) for group in _groups(claims)]
    best, *others = _by_weight(agreeing, recorded)
    second = max(num_opposed, 1 + max(map(len, others), default=0))
    epoch, num_ranks = best[0].epoch, len(best[0].workers)
    absent = len(set(recorded[1]).difference(connected))
    if not recorded[1]:  # One claim alone proves nothing.
        absent = max(num_ranks, 2) - len(claims) - num_opposed
    what = f"{len(best)} of {num_ranks} ranks of epoch {epoch} ({_names(best)})"
    is_decided = absent <= 0 or len(best) >= second + absent or num_opposed > len(best) + absent
    if not is_decided and waited_s < policy.reform_timeout_s:
        return GroupChoice(
            contradicting={},
            is_waiting=True,
            reason=f"{what} report what they run: waiting for {absent} more workers, at most "
            f"{policy.reform_timeout_s:g} s",
        )
    late = f", {absent} expected workers did not connect within {policy.reform_timeout_s:g} s"
    if num_opposed > len(best):
        reason = (
            f"only {what} report that they run, but {num_opposed} workers are in another epoch or "
            "wait for one"
        )
        ranks: tuple[RunningClaim, ...] = ()
        contradicting: Mapping[str, str] = {claim.worker: reason for claim in claims}
    else:
        reason, ranks = f"{what} report what they run", best
        contradicting = _contradictions(claims, best)
    return GroupChoice(
        ranks=ranks,
        contradicting=contradicting,
        is_late=not is_decided,
        reason=reason if is_decided else reason + late,
    )


def _groups(claims: Sequence[RunningClaim]) -> Collection[Sequence[RunningClaim]]:
    """The claims of each group, in the order in which the first ones come.

    Claims of a group usually share one list of its workers, of which there may be thousands.
    """
    groups = defaultdict[tuple[int, tuple[str, ...]], list[RunningClaim]](list)
    with_list: dict[tuple[int, int], list[RunningClaim]] = {}
    for claim in claims:
        key = claim.epoch, id(claim.workers)
        if key not in with_list:
            with_list[key] = groups[claim.group]
        with_list[key].append(claim)
    return groups.values()


def _agreeing(
    group: Sequence[RunningClaim], *, known: Mapping[int, bytes]
) -> tuple[RunningClaim, ...]:
    """The claims of a group that agree on the layout of each generation."""
    votes = Counter((claim.generation, claim.digest) for claim in group)
    rank_of = {worker: rank for rank, worker in enumerate(group[0].workers)}
    digests: dict[int, bytes] = {}
    for claim in sorted(
        group,
        key=lambda one: (
            -votes[one.generation, one.digest],
            known.get(one.generation) != one.digest,
            rank_of[one.worker],
        ),
    ):
        digests.setdefault(claim.generation, claim.digest)
    return tuple(claim for claim in group if digests[claim.generation] == claim.digest)


def _by_weight(
    agreeing: Sequence[tuple[RunningClaim, ...]], recorded: tuple[int, tuple[str, ...]]
) -> list[tuple[RunningClaim, ...]]:
    """The claims that agree of each group, the one with the most weight first."""
    on_record = frozenset(recorded[1])

    def weight(ranks: tuple[RunningClaim, ...]) -> tuple[int, ...]:
        return (
            len(ranks),
            sum(one.worker in on_record for one in ranks),
            ranks[0].group == recorded,
            sum(one.is_rank for one in ranks),
            ranks[0].epoch,
        )

    return sorted(agreeing, key=weight, reverse=True)


def _contradictions(
    claims: Sequence[RunningClaim], ranks: Sequence[RunningClaim]
) -> Mapping[str, str]:
    """Why each claim that is not of `ranks` does not agree with the group that is taken over."""
    one, agreed = ranks[0], frozenset(claim.worker for claim in ranks)
    digests = {claim.generation: claim.digest for claim in ranks}
    members = frozenset(one.workers)
    found: dict[str, str] = {}
    # By the list of workers, which claims of a group share: whether it is that of `ranks`, and
    # whether none of these is in it, so that no rank would end that group.
    compared: dict[int, tuple[bool, bool]] = {}
    for claim in claims:
        if claim.worker in agreed:
            continue
        key = id(claim.workers)
        if key not in compared:
            compared[key] = claim.workers == one.workers, members.isdisjoint(claim.workers)
        is_same, is_apart = compared[key]
        if is_same and claim.epoch == one.epoch:
            found[claim.worker] = (
                f"it runs generation {claim.generation} as layout {digest_text(claim.digest)}, but "
                f"other ranks as {digest_text(digests[claim.generation])}: restart it"
            )
        elif claim.epoch == one.epoch and not is_apart:
            found[claim.worker] = (
                f"it runs in epoch {claim.epoch} with other ranks than {len(ranks)} workers "
                "report: restart it"
            )
        else:
            then = "it can join the next" if is_apart else "it can join once its group has ended"
            if is_apart and claim.engine:
                then = "give its engine a pool of its own"
            found[claim.worker] = (
                f"it runs in epoch {claim.epoch}, but {len(ranks)} of {len(one.workers)} ranks of "
                f"epoch {one.epoch} are connected: {then}"
            )
    return found


def _names(ranks: Sequence[RunningClaim]) -> str:
    return few(sorted(one.worker for one in ranks))
