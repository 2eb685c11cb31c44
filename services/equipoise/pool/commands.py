"""Commands of the rollout table as effects: what the store writes and each rank is sent."""

from equipoise.planning.moves import Move, diff
from equipoise.planning.policy import Policy
from equipoise.planning.rollout import (
    Commands,
    PersistCommitted,
    PersistProposed,
    SendAbort,
    SendStage,
)
from equipoise.pool.checksums import ChecksumTable
from equipoise.pool.effects import Chain, Effect, Send, WriteCommitted, WriteProposed
from equipoise.pool.layouts import PoolLayouts
from equipoise.pool.members import Member, Roster
from equipoise.wire.messages import Abort, JoinEpoch, Stage


def orders(
    commands: Commands,
    *,
    roster: Roster,
    layouts: PoolLayouts,
    checksums: ChecksumTable,
    policy: Policy,
) -> Chain:
    """The effects that carry out `commands`, in order."""
    effects: list[Effect] = []
    for command in commands:
        match command:
            case PersistProposed():
                effects.append(WriteProposed(layout=command.layout))
            case SendStage():
                effects += stage_orders(
                    command, roster=roster, layouts=layouts, checksums=checksums, policy=policy
                )
            case PersistCommitted():
                effects.append(
                    WriteCommitted(
                        generation=command.layout.generation, previous=layouts.stored_generation
                    )
                )
            case SendAbort():
                effects += [
                    Send(
                        worker=member.name,
                        message=Abort(
                            epoch=roster.epoch,
                            generation=command.generation,
                            reason=command.reason,
                        ),
                    )
                    for member in roster.seated()
                ]
    return tuple(effects)


def stage_orders(
    command: SendStage,
    *,
    roster: Roster,
    layouts: PoolLayouts,
    checksums: ChecksumTable,
    policy: Policy,
) -> Chain:
    """A Stage for every rank; one without moves still takes part in the agreement."""
    base = layouts.get(command.base_generation)
    assert base is not None, "the base of a rollout is what ranks run"
    moves = diff(base, command.layout, topology=roster.topology(), checksums=checksums.table())
    return tuple(
        Send(
            worker=member.name,
            message=Stage(
                epoch=roster.epoch,
                layout=command.layout,
                base_generation=base.generation,
                base=base,
                moves=moves.get(rank, ()),
                timeout_s=policy.stage_timeout_s,
            ),
        )
        for rank, member in enumerate(roster.seated())
    )


def join_epoch(
    roster: Roster,
    *,
    member: Member,
    layouts: PoolLayouts,
    moves: tuple[Move, ...],
    policy: Policy,
) -> Send:
    """Tell a seated worker its rank, its peers and the layout it runs or is to start in."""
    assert member.rank is not None, "only a rank is assigned"
    layout = layouts.get(member.generation) or layouts.current
    assert layout is not None, "an epoch has a layout"
    member.assigned, member.heartbeat_s = True, policy.heartbeat_interval_s
    return Send(
        worker=member.name,
        message=JoinEpoch(
            epoch=roster.epoch,
            rank=member.rank,
            peers=roster.peers,
            rendezvous_address=roster.rendezvous_address,
            layout=layout,
            report_interval_s=policy.report_interval_s,
            heartbeat_interval_s=policy.heartbeat_interval_s,
            moves=() if member.serving else moves,
            meet_timeout_s=policy.meet_timeout_s,
        ),
    )
