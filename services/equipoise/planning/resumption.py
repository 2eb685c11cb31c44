"""`choose_group`: which running group a balancer takes over that did not open its epoch.

After a change of leader, workers report what they run. One of them may be wrong, or left over from
an older epoch: the group that most of them report counts, not the first to connect. Stateless.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from equipoise.planning.layout import digest_text
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
    groups = defaultdict[tuple[int, tuple[str, ...]], list[RunningClaim]](list)
    for claim in claims:
        groups[claim.group].append(claim)
    agreeing = [_agreeing(group, known=known) for group in groups.values()]
    best, *others = sorted(agreeing, key=lambda ranks: _weight(ranks, recorded), reverse=True)
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
        contradicting = {claim.worker: reason for claim in claims}
    else:
        reason, ranks = f"{what} report what they run", best
        contradicting = {
            claim.worker: _contradiction(claim, best) for claim in claims if claim not in best
        }
    return GroupChoice(
        ranks=ranks,
        contradicting=contradicting,
        is_late=not is_decided,
        reason=reason if is_decided else reason + late,
    )


def _agreeing(
    group: Sequence[RunningClaim], *, known: Mapping[int, bytes]
) -> tuple[RunningClaim, ...]:
    """The claims of a group that agree on the layout of each generation."""
    votes = Counter((claim.generation, claim.digest) for claim in group)
    digests: dict[int, bytes] = {}
    for claim in sorted(
        group,
        key=lambda one: (
            -votes[one.generation, one.digest],
            known.get(one.generation) != one.digest,
            one.workers.index(one.worker),
        ),
    ):
        digests.setdefault(claim.generation, claim.digest)
    return tuple(claim for claim in group if digests[claim.generation] == claim.digest)


def _weight(
    ranks: Sequence[RunningClaim], recorded: tuple[int, tuple[str, ...]]
) -> tuple[int, ...]:
    return (
        len(ranks),
        sum(one.worker in recorded[1] for one in ranks),
        ranks[0].group == recorded,
        sum(one.is_rank for one in ranks),
        ranks[0].epoch,
    )


def _contradiction(claim: RunningClaim, ranks: Sequence[RunningClaim]) -> str:
    """Why a claim does not agree with the group that is taken over."""
    one = ranks[0]
    if claim.group == one.group:
        theirs = next(other.digest for other in ranks if other.generation == claim.generation)
        return (
            f"it runs generation {claim.generation} as layout {digest_text(claim.digest)}, but "
            f"other ranks as {digest_text(theirs)}: restart it"
        )
    is_apart = set(claim.workers).isdisjoint(one.workers)  # No rank would end its group.
    if claim.epoch == one.epoch and not is_apart:
        return (
            f"it runs in epoch {claim.epoch} with other ranks than {len(ranks)} workers report: "
            "restart it"
        )
    then = "it can join the next" if is_apart else "it can join once its group has ended"
    if is_apart and claim.engine:
        then = "give its engine a pool of its own"
    return (
        f"it runs in epoch {claim.epoch}, but {len(ranks)} of {len(one.workers)} ranks of epoch "
        f"{one.epoch} are connected: {then}"
    )


def _names(ranks: Sequence[RunningClaim]) -> str:
    return ", ".join(sorted(one.worker for one in ranks))
