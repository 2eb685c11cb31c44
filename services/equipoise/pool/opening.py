"""Opening epochs: from who is here to who is which rank, in which layout, told to everybody.

When that is, `planning/membership.py` decides; which layout, `planning/recovery.py`. Nothing is
told before the store has it.
"""

from equipoise.planning.membership import EpochDecision, next_epoch
from equipoise.planning.recovery import recover, recovery_moves
from equipoise.pool.commands import join_epoch
from equipoise.pool.effects import Chain, Effect, Log, Send, WriteAdopted, WriteMembership
from equipoise.pool.epoch_log import EpochRecord, Unwritten
from equipoise.pool.members import Member
from equipoise.pool.pool import Pool
from equipoise.pool.records import Membership
from equipoise.pool.silence import silent_workers
from equipoise.pool.slow_workers import excluded_workers, need_excluded
from equipoise.wire.messages import Hello

FIRST_LOOK_S = 1.0
"""Seconds between two looks at a pool that waits for its first ranks. The last Hello that it waits
for is seen at once; what comes by the clock is who is here so far, and the end of a wait of
minutes."""


def open_if_due(pool: Pool, *, now: float) -> Chain:
    """Deal the ranks anew if it is time; else remember what is waited for.

    Level-triggered: called after every word and every tick.
    """
    shape = pool.roster.shape
    if shape is None:
        return ()
    silent, excluded = silent_workers(pool, now=now), excluded_workers(pool, now=now)
    if pool.roster.settled and not (silent or excluded or pool.unheard or pool.opening.reason):
        return ()  # The usual case, at every tick of every pool: there is nothing to decide.
    opening = next_epoch(
        pool.roster.candidates(silent, excluded=excluded),
        num_ranks=pool.roster.wanted_ranks,
        slots_per_rank=shape.slots_per_rank,
        num_experts=shape.model.num_experts,
        unheard=pool.unheard,
        is_rolling_out=pool.rollouts.current is not None,
        policy=pool.policy,
        now=now,
    )
    effects = need_excluded(pool) if opening.is_down else ()
    if opening != pool.opening:
        pool.revision += 1
        pool.opening = opening
    if opening.workers:
        return (*effects, *_open(pool, opening, now=now))
    return effects


def open_by_hello(pool: Pool, hello: Hello, *, now: float) -> Chain:
    """The same because a worker came.

    Of those that a new pool waits for, hundreds perhaps, the first and the last are looked at.
    """
    is_new = not pool.roster.epoch and not pool.unheard
    brings_something = hello.running is not None or hello.group_lost is not None
    num_here = len(pool.roster.members)
    if is_new and not brings_something and 1 < num_here < pool.roster.wanted_ranks:
        return ()
    return open_if_due(pool, now=now)


def open_by_clock(pool: Pool, *, now: float) -> Chain:
    """The same because time passed, which a pool that has never opened is in no hurry to see."""
    if not pool.roster.epoch and now < pool.looked_s + FIRST_LOOK_S:
        return ()
    pool.looked_s = now
    return open_if_due(pool, now=now)


def retry(pool: Pool) -> Chain:
    """What opens the epoch once more, if the store did not take it."""
    if not pool.unwritten.failed:
        return ()
    pool.unwritten.failed = False
    return pool.unwritten.chain


def assign_returned(pool: Pool) -> Chain:
    """Ranks that came back hear who is who, as soon as all are known and written down."""
    if pool.unwritten.chain or not pool.roster.peers:
        return ()
    return tuple(
        _join_epoch(pool, member)
        for member in pool.roster.seated()
        if member.connected and not member.assigned and member.lost_reason is None
    )


def _open(pool: Pool, opening: EpochDecision, *, now: float) -> Chain:
    roster = pool.roster
    load = pool.load()
    # Nobody was told of an epoch that is not written yet, so nobody has to let go of it.
    was_told = not pool.unwritten.chain
    left_out = f"it takes no part in the next epoch: {opening.reason}" if was_told else None
    roster.open_epoch(frozenset(opening.workers), left_out=left_out)
    assert roster.shape is not None, "workers have a shape"
    topology, seated = roster.topology(), roster.seated()
    held = [member.held for member in seated]
    layout = recover(
        held,
        load=load,
        model=roster.shape.model,
        topology=topology,
        committed=pool.layouts.current,
        generation=pool.layouts.next_generation,
    )
    pool.layouts.run(layout)
    pool.begin_epoch(opened_here=True, now=now)
    if pool.verified is not None and any(table is not None for table in held):
        pool.moves = recovery_moves(held, target=layout, topology=topology, checksums=pool.verified)
    membership = Membership(epoch=roster.epoch, workers=tuple(member.name for member in seated))
    log = _note(pool, opening, membership, now=now)
    effects: list[Effect] = []
    if layout.generation != pool.layouts.stored_generation:
        effects.append(WriteAdopted(layout=layout))
        pool.adopting = layout.generation
    effects.append(WriteMembership(membership=membership))
    effects += [_join_epoch(pool, member) for member in seated]
    pool.unwritten = Unwritten(chain=tuple(effects))
    return (log, *pool.unwritten.chain)


def _note(pool: Pool, opening: EpochDecision, membership: Membership, *, now: float) -> Log:
    if opening.bound:
        pool.bounds.note(opening.bound, opening.reason)
    pool.epochs.opened(
        EpochRecord(
            epoch=membership.epoch,
            workers=membership.workers,
            reason=opening.reason,
            opened_s=now,
        )
    )
    pool.opening, pool.unheard = EpochDecision(), frozenset()
    pool.revision += 1
    return Log(
        text=f"epoch {membership.epoch} opens with {len(membership.workers)} ranks: "
        f"{opening.reason}",
        epoch=membership.epoch,
    )


def _join_epoch(pool: Pool, member: Member) -> Send:
    return join_epoch(
        pool.roster,
        member=member,
        layouts=pool.layouts,
        moves=() if member.rank is None else pool.moves.get(member.rank, ()),
        policy=pool.policy,
    )
