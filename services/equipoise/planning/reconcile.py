"""`reconcile`: how a restarted balancer resumes a pool that kept running without it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import Commands, PersistCommitted, SendAbort, State, Wave


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reconciliation:
    """The state of a pool, and what to do."""

    generation: int | None
    """The generation that the ranks run; None if they contradict each other and need a new epoch.
    If it is neither the committed nor the proposed one, its layout comes from the ranks."""
    wave: Wave | None
    """The wave to resume, if any."""
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
        committed: the committed layout in the store. Where ranks run another layout than the store
            has under a number, both are that of the ranks.
        policy: the timeouts of a resumed wave.
        now: the current time in seconds.
    """
    running = set(generations_of_ranks.values())
    assert set(generations_of_ranks) == set(range(committed.num_ranks)), "all ranks have reported"
    if proposed is not None and proposed.generation <= committed.generation:
        proposed = None
    if proposed is not None and proposed.generation in running:
        if running <= {committed.generation, proposed.generation}:
            return _switching(
                generations_of_ranks, _resumed(committed, proposed, policy=policy, now=now)
            )
    elif running == {committed.generation}:
        resumed = None
        if proposed is not None:
            resumed = _resumed(committed, proposed, policy=policy, now=now)
        return _before_a_switch(staged_of_ranks, committed, resumed)
    elif len(running) == 1:
        generation = running.pop()
        return Reconciliation(
            generation=generation,
            wave=None,
            commands=(),
            reason=f"all ranks run generation {generation}, which the store does not have "
            f"(it has {committed.generation}): taken from the ranks",
        )
    reason = contradiction(generations_of_ranks)
    return Reconciliation(generation=None, wave=None, commands=(), reason=reason)


def contradiction(generations_of_ranks: Mapping[int, int]) -> str:
    """Return what is wrong with ranks that run different generations."""
    listed = ", ".join(f"rank {rank} {gen}" for rank, gen in sorted(generations_of_ranks.items()))
    return f"ranks run different generations ({listed}): the pool needs a new epoch"


def _resumed(committed: Layout, proposed: Layout, *, policy: Policy, now: float) -> Wave:
    """Return the wave to the proposed layout as if all ranks had staged it."""
    return Wave(
        base=committed,
        target=proposed,
        num_ranks=committed.num_ranks,
        policy=policy,
        state=State.STAGED,
        entered_s=now,
        staged_ranks=frozenset(range(committed.num_ranks)),
        reason=f"all ranks have staged generation {proposed.generation} and will switch to it",
    )


def _switching(generations_of_ranks: Mapping[int, int], resumed: Wave) -> Reconciliation:
    """A rank runs the proposed generation, so by agreement all ranks switched with it."""
    proposed = resumed.target
    switched = frozenset(
        rank for rank, running in generations_of_ranks.items() if running == proposed.generation
    )
    has_all = switched == resumed.staged_ranks
    reason = (
        f"all ranks run generation {proposed.generation}, which is not committed yet"
        if has_all
        else f"ranks {sorted(switched)} run generation {proposed.generation}; "
        f"the others switched with them and will report it"
    )
    return Reconciliation(
        generation=proposed.generation,
        wave=replace(
            resumed,
            state=State.SWITCHED if has_all else State.STAGED,
            switched_ranks=switched,
            reason=reason,
        ),
        commands=(PersistCommitted(layout=proposed),) if has_all else (),
        reason=reason,
    )


def _before_a_switch(
    staged_of_ranks: Mapping[int, int], committed: Layout, resumed: Wave | None
) -> Reconciliation:
    """All ranks run the committed generation; a completely staged one resumes.

    Otherwise its wave is kept as aborted: a rank may have staged it after its report, so the switch
    may cross the abort.
    """
    staged = {rank: generation for rank, generation in staged_of_ranks.items() if generation}
    dropped = set(staged.values())
    if resumed is not None:
        proposed = resumed.target.generation
        if staged == dict.fromkeys(resumed.staged_ranks, proposed):
            return Reconciliation(
                generation=committed.generation,
                wave=resumed,
                commands=(),
                reason=resumed.reason,
            )
        dropped.add(proposed)
    why = "the balancer restarted before all ranks had staged it"
    if resumed is not None:
        resumed = replace(resumed, state=State.ABORTED, staged_ranks=frozenset(), reason=why)
    reason = f"all ranks run generation {committed.generation}, the committed one"
    if dropped:
        reason += f"; {', '.join(map(str, sorted(dropped)))} is dropped: {why}"
    return Reconciliation(
        generation=committed.generation,
        wave=resumed,
        commands=tuple(
            SendAbort(generation=generation, reason=why) for generation in sorted(dropped)
        ),
        reason=reason,
    )
