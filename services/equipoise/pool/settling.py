"""Making our books agree with what the ranks run. The ranks are right."""

from equipoise.planning.layout import Layout
from equipoise.planning.reconcile import reconcile
from equipoise.pool.effects import Chain, Log, WriteAdopted, WriteMembership
from equipoise.pool.loads import PoolLoads
from equipoise.pool.pool import Pool
from equipoise.pool.records import Membership

_CONTRADICTION = "generations of ranks"


def settle(pool: Pool, *, now: float) -> Chain:
    """Once all ranks have told what they run, and nothing is rolled out: take it as the truth.

    Level-triggered and idempotent: called after every word and every tick, it mostly does nothing.
    """
    if not pool.roster.complete or pool.rollouts.current is not None:
        return ()
    effects = _reconcile(pool, now=now) if pool.must_reconcile else ()
    running = {member.generation for member in pool.roster.seated()}
    if len(running) != 1 or pool.must_reconcile or pool.rollouts.current is not None:
        return effects
    layout = pool.layouts.get(running.pop())
    if layout is None:
        return effects
    if pool.loads is None:
        pool.loads = _open_loads(pool, layout, now=now)
        pool.epochs.note_serving(pool.roster.epoch, now=now)
    return (*effects, *_adopt(pool, layout))


def _adopt(pool: Pool, layout: Layout) -> Chain:
    if pool.layouts.current is not layout:
        pool.layouts.run(layout)
        pool.revision += 1
    if layout.generation in {pool.layouts.stored_generation, pool.adopting}:
        return ()
    pool.adopting = layout.generation
    generation = layout.generation
    log = Log(text=f"all ranks run generation {generation}: committed", generation=generation)
    return (log, WriteAdopted(layout=layout))


def _reconcile(pool: Pool, *, now: float) -> Chain:
    """Meet ranks that served on without us: a wave may be anywhere between staged and switched."""
    members = pool.roster.seated()
    epoch = Membership(epoch=pool.roster.epoch, workers=tuple(member.name for member in members))
    committed = pool.layouts.current
    if (
        committed is None
        or pool.roster.shape is None
        or not pool.layouts.fits(committed, pool.roster.shape, num_ranks=pool.roster.num_ranks)
    ):
        # The store knows nothing of these ranks; what they agree on is adopted as it is.
        pool.must_reconcile = len({member.generation for member in members}) != 1
        return () if pool.must_reconcile else (WriteMembership(membership=epoch),)
    result = reconcile(
        generations_of_ranks=dict(enumerate(member.generation for member in members)),
        staged_of_ranks=dict(enumerate(member.staged_generation for member in members)),
        proposed=pool.layouts.proposed,
        committed=committed,
        policy=pool.policy,
        now=now,
    )
    if result.generation is None:
        # Perhaps a word is still on its way; until then nothing is planned.
        pool.faults[_CONTRADICTION] = result.reason
        return ()
    pool.faults.pop(_CONTRADICTION, None)
    pool.must_reconcile = False
    if result.rollout is not None:
        pool.rollouts.resume(result.rollout, now=now)
    log = Log(text=result.reason, epoch=pool.roster.epoch, generation=result.generation)
    return (log, *pool.obey(result.commands), WriteMembership(membership=epoch))


def _open_loads(pool: Pool, layout: Layout, *, now: float) -> PoolLoads:
    shape = pool.roster.shape
    assert shape is not None, "a complete pool has a shape"
    return PoolLoads(
        epoch=pool.roster.epoch,
        model=shape.model,
        num_ranks=pool.roster.num_ranks,
        policy=pool.policy,
        remembered=pool.averages,
        # Ranks that we found serving began their generation before we listened.
        counted_from=1 if pool.opened_here else layout.generation + 1,
        now=now,
    )
