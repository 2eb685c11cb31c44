"""`reconcile`: how a restarted balancer resumes a pool that kept running without it."""

from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Commands, PersistCommitted, Rollout, SendAbort, State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reconciliation:
    """The state of a pool, and what to do."""

    generation: int | None
    """The generation that the ranks run; None if they contradict each other and need a new epoch.
    If it is neither the committed nor the proposed one, its layout comes from the ranks."""
    rollout: Rollout | None
    """The rollout to resume, if any."""
    commands: Commands
    """What to do, in order."""
    reason: str


def reconcile(
    *,
    generations_of_ranks: Mapping[int, int],
    staged_of_ranks: Mapping[int, int],
    proposed: Layout | None,
    committed: Layout,
    policy: Policy,
    now: float,
) -> Reconciliation:
    """Compare what all ranks report with what the store holds; the ranks prevail.

    Args:
        generations_of_ranks: the generation that each rank runs.
        staged_of_ranks: the generation that each rank has staged but not switched to; 0 or absent
            for none.
        proposed: the proposed layout in the store; ignored unless it is newer than `committed`.
        committed: the committed layout in the store.
        policy: the timeouts of a resumed rollout.
        now: the current time in seconds.
    """
    running = set(generations_of_ranks.values())
    assert set(generations_of_ranks) == set(range(committed.num_ranks)), "all ranks have reported"
    if proposed is not None and proposed.generation <= committed.generation:
        proposed = None
    if proposed is not None and proposed.generation in running:
        if running <= {committed.generation, proposed.generation}:
            return _switching(generations_of_ranks, committed, proposed, policy, now)
    elif running == {committed.generation}:
        return _before_a_switch(staged_of_ranks, committed, proposed, policy, now)
    elif len(running) == 1:
        generation = running.pop()
        return Reconciliation(
            generation=generation,
            rollout=None,
            commands=(),
            reason=f"all ranks run generation {generation}, which the store does not have "
            f"(it has {committed.generation}): taken from the ranks",
        )
    listed = ", ".join(f"rank {rank} {gen}" for rank, gen in sorted(generations_of_ranks.items()))
    return Reconciliation(
        generation=None,
        rollout=None,
        commands=(),
        reason=f"ranks run different generations ({listed}): the pool needs a new epoch",
    )


def _switching(
    generations_of_ranks: Mapping[int, int],
    committed: Layout,
    proposed: Layout,
    policy: Policy,
    now: float,
) -> Reconciliation:
    """A rank runs the proposed generation, so by agreement all ranks switched with it."""
    all_ranks = frozenset(range(committed.num_ranks))
    switched = frozenset(
        rank for rank, running in generations_of_ranks.items() if running == proposed.generation
    )
    has_all = switched == all_ranks
    reason = (
        f"all ranks run generation {proposed.generation}, which is not committed yet"
        if has_all
        else f"ranks {sorted(switched)} run generation {proposed.generation}; "
        f"the others switched with them and will report it"
    )
    rollout = Rollout(
        base=committed,
        target=proposed,
        num_ranks=committed.num_ranks,
        policy=policy,
        state=State.SWITCHED if has_all else State.STAGED,
        entered_s=now,
        staged_ranks=all_ranks,
        switched_ranks=switched,
        reason=reason,
    )
    commands = (PersistCommitted(layout=proposed),) if has_all else ()
    return Reconciliation(
        generation=proposed.generation, rollout=rollout, commands=commands, reason=reason
    )


def _before_a_switch(
    staged_of_ranks: Mapping[int, int],
    committed: Layout,
    proposed: Layout | None,
    policy: Policy,
    now: float,
) -> Reconciliation:
    """All ranks run the committed generation; a completely staged one resumes.

    Otherwise it is aborted, as a rollout: a rank may have staged it after its report, so the switch
    may cross the abort.
    """
    staged = {rank: generation for rank, generation in staged_of_ranks.items() if generation}
    all_ranks = frozenset(range(committed.num_ranks))
    if proposed is not None and staged == dict.fromkeys(all_ranks, proposed.generation):
        reason = f"all ranks have staged generation {proposed.generation} and will switch to it"
        rollout = Rollout(
            base=committed,
            target=proposed,
            num_ranks=committed.num_ranks,
            policy=policy,
            state=State.STAGED,
            entered_s=now,
            staged_ranks=all_ranks,
            reason=reason,
        )
        return Reconciliation(
            generation=committed.generation, rollout=rollout, commands=(), reason=reason
        )
    dropped_generations = set(staged.values()) | (
        {proposed.generation} if proposed is not None else set()
    )
    why = "the balancer restarted before all ranks had staged it"
    dropped = ", ".join(str(generation) for generation in sorted(dropped_generations))
    return Reconciliation(
        generation=committed.generation,
        rollout=_aborted(committed, proposed, policy, now, why) if proposed is not None else None,
        commands=tuple(
            SendAbort(generation=generation, reason=why)
            for generation in sorted(dropped_generations)
        ),
        reason=f"all ranks run generation {committed.generation}, the committed one"
        + (f"; {dropped} is dropped: {why}" if dropped else ""),
    )


def _aborted(
    committed: Layout, proposed: Layout, policy: Policy, now: float, reason: str
) -> Rollout:
    return Rollout(
        base=committed,
        target=proposed,
        num_ranks=committed.num_ranks,
        policy=policy,
        state=State.ABORTED,
        entered_s=now,
        reason=reason,
    )
