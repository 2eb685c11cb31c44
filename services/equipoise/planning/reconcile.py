"""`reconcile`: what a balancer that comes back does with a pool that went on without it."""

from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Commands, PersistCommitted, Rollout, SendAbort, State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reconciliation:
    """What is true of a pool, and what to do.

    `generation` is the one that ranks run, or None if they contradict each other: then only a new
    epoch helps. A generation that is neither the committed nor the proposed one is taken from the
    ranks, which have its layout. `rollout`, if there is one, goes on from where it was.
    """

    generation: int | None
    rollout: Rollout | None
    commands: Commands
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
    """Compare what all ranks report with what the store holds; the ranks are right.

    `generations_of_ranks` has the generation that each rank runs, `staged_of_ranks` the one that it
    has staged and not switched to, 0 or absent for none. `proposed` is the store's proposed layout,
    if it is newer than `committed`.
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
            f"(it has {committed.generation}); taken over from the ranks",
        )
    listed = ", ".join(f"rank {rank} {gen}" for rank, gen in sorted(generations_of_ranks.items()))
    return Reconciliation(
        generation=None,
        rollout=None,
        commands=(),
        reason=f"ranks run different generations ({listed}); the pool needs a new epoch",
    )


def _switching(
    generations_of_ranks: Mapping[int, int],
    committed: Layout,
    proposed: Layout,
    policy: Policy,
    now: float,
) -> Reconciliation:
    """Some rank runs the proposed generation, so by agreement all do or are about to say so."""
    all_ranks = frozenset(range(committed.num_ranks))
    switched = frozenset(
        rank for rank, running in generations_of_ranks.items() if running == proposed.generation
    )
    has_all = switched == all_ranks
    reason = (
        f"all ranks run generation {proposed.generation}, which was not committed yet"
        if has_all
        else f"ranks {sorted(switched)} run generation {proposed.generation}; "
        f"the others switched with them and will say so"
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
    """All ranks run the committed generation; what they staged goes on if it is whole.

    What is not whole is aborted, as a rollout: a rank may have staged it after its report, and then
    the switch crosses the abort.
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
    given_up = set(staged.values()) | ({proposed.generation} if proposed is not None else set())
    why = "the balancer was restarted before all ranks had staged it"
    dropped = ", ".join(str(generation) for generation in sorted(given_up))
    return Reconciliation(
        generation=committed.generation,
        rollout=_aborted(committed, proposed, policy, now, why) if proposed is not None else None,
        commands=tuple(
            SendAbort(generation=generation, reason=why) for generation in sorted(given_up)
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
