"""`candidate`: what the decision about the next epoch knows of a worker."""

from equipoise.planning.membership import EpochCandidate, MemberState
from equipoise.pool.member import Member


def candidate(
    member: Member, *, is_apart: bool, is_silent: bool, excluded: str, quarantined: str
) -> EpochCandidate:
    """Return a worker's state.

    `is_apart` says that it runs in a group of which no rank of the epoch is a part, `excluded` and
    `quarantined` why it must not serve, if so.
    """
    state, reason = MemberState.NEW, ""
    if not member.connected or is_silent:
        state = MemberState.STUCK if member.rank is None else MemberState.MISSING
        silence = "it sends no valid heartbeat" if member.rejected else "it is silent"
        reason = member.gone_reason or silence
    elif quarantined:
        takes_part = member.rank is not None and member.lost_reason is None
        state = MemberState.QUARANTINED if takes_part else MemberState.STUCK
        reason = quarantined
    elif excluded and member.rank is None:
        state, reason = MemberState.STUCK, excluded
    elif excluded and (member.later_epoch or member.lost_reason is not None):
        state, reason = MemberState.MISSING, excluded
    elif excluded and member.serving:
        state, reason = MemberState.SLOW, excluded
    elif member.lost_reason is not None:
        state = MemberState.NEW if member.rank is None else MemberState.SURVIVOR
        reason = member.lost_reason
    elif member.left_out is not None:
        state, reason = MemberState.NEW if is_apart else MemberState.STUCK, member.left_out
    elif member.rank is not None and member.later_epoch:
        state, reason = MemberState.AHEAD, f"it has already taken up epoch {member.later_epoch}"
    elif member.rank is not None:
        state = MemberState.SERVING if member.serving else MemberState.JOINING
    return EpochCandidate(
        name=member.name,
        state=state,
        since_s=member.since_s,
        holds=member.lost_reason is not None or is_apart,
        reason=reason,
        num_places=member.hello.num_places,
    )
